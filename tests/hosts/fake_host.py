"""Pieces of NeMo RL that the worker looks for, as far as they touch it, put where it looks."""

from __future__ import annotations

import enum
import sys
from collections import UserDict
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch


class HostBatch(UserDict):
    """The host's batch: a dict of another class."""


class Packed:
    """The host's tensors of rows that are joined where a model reads them: None in rows without."""

    def __init__(self, tensors: list[torch.Tensor | None], dim_to_pack: int) -> None:
        self.tensors, self.dim_to_pack = tensors, dim_to_pack

    def __len__(self) -> int:
        return len(self.tensors)

    def slice(self, rows: list[int]) -> Packed:
        return Packed([self.tensors[row] for row in rows], self.dim_to_pack)

    def as_tensor(self) -> torch.Tensor | None:
        found = [each for each in self.tensors if each is not None]
        return torch.cat(found, dim=self.dim_to_pack) if found else None


class Protocol(enum.Enum):
    COMPLETE = "complete"


class Meeting:
    """The host's group: remembers how it was made, and what was sent in it."""

    def __init__(self, master_address: str, port: int, rank: int, world_size: int) -> None:
        self.made = (master_address, port, rank, world_size)
        self.sent: list[tuple[str, torch.Tensor]] = []

    def init_nccl_communicator(self, device: Any, *, peer: str = "nemo") -> None:
        self.peer = peer

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        assert src == 0
        self.sent.append(("", tensor.clone()))


def produce(iterator, group, src, post_iter_func, *, buffer_size_bytes=None) -> None:
    """Takes everything at once, and no `num_buffers`, as hosts before the newest."""
    group.buffer_size_bytes = buffer_size_bytes
    group.sent += [(named[0], post_iter_func(named)) for named in iterator]
    assert src == 0


class Mixin:
    """Fetches what `meta` is, and writes back to `written`."""

    def setup_data_plane(self, cfg: dict[str, Any]) -> None:
        self.written: dict[str, Any] = cfg

    def train_presharded(self, meta: Any, loss_fn: Any, eval_mode=False, gbs=None, mbs=None) -> Any:
        self.written["group"] = self._get_replica_group()
        return self.train(meta, loss_fn=loss_fn, eval_mode=eval_mode, gbs=gbs, mbs=mbs)

    def get_logprobs_presharded(self, meta: Any, micro_batch_size: int | None = None) -> None:
        found = self.get_logprobs(data=meta, micro_batch_size=micro_batch_size)
        if not any(self._local_coords().values()):
            self.written["prev_logprobs"] = found["logprobs"]
        self.written["read"] = (self.cfg["precision"], self.tokenizer)


PARTS: dict[str, dict[str, Any]] = {
    "nemo_rl.distributed.batched_data_dict": {"BatchedDataDict": HostBatch},
    "nemo_rl.distributed.stateless_process_group": {"StatelessProcessGroup": Meeting},
    "nemo_rl.models.policy.utils": {"IPCProtocol": Protocol},
    "nemo_rl.utils.packed_tensor": {"packed_broadcast_producer": produce},
    "nemo_rl.data_plane.worker_mixin": {"TQWorkerMixin": Mixin},
}


@contextmanager
def host_with(parts: dict[str, dict[str, Any]]) -> Iterator[None]:
    """`import nemo_rl...` finds these modules with these names, and no others."""
    made: dict[str, ModuleType] = {}
    for path, names in parts.items():
        packages = path.split(".")
        for end in range(1, len(packages) + 1):
            name = ".".join(packages[:end])
            made.setdefault(name, ModuleType(name))
        vars(made[path]).update(names)
    for module in made.values():
        module.__path__ = []  # a package, in which nothing else is found
    kept = {name: module for name, module in sys.modules.items() if _is_host(name)}
    for name in kept:
        del sys.modules[name]
    sys.modules.update(made)
    try:
        yield
    finally:
        for name in [name for name in sys.modules if _is_host(name)]:
            del sys.modules[name]
        sys.modules.update(kept)


def _is_host(name: str) -> bool:
    return name.partition(".")[0] == "nemo_rl"
