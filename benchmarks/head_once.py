"""Passes over language-model heads on this process's device: `python -m benchmarks.head_once TOKENS
VOCAB HIDDEN CHUNKS TRAINED_CHUNK TURNS`; CHUNKS are separated by commas.

Prints the seconds of every turn: ours, by each implementation of the work on tiles that the device
can run, plain chunks, and the matrix products alone, which take turns in one process.
Shapes: N tokens, V vocabulary, D model.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.device_once import alternate
from benchmarks.logprob_anchor import plain_chunks
from benchmarks.logprob_once import Results, ours, trained
from megatron_policy import device
from megatron_policy.lm_head.tile_work import Implementation

PRODUCT, PRODUCTS = "product", "four products"
# Relative, over all elements of a result: bf16 has 8 bits.
TOLERANCE = 2**-7

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def main(
    tokens: int, vocab: int, hidden: int, chunks: Sequence[int], trained_chunk: int, turns: int
) -> dict[str, Any]:
    """Compare all ways with plain chunks, then time them."""
    given = inputs(tokens, vocab, hidden)
    ways = implementations(given[1])
    reading = {
        f"{way}, chunks of {chunk}": partial(_read, way, given, chunk)
        for way in (*ways, None)
        for chunk in chunks
    }
    reading = {_named(name): program for name, program in reading.items()}
    training = {
        _named(f"{way}, forward and backward"): partial(_train, way, given, trained_chunk)
        for way in (*ways, None)
    }
    verify(reading, _named(f"None, chunks of {chunks[-1]}"))
    verify(training, _named("None, forward and backward"))
    products: dict[str, Callable[[], Any]] = {
        PRODUCT: partial(torch.matmul, given[0], given[1].T),
        PRODUCTS: partial(_four_products, given),
    }
    seconds = alternate(products | reading | training, turns)
    flops = 2 * tokens * vocab * hidden
    return {"seconds": seconds, "implementations": ways, "product_flops": flops}


def implementations(weight_VD: torch.Tensor) -> list[Implementation]:
    """Those that run on the weights' device: Triton also where its interpreter is asked for."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    interpreted = interpreted and importlib.util.find_spec("triton") is not None
    return ["torch", "triton"] if device.runs_triton(weight_VD) or interpreted else ["torch"]


def inputs(tokens: int, vocab: int, hidden: int) -> Inputs:
    """Hidden states, weights and targets on the device, always the same."""
    where = device.place_process()
    torch.manual_seed(0)
    hidden_ND = torch.empty(tokens, hidden, dtype=torch.bfloat16, device=where).normal_()
    weight_VD = torch.empty(vocab, hidden, dtype=torch.bfloat16, device=where).normal_(std=0.02)
    return hidden_ND, weight_VD, torch.randint(vocab, (tokens,), device=where)


def verify(programs: dict[str, Callable[[], Results]], expected: str) -> None:
    """RuntimeError unless all results are those of the program `expected`."""
    theirs = programs[expected]()
    for name, program in programs.items():
        for what, found in program().items():
            right = theirs[what].float()
            distance = float((found.float() - right).norm() / right.norm())
            if not distance <= TOLERANCE:
                raise RuntimeError(f"{what} by {name} are {distance:.1e} off")


def _named(name: str) -> str:
    return name.replace("None", "plain")


def _way(way: Implementation | None) -> Callable[..., torch.Tensor]:
    return plain_chunks if way is None else partial(ours, implementation=way)


def _read(way: Implementation | None, given: Inputs, chunk: int) -> Results:
    with torch.no_grad():
        return {"logprobs": _way(way)(*given, chunk)}


def _train(way: Implementation | None, given: Inputs, chunk: int) -> Results:
    hidden_ND, weight_VD, targets_N = given
    return trained(_way(way), hidden_ND.detach(), weight_VD.detach(), targets_N, chunk)


def _four_products(given: Inputs) -> None:
    """As many as a pass takes that recomputes logits: two for them, one for each gradient."""
    hidden_ND, weight_VD, _ = given
    for _ in range(2):
        logits_NV = hidden_ND @ weight_VD.T
    torch.matmul(logits_NV, weight_VD)
    torch.matmul(logits_NV.T, hidden_ND)


def run(arguments: Sequence[str]) -> dict[str, Any]:
    """`main` with the arguments of the command line."""
    tokens, vocab, hidden, chunks, trained_chunk, turns = arguments
    widths = [int(chunk) for chunk in chunks.split(",")]
    return main(int(tokens), int(vocab), int(hidden), widths, int(trained_chunk), int(turns))


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1:])))
