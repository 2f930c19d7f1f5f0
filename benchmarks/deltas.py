"""Scorecard rows 24 and 25: finding and packing what has changed of a rank's weights, over a copy
of them; and the bytes of that, over those of the changed elements.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from ctypes import memmove
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from benchmarks.results import Measurement, ratio_of_minima
from megatron_policy.converters.rows.regions import Region
from megatron_policy.device import spare_cores
from megatron_policy.refit.deltas.changes import OwnShare, SentCopy
from megatron_policy.refit.deltas.message import decode_message, encode_message
from megatron_policy.refit.deltas.patching import Patches
from megatron_policy.refit.plan import RefitTensor

T = TypeVar("T")

TENSORS, ROWS, COLUMNS = 8, 4096, 4096
SHARES = (0.01, 0.03, 0.05)
"""Of elements that change, in random places."""
CLOCK = ", by the clock"


def over_memcpy(folder: Path, repetitions: int) -> Measurement:
    """CPU seconds to compare, update the copy, digest and pack, at 1 % changed, over a memcpy's;
    besides by the clock, with the threads that it uses, over a memcpy with one.
    """
    weights = _make()
    copy, elsewhere, engine = _copy_of(weights), _clone(weights), _clone(weights)
    names = ("scan and pack", "memcpy")
    runs: dict[str, list[float]] = {name + how: [] for name in names for how in ("", CLOCK)}
    for number in range(repetitions):
        _change(weights, SHARES[0], number)
        message = _timed(runs, names[0], lambda: encode_message(copy.advance()))
        _timed(runs, names[1], lambda: _copy_into(elsewhere, weights))
        patches = Patches(engine)
        patches.apply(decode_message(message))
        patches.check()
    if not all(torch.equal(engine[name], weights[name]) for name in weights):
        raise RuntimeError("what was packed does not make one version the next")
    timed = {name: tuple(seconds) for name, seconds in runs.items()}
    ratio, by_clock = (
        ratio_of_minima(timed[names[0] + how], timed[names[1] + how]) for how in ("", CLOCK)
    )
    beside = {"by the clock": by_clock, "threads": spare_cores()}
    return Measurement(ratio, timed, "the messages make every version the next one", beside)


def bytes_over_changed(folder: Path, repetitions: int) -> Measurement:
    """Bytes of the messages over those of changed elements, the most of 1, 3 and 5 %; no timing."""
    weights, beside = _make(), {}
    copy = _copy_of(weights)
    for number, share in enumerate(SHARES):
        changed = _change(weights, share, number)
        beside[f"{share:.0%}"] = len(encode_message(copy.advance())) / (2 * changed)
    return Measurement(max(beside.values()), {}, "counted", beside)


def _make() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        f"layers.{number}.weight": torch.randn(ROWS, COLUMNS, generator=generator).bfloat16()
        for number in range(TENSORS)
    }


def _clone(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in weights.items()}


def _copy_into(to: dict[str, Tensor], weights: dict[str, Tensor]) -> None:
    for name, tensor in weights.items():
        memmove(to[name].data_ptr(), tensor.data_ptr(), tensor.nbytes)


def _copy_of(weights: dict[str, Tensor]) -> SentCopy:
    whole = Region((ROWS, COLUMNS), (COLUMNS, 1), 0)
    held: list[Any] = list(weights.values())
    shares = [
        OwnShare(RefitTensor(name, tuple(t.shape), t.dtype), held[at], ((whole, whole),))
        for at, (name, t) in enumerate(weights.items())
    ]
    return SentCopy(shares, lambda entry, region: entry)  # type: ignore[arg-type, return-value]


def _change(weights: dict[str, Tensor], share: float, seed: int) -> int:
    """Flip the last bit of that share of the elements; how many."""
    generator, changed = torch.Generator().manual_seed(seed), 0
    for tensor in weights.values():
        chosen = torch.rand(tensor.shape, generator=generator) < share
        tensor.view(torch.int16).bitwise_xor_(chosen.to(torch.int16))
        changed += int(chosen.sum())
    return changed


def _timed(runs: dict[str, list[float]], name: str, act: Callable[[], T]) -> T:
    cpu, clock = time.process_time(), time.perf_counter()
    made = act()
    runs[name].append(time.process_time() - cpu)
    runs[name + CLOCK].append(time.perf_counter() - clock)
    return made
