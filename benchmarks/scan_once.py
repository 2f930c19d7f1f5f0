"""One scan with its backward pass: `python -m benchmarks.scan_once SCAN TOKENS`.

Prints CPU seconds, the peak of memory beyond what it is given and gives, and the first outputs.
The heads are those of one of four tensor-parallel ranks, of Qwen3-Next and of Nemotron 3 Nano.

Shapes: N tokens, H heads, G key heads or groups, K key channels or state, V value channels.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.logprob_once import memory, start_of_peak
from megatron_policy.recurrence.chunks import Chunks, sequences_of
from megatron_policy.recurrence.delta_rule import delta_rule
from megatron_policy.recurrence.state_space import state_space

PIECE = 1024
"""Tokens that are drawn at once: more tokens begin with the same."""
MMAP_THRESHOLD = -3
"""glibc's name for the size from which memory comes from the system, and goes back to it."""
Inputs = list[torch.Tensor]


def _draw(tokens: int, *shape: int, like: Callable[..., torch.Tensor] = torch.randn) -> Any:
    pieces = (
        like(PIECE, *shape, generator=torch.Generator().manual_seed(seed))
        for seed in range(tokens // PIECE)
    )
    return torch.cat(list(pieces))


def delta_inputs(tokens: int) -> Inputs:
    """q, k, v, g and beta."""
    heads, groups, width = 8, 4, 128
    q, k = (_draw(tokens, groups, width).bfloat16() for _ in range(2))
    v = _draw(tokens, heads, width).bfloat16()
    return [q, k, v, -_draw(tokens, heads, like=torch.rand), _draw(tokens, heads, like=torch.rand)]


def space_inputs(tokens: int) -> Inputs:
    """x, dt, A_log, b, c and d."""
    heads, groups, state, width = 16, 2, 128, 64
    b, c = (_draw(tokens, groups, state).bfloat16() for _ in range(2))
    x, dt = _draw(tokens, heads, width).bfloat16(), _draw(tokens, heads, like=torch.rand)
    return [x, dt, torch.zeros(heads), b, c, torch.ones(heads)]


SCANS: dict[str, tuple[Callable[[int], Inputs], Callable[..., Any]]] = {
    "delta rule": (delta_inputs, delta_rule),
    "state space": (space_inputs, state_space),
}


def main(name: str, tokens: int) -> dict[str, Any]:
    """Run a scan and measure it."""
    make, scan = SCANS[name]
    # Otherwise malloc keeps what was freed, and more of it the larger it was.
    ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, 2**16)
    _run(scan, make(PIECE))  # loads the code and touches its pages
    inputs = make(tokens)
    before, started = start_of_peak(), time.process_time()
    results = _run(scan, inputs)
    seconds = time.process_time() - started
    given = sum(x.numel() * x.itemsize for x in results)
    first = results[0][:PIECE].float().flatten()[:: PIECE // 2]
    held = memory("VmHWM") - before - given
    return {"cpu_s": seconds, "held_bytes": held, "first": first.tolist()}


def _run(scan: Callable[..., Any], inputs: Inputs) -> Inputs:
    """Outputs, and the gradients of their sum."""
    leaves = [x.requires_grad_() for x in inputs]
    tokens = leaves[0].size(0)
    out_NHV, _last = scan(*leaves, Chunks.of(sequences_of((tokens,))))
    one = torch.ones((), dtype=out_NHV.dtype)
    return [out_NHV.detach(), *torch.autograd.grad(out_NHV, leaves, one.expand_as(out_NHV))]


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]))))
