"""Scorecard rows 24 and 25: finding and packing what has changed of a trainer's share, over a copy
of it; and the bytes of that, over those of the changed elements.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import memmove
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from benchmarks.results import Measurement, ratio_of_minima
from megatron_policy.converters.rows.regions import Region
from megatron_policy.converters.table import Entry, bind
from megatron_policy.parallel.topology import LayerSplit, Topology
from megatron_policy.refit.deltas.changes import SentCopy, list_shares
from megatron_policy.refit.deltas.message import decode_message, encode_message
from megatron_policy.refit.deltas.patching import Patches
from megatron_policy.refit.planning import RefitModel, plan_refit

T = TypeVar("T")

QWEN2: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 5,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 32768,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "layer_types": ["full_attention"] * 5,
    "use_sliding_window": False,
    "tie_word_embeddings": True,
}
"""Some layers of Qwen2.5-1.5B, and some of its vocabulary."""
TOPOLOGY = Topology(tp=2)
CHANGED = (0.01, 0.03, 0.05)
"""Shares of the elements that change, in random places."""
CLOCK = ", by the clock"


class Trainer:
    """The parameters of the first of two tensor-parallel ranks, and its copy of what it has sent,
    all of it in bf16.
    """

    def __init__(self, held: torch.dtype) -> None:
        """Parameters of that dtype."""
        table = bind(QWEN2)
        architecture = table.architecture
        split = LayerSplit.of(architecture.num_layers, 1)
        dtypes = dict.fromkeys(table.hf_shapes(), torch.bfloat16)
        plan = plan_refit(RefitModel(table, split, dtypes, held, TOPOLOGY))
        self.shares = list(list_shares(plan, architecture, TOPOLOGY, 0))
        generator = torch.Generator().manual_seed(0)
        self.parameters: dict[str, Tensor] = {}
        for entry in (share.entry for share in self.shares):
            if entry.megatron not in self.parameters:
                shape = entry.row.local_shape(architecture, TOPOLOGY.tp)
                drawn = torch.randn(shape, generator=generator)
                self.parameters[entry.megatron] = drawn.to(held)
        self.engine = {t.name: torch.zeros(t.shape, dtype=t.dtype) for t in plan.tensors}
        for own, sent in self.pairs():
            sent.copy_(own)
        self.copy = SentCopy(self.shares, self.view)

    def view(self, entry: Entry, region: Region) -> Tensor:
        """Those elements of a parameter."""
        return self.parameters[entry.megatron].as_strided(*region)

    def pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """All that it sends, and the engine's elements that are to be the same."""
        for share in self.shares:
            for hf, own in share.pieces:
                yield self.view(share.entry, own), self.engine[share.tensor.name].as_strided(*hf)

    def change(self, share: float, seed: int) -> int:
        """Flip the last bit that bf16 has of that share of the elements; how many."""
        generator, changed = torch.Generator().manual_seed(seed), 0
        for parameter in self.parameters.values():
            chosen = torch.rand(parameter.shape, generator=generator) < share
            if parameter.dtype == torch.bfloat16:
                parameter.view(torch.int16).bitwise_xor_(chosen.to(torch.int16))
            else:
                parameter.view(torch.int32).bitwise_xor_(chosen.to(torch.int32) << 16)
            changed += int(chosen.sum())
        return changed

    def send(self) -> bytes:
        """What has changed, which the copy then has too."""
        return encode_message(self.copy.advance())

    def check(self, message: bytes) -> None:
        """Have the engine take it; RuntimeError unless it then has what the trainer has."""
        patches = Patches(self.engine)
        patches.apply(decode_message(message))
        patches.check()
        if not all(torch.equal(own.bfloat16(), sent) for own, sent in self.pairs()):
            raise RuntimeError("what was packed does not make one version the next")


def over_memcpy(folder: Path, repetitions: int) -> Measurement:
    """CPU seconds to compare, update the copy, digest and pack, at 1 % changed, in one thread, over
    a memcpy of the same bf16 share; besides by the clock, with the threads that a rank has which is
    alone; and of parameters in fp32, over memcpys of the share as it is sent and as it is held.
    """
    kept, rounding = Trainer(torch.bfloat16), Trainer(torch.float32)
    sizes = {"memcpy": kept.copy.nbytes, "memcpy of fp32": 2 * kept.copy.nbytes}
    memory = [torch.ones(max(sizes.values()), dtype=torch.uint8) for _ in range(2)]
    to, source = (each.data_ptr() for each in memory)
    turns = {"scan and pack": (kept, 1), "of fp32": (rounding, 1), "in threads": (kept, 2)}
    runs: dict[str, list[float]] = {}
    for number in range(repetitions):
        for name, (trainer, threads) in turns.items():
            trainer.change(CHANGED[0], number)
            with _limit_threads(threads):
                message = _timed(runs, name, trainer.send)
            trainer.check(message)
        for name, size in sizes.items():
            _timed(runs, name, lambda size=size: memmove(to, source, size))
    timed = {name: tuple(seconds) for name, seconds in runs.items()}

    def divide(name: str, floor: str) -> float:
        return ratio_of_minima(timed[name], timed[floor])

    beside = {
        "by the clock, in two threads": divide("in threads" + CLOCK, "memcpy" + CLOCK),
        "held in fp32": divide("of fp32", "memcpy"),
        "held in fp32, over a memcpy of fp32": divide("of fp32", "memcpy of fp32"),
    }
    verified = "the messages make every version the next one"
    return Measurement(divide("scan and pack", "memcpy"), timed, verified, beside)


def bytes_over_changed(folder: Path, repetitions: int) -> Measurement:
    """Bytes of the messages over those of changed elements, the most of 1, 3 and 5 %; no timing."""
    trainer, beside = Trainer(torch.bfloat16), {}
    for number, share in enumerate(CHANGED):
        changed = trainer.change(share, number)
        beside[f"{share:.0%}"] = len(trainer.send()) / (2 * changed)
    return Measurement(max(beside.values()), {}, "counted", beside)


def _timed(runs: dict[str, list[float]], name: str, act: Callable[[], T]) -> T:
    cpu, clock = time.process_time(), time.perf_counter()
    made = act()
    runs.setdefault(name, []).append(time.process_time() - cpu)
    runs.setdefault(name + CLOCK, []).append(time.perf_counter() - clock)
    return made


@contextmanager
def _limit_threads(threads: int) -> Iterator[None]:
    """As if so many cores were there for each rank of this machine."""
    ranks = max(1, len(os.sched_getaffinity(0)) // threads)
    before = os.environ.get("LOCAL_WORLD_SIZE")
    os.environ["LOCAL_WORLD_SIZE"] = str(ranks)
    try:
        yield
    finally:
        del os.environ["LOCAL_WORLD_SIZE"]
        if before is not None:
            os.environ["LOCAL_WORLD_SIZE"] = before
