"""Alternating steps of the policy under FSDP2 and of a loop written with torch and transformers
alone: `python -m benchmarks.fsdp_steps CHECKPOINT STEPS` on each rank prints its CPU seconds.

Both have equal starting weights, optimizers and batches, so losses, gradient norms and final
weights must be equal as well.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from benchmarks.train_steps import LEARNING_RATE, RELATIVE, WEIGHTS, NextTokenLoss
from megatron_policy.batch import BatchedDataDict
from megatron_policy.policy import MegatronPolicy
from megatron_policy.refit.exporter import stream_tensors

ROWS, MICROBATCH_ROWS, LENGTH = 8, 2, 128
"""Of each rank."""
DECAY = 0.01
CLIP = 1.0


class PlainLoop:
    """A model of transformers whose layers `fully_shard` shards, and torch's AdamW."""

    def __init__(self, path: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        for layer in self.model.model.layers:
            fully_shard(layer)
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=LEARNING_RATE, weight_decay=DECAY
        )

    def step(self, tokens_BS: torch.Tensor) -> tuple[float, float]:
        """Train on this rank's rows; return the mean next-token loss and the gradient norm."""
        self.model.train()
        self.optimizer.zero_grad()
        predicted = tokens_BS[:, 1:].numel()  # on every rank, whose mean FSDP takes
        total = torch.zeros(())
        for tokens in tokens_BS.split(MICROBATCH_ROWS):
            logits = self.model(input_ids=tokens, use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(
                logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum"
            )
            (loss / predicted).backward()
            total += loss.detach() / predicted
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        dist.all_reduce(total)
        return float(total / dist.get_world_size()), float(_whole(norm))


def main(path: Path, steps: int) -> dict[str, Any]:
    """CPU seconds of every step on both sides, and what was verified."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    policy = MegatronPolicy(_config(path), init_reference_model=False, timeout_s=120.0)
    plain = PlainLoop(path)
    seconds: dict[str, list[float]] = {"plain loop": [], "ours": []}
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        tokens_BS = torch.randint(plain.model.vocab_size, (ROWS, LENGTH), generator=generator)
        started = time.process_time()
        expected = plain.step(tokens_BS)
        seconds["plain loop"].append(time.process_time() - started)
        batch = BatchedDataDict(
            {
                "input_ids": tokens_BS,
                "token_mask": torch.ones(ROWS, LENGTH),
                "sample_mask": torch.ones(ROWS),
            }
        )
        started = time.process_time()
        result = policy.train(batch, NextTokenLoss())
        got = result["loss"].item(), result["grad_norm"].item()
        seconds["ours"].append(time.process_time() - started)
        for what, ours, theirs in zip(("loss", "gradient norm"), got, expected, strict=True):
            if abs(ours - theirs) > RELATIVE * abs(theirs):
                raise RuntimeError(f"{what} {ours} of the policy, {theirs} of the plain loop")
    difference = _difference(policy, plain)
    policy.shutdown()
    verified = (
        f"loss and gradient norm of every step equal within {RELATIVE:g}; weights after {steps} "
        f"steps of {LEARNING_RATE:g} equal within {difference:.1e}"
    )
    return seconds | {"verified": verified}


def _config(path: Path) -> dict[str, Any]:
    return {
        "model_name": str(path),
        "precision": "float32",
        "train_global_batch_size": ROWS * dist.get_world_size(),
        "train_micro_batch_size": MICROBATCH_ROWS,
        "max_total_sequence_length": LENGTH,
        "max_grad_norm": CLIP,
        "dtensor_cfg": {"enabled": True},
        "optimizer": {
            "name": "torch.optim.AdamW",
            "kwargs": {"lr": LEARNING_RATE, "weight_decay": DECAY},
        },
    }


def _difference(policy: MegatronPolicy, plain: PlainLoop) -> float:
    """The largest difference of a weight; RuntimeError if it is too large."""
    exporter = policy.exporter
    trained = dict(stream_tensors(exporter, exporter.plan()))
    weights = {name: _whole(p.detach()) for name, p in plain.model.named_parameters()}
    if trained.keys() != weights.keys():
        raise RuntimeError(f"other weights: {sorted(trained.keys() ^ weights.keys())}")
    furthest = max(float((trained[name] - weights[name]).abs().max()) for name in weights)
    if furthest > WEIGHTS:
        raise RuntimeError(f"policy and plain loop end with weights {furthest} apart")
    return furthest


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]))))
