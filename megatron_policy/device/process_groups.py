"""The process groups of a machine's ranks: NCCL between GPUs, gloo elsewhere.

Torch gives every gloo group devices of its own, each with a thread that wakes a hundred times a
second. Groups that are made here, or in `sharing_gloo_devices`, share those of the default group,
as gloo provides for.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from megatron_policy.device import is_accelerated

_WATCHDOG = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_MARGIN = 1.5
"""How much longer than its waits a private group's own timeout is."""

_joined = 0
"""Groups that this process has made in the store of torchrun."""
_holders = 0
"""Callers of `join_process_group` that use a group made there."""
_PACKAGES = ("megatron", "megatron_policy", "torch", "transformers")
"""The classes of what an engine consists of."""
_devices: WeakKeyDictionary[Any, list[Any]] = WeakKeyDictionary()
"""Gloo's devices of each default group; they end with it."""


def join_process_group(timeout_s: float = 600.0) -> bool:
    """Join the default process group; return whether it was made by this function: then
    `leave_process_group` is to follow.

    RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are read as torchrun and our Ray workers set them;
    without RANK the process becomes a world of one. An existing group is used as it is; in one made
    here, a collective fails after `timeout_s` seconds instead of hanging.
    """
    global _holders, _joined
    if dist.is_initialized():
        _holders += 1 if _holders else 0
        return _holders > 0
    _holders = 0
    backend, timeout = "nccl" if is_accelerated() else "gloo", timedelta(seconds=timeout_s)
    with sharing_gloo_devices():
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            # torchrun keeps one store for all groups of its processes: a second one must not find
            # the addresses of the first.
            _joined += 1
            store, rank, size = next(dist.rendezvous("env://", timeout=timeout))
            store.set_timeout(timeout)
            own = dist.PrefixStore(f"megatron_policy/{_joined}", store)
            dist.init_process_group(backend, store=own, rank=rank, world_size=size, timeout=timeout)
        elif "RANK" in os.environ:
            dist.init_process_group(backend, timeout=timeout)
        else:
            dist.init_process_group(
                backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout
            )
    _holders = 1
    return True


def leave_process_group() -> None:
    """Destroy the default process group, if there is one, once all who joined it have left."""
    global _holders
    _holders = max(_holders - 1, 0)
    if dist.is_initialized() and not _holders:
        dist.destroy_process_group()


def new_group(ranks: Sequence[int], timeout_s: float) -> Any:
    """`torch.distributed.new_group`: a group of these ranks, which all ranks make."""
    with sharing_gloo_devices():
        return dist.new_group(list(ranks), timeout=timedelta(seconds=timeout_s))


def private_group(
    store: dist.Store, rank: int, size: int, timeout_s: float, *, on_host: bool = False
) -> Any:
    """A private group of `size` processes that meet in `store`. It ends with the last reference to
    it. `on_host` makes one for host memory, where there are GPUs too.

    A collective that fails raises where it is waited for, with a timeout of at most `timeout_s`.
    NCCL's watchdog would see the same failure, and by default ends the process.
    """
    if on_host or not is_accelerated():
        with sharing_gloo_devices():
            return dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout_s))
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=_MARGIN * timeout_s)
    with _variable(_WATCHDOG, "0"):  # read once, by the constructor
        return dist.ProcessGroupNCCL(store, rank, size, options)


@contextmanager
def sharing_gloo_devices() -> Iterator[None]:
    """Within this context all gloo groups are made on the same devices: those of the default group,
    new ones if it has none yet.
    """
    if is_accelerated():
        yield
        return
    devices = _devices.get(dist.group.WORLD) if dist.is_initialized() else None
    if devices is None:  # those that torch would give to a group
        gloo, names = dist.ProcessGroupGloo, os.environ.get("GLOO_SOCKET_IFNAME", "")
        devices = (
            [gloo.create_device(interface=name) for name in names.split(",")]
            if names
            else [gloo.create_default_device()]
        )
    make = _gloo_constructor()

    def init(
        group: Any, store: dist.Store, rank: int, size: int, timeout: timedelta, *rest: Any
    ) -> None:
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices, options._timeout = devices, timeout
        options._threads = 2 * len(devices)  # as torch has it
        make(group, store, rank, size, options, *rest)

    # Torch has no argument for them: new_group ignores the options of gloo.
    dist.ProcessGroupGloo.__init__ = init  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        dist.ProcessGroupGloo.__init__ = make  # type: ignore[method-assign]
    if dist.is_initialized():
        _devices[dist.group.WORLD] = devices


@cache
def _gloo_constructor() -> Any:
    """Torch's own, also where another thread is in the context."""
    return dist.ProcessGroupGloo.__init__


def forget_groups(root: object) -> None:
    """Take the process groups from `root` and from all that it holds, by attributes and containers.

    The threads of a gloo group end with the last reference to it, and models and optimizers are
    full of them: they would last as long as a policy that is kept, or until Python's collector
    finds the cycles between them.
    """
    seen: set[int] = set()
    found: list[Any] = [root]
    while found:
        each = found.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, tuple | set | frozenset):
            found += each
            continue
        held: Any = each
        if not isinstance(each, dict | list):
            # Of what can be a part of an engine; not of functions, classes and modules, through
            # which another policy can be reached.
            package = type(each).__module__.partition(".")[0]
            part = package in _PACKAGES and not isinstance(each, type)
            held = getattr(each, "__dict__", {}) if part else {}
        for name, value in list(enumerate(held) if isinstance(held, list) else held.items()):
            if isinstance(value, dist.ProcessGroup):
                held[name] = None
            else:
                found.append(value)


@contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    """Set an environment variable within this context."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
