"""A GPU that is not there: what `torch.cuda` says and does on a CUDA build of torch without one.

Tensors on it exist under a FakeTensorMode only. Streams, events and random states are empty shells.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode

from tests.fake_device.waits import pinned, waited

GPU = torch.device("cuda", 0)
CAPABILITY = (9, 0)
_MEMORY = 80 * 2**30


class Shell:
    """A stream or an event on which nothing ever runs: every method returns at once."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = GPU

    def __enter__(self) -> Shell:
        return self

    def __exit__(self, *_: object) -> None: ...

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _nothing

    def synchronize(self) -> None:
        waited()

    def query(self) -> bool:
        return True

    def record_event(self, *_: Any) -> Shell:
        return Shell()


class NoDeviceInit(FakeTensorMode):
    """A FakeTensorMode that never touches the driver, whatever `torch.cuda` says."""

    avoid_device_init = True


class Moves(TorchFunctionMode):
    """What fake tensors do not do by themselves: pin host memory, which here stays as it is, and
    move to another device with the data that they are given.
    """

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.pin_memory:
            return pinned(args[0])
        found = func(*args, **{k: v for k, v in (kwargs or {}).items() if k != "pin_memory"})
        if func == _SET_DATA and isinstance(args[0], FakeTensor):
            assert isinstance(args[1], FakeTensor), "real data for a fake tensor"
            args[0].fake_device = args[1].fake_device
        return found


_SET_DATA = torch.Tensor.data.__set__
_new_parameter = torch.nn.Parameter.__new__


def _parameters_are_fake(mode: FakeTensorMode) -> Any:
    """All parameters are fake, also those that are made on the CPU."""

    def new(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
        if type(data) is torch.Tensor:
            data = mode.from_tensor(data)
        return _new_parameter(cls, data, requires_grad)

    return mock.patch.object(torch.nn.Parameter, "__new__", new)


def _nothing(*_: Any, **__: Any) -> None: ...


_ONE_STREAM = Shell()
_STATE = torch.zeros(16, dtype=torch.uint8)
_ANSWERS: dict[str, Any] = {
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "is_bf16_supported": lambda *_, **__: True,
    "is_current_stream_capturing": lambda: False,
    "device_count": lambda: 8,
    "current_device": lambda: GPU.index,
    "get_device_capability": lambda *_: CAPABILITY,
    "get_device_name": lambda *_: "fake",
    "get_device_properties": lambda *_: SimpleNamespace(
        major=CAPABILITY[0],
        minor=CAPABILITY[1],
        name="fake",
        total_memory=_MEMORY,
        multi_processor_count=132,
        uuid="fake",
    ),
    "mem_get_info": lambda *_: (_MEMORY, _MEMORY),
    "memory_allocated": lambda *_: 0,
    "max_memory_allocated": lambda *_: 0,
    "current_stream": lambda *_: _ONE_STREAM,
    "default_stream": lambda *_: _ONE_STREAM,
    "stream": lambda *_: nullcontext(),
    "device": lambda *_: nullcontext(),
    "Stream": Shell,
    "Event": Shell,
    "get_rng_state": lambda *_, **__: _STATE,
    "default_generators": [Shell()] * 8,
}
_SILENT = (
    "_lazy_call",
    "_lazy_init",
    "empty_cache",
    "init",
    "manual_seed",
    "manual_seed_all",
    "reset_peak_memory_stats",
    "set_device",
    "set_rng_state",
    "set_stream",
)


@contextmanager
def fake_gpu() -> Iterator[FakeTensorMode]:
    """Within this context the process seems to be bound to one of eight GPUs, and all tensors that
    are made are fake.
    """
    answers = _ANSWERS | dict.fromkeys(_SILENT, _nothing) | {"synchronize": waited}
    with (
        mock.patch.multiple(torch.cuda, **answers),
        Moves(),
        NoDeviceInit(allow_non_fake_inputs=True) as mode,
    ):
        nvtx = {"range_push": _nothing, "range_pop": _nothing, "mark": _nothing}
        random = {name: answers[name] for name in ("get_rng_state", "set_rng_state")}
        with (
            mock.patch.multiple(torch.cuda.nvtx, **nvtx),
            mock.patch.multiple(torch.cuda.random, **random),
            mock.patch.object(torch.Tensor, "record_stream", _nothing),
            _parameters_are_fake(mode),
        ):
            yield mode
