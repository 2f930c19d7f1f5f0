"""One pass over a language-model head: `python -m benchmarks.logprob_once PROGRAM CHUNK`.

Prints CPU seconds, peak memory in bytes beyond the inputs, and samples of the results, by which
programs can be compared. The head is that of Qwen2.5-0.5B in bf16.
Shapes: N tokens, V vocabulary, D model.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.logprob_anchor import plain_chunks
from megatron_policy.lm_head.fused import HeadShape, fused_scores
from megatron_policy.lm_head.tile_work import Implementation

VOCAB, MODEL = 151936, 896
READ, TRAINED = 4096, 1024
"""Tokens of a pass without and with gradients."""

Results = dict[str, torch.Tensor]
Program = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], Results]


def logits(
    hidden_ND: torch.Tensor, weight_VD: torch.Tensor, targets_N: torch.Tensor, chunk: int
) -> Results:
    """Only the matrix product that makes all logits."""
    logits_NV = hidden_ND @ weight_VD.T
    return {"picked": logits_NV[torch.arange(len(targets_N)), targets_N]}


def reading(
    hidden_ND: torch.Tensor, weight_VD: torch.Tensor, targets_N: torch.Tensor, chunk: int
) -> Results:
    """Log-probabilities as the policy computes them for inference."""
    return {"logprobs": ours(hidden_ND, weight_VD, targets_N, chunk)}


def reading_plain(
    hidden_ND: torch.Tensor, weight_VD: torch.Tensor, targets_N: torch.Tensor, chunk: int
) -> Results:
    """Log-probabilities by plain chunks."""
    return {"logprobs": plain_chunks(hidden_ND, weight_VD, targets_N, chunk)}


def training(
    hidden_ND: torch.Tensor, weight_VD: torch.Tensor, targets_N: torch.Tensor, chunk: int
) -> Results:
    """Log-probabilities and both gradients as the policy computes them in training."""
    return trained(ours, hidden_ND, weight_VD, targets_N, chunk)


def training_plain(
    hidden_ND: torch.Tensor, weight_VD: torch.Tensor, targets_N: torch.Tensor, chunk: int
) -> Results:
    """Log-probabilities and both gradients by plain chunks."""
    return trained(plain_chunks, hidden_ND, weight_VD, targets_N, chunk)


def ours(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    targets_N: torch.Tensor,
    chunk: int,
    implementation: Implementation | None = None,
) -> torch.Tensor:
    """fp32 `[N]`, on one rank."""
    # A group without a backend: a single rank does not communicate.
    alone, head = dist.ProcessGroup(0, 1), HeadShape(vocab_start=0, real=weight_VD.size(0))  # type: ignore[call-arg]
    logprobs_N, _ = fused_scores(
        hidden_ND, weight_VD, targets_N, head, alone, chunk, implementation=implementation
    )
    return logprobs_N


def trained(
    logprobs_of: Callable[..., torch.Tensor],
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    targets_N: torch.Tensor,
    chunk: int,
) -> Results:
    """Log-probabilities by `logprobs_of`, and both gradients of their weighted sum."""
    hidden_ND, weight_VD = hidden_ND.requires_grad_(), weight_VD.requires_grad_()
    logprobs_N = logprobs_of(hidden_ND, weight_VD, targets_N, chunk)
    weights_N = torch.linspace(-1, 1, len(targets_N), device=hidden_ND.device)
    (logprobs_N * weights_N).sum().backward()
    assert hidden_ND.grad is not None and weight_VD.grad is not None
    return {
        "logprobs": logprobs_N.detach(),
        "hidden": hidden_ND.grad,
        "weight": weight_VD.grad[targets_N],
    }


PROGRAMS: dict[str, Program] = {
    "logits": logits,
    "reading": reading,
    "reading plainly": reading_plain,
    "training": training,
    "training plainly": training_plain,
}


def main(name: str, chunk: int) -> dict[str, Any]:
    """Run a program and measure it."""
    program = PROGRAMS[name]
    tokens = TRAINED if name.startswith("training") else READ
    program(*inputs(8, 512), 2)  # warm-up: loads the code and touches its pages
    given = inputs(tokens, VOCAB)
    before = start_of_peak()
    started = time.process_time()
    with torch.set_grad_enabled(name.startswith("training")):
        results = program(*given, chunk)
    seconds = time.process_time() - started
    return {
        "cpu_s": seconds,
        "peak_bytes": memory("VmHWM") - before,
        "samples": {key: _sample(value) for key, value in results.items()},
    }


def inputs(tokens: int, vocab: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, weights and targets, always the same."""
    random = torch.Generator().manual_seed(0)
    hidden_ND = torch.empty(tokens, MODEL, dtype=torch.bfloat16).normal_(generator=random)
    weight_VD = torch.empty(vocab, MODEL, dtype=torch.bfloat16)
    weight_VD.normal_(std=0.02, generator=random)
    return hidden_ND, weight_VD, torch.randint(vocab, (tokens,), generator=random)


def _sample(values: torch.Tensor) -> list[float]:
    flat = values.float().flatten()
    sample: list[float] = flat[:: max(1, len(flat) // 1024)].tolist()
    return sample


def start_of_peak() -> int:
    """Reset the peak to the current memory, and return that in bytes."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return memory("VmRSS")


def memory(field: str) -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    (kibibytes,) = (line.split()[1] for line in status.splitlines() if line.startswith(field))
    return int(kibibytes) * 1024


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]))))
