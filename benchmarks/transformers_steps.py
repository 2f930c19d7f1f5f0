"""Alternating steps of the policy and of a loop written with torch and transformers alone:
`python -m benchmarks.transformers_steps ENGINE CHECKPOINT STEPS` on each rank prints its CPU
seconds. ENGINE is "fsdp", whose loop has torch's FSDP2 too, or "megatron" on one rank.

Both have equal starting weights, optimizers and batches, so losses, gradient norms and final
weights must be equal as well.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from benchmarks.train_steps import LEARNING_RATE, RELATIVE, NextTokenLoss
from megatron_policy.batch import BatchedDataDict
from megatron_policy.converters.formats.hf_names import SINGLE
from megatron_policy.policy import MegatronPolicy
from megatron_policy.refit.exporter import stream_tensors

ROWS, MICROBATCH_ROWS = 8, 2
"""Of each rank."""
SEEN = {"pixel_values", "image_grid_thw"}
GRID = (1, 16, 16)
"""Patches of a picture in time, height and width."""
DECAY = 0.01
CLIP = 1.0
WEIGHTS = 0.01 * LEARNING_RATE
"""By how much weights may differ, as a root mean square."""


@dataclass(frozen=True)
class Engine:
    """How long its rows are, the keys of its policy, whether its loop has FSDP2, and how far losses
    and gradient norms may be apart.
    """

    length: int
    keys: dict[str, Any]
    sharded: bool
    relative: float = RELATIVE


_ADAM = {"lr": LEARNING_RATE, "weight_decay": DECAY}
ENGINES = {
    "fsdp": Engine(
        128,
        {
            "dtensor_cfg": {"enabled": True},
            "optimizer": {"name": "torch.optim.AdamW", "kwargs": _ADAM},
        },
        sharded=True,
    ),
    # transformers adds logarithms of decays in fp32, by which gradients can be off by 4e-5.
    "megatron": Engine(
        256,
        {"megatron_cfg": {"enabled": True, "optimizer": _ADAM | {"min_lr": LEARNING_RATE}}},
        sharded=False,
        relative=5e-5,
    ),
}


class PlainLoop:
    """A model of transformers, whose layers `fully_shard` shards if it is `sharded`, and torch's
    AdamW.
    """

    def __init__(self, path: Path, sharded: bool) -> None:
        kind: Any = AutoModelForCausalLM
        if "vision_config" in vars(AutoConfig.from_pretrained(path)):
            kind = AutoModelForImageTextToText
        self.model = kind.from_pretrained(path, dtype=torch.float32)
        if sharded:
            for layer in self.model.model.layers:
                fully_shard(layer)
            fully_shard(self.model)
        # Megatron-Core decays matrices alone, torch's optimizers of FSDP everything.
        decayed = [p for p in self.model.parameters() if sharded or p.ndim > 1]
        others = [p for p in self.model.parameters() if not sharded and p.ndim == 1]
        groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, weight_decay=DECAY)

    def step(self, batch: BatchedDataDict) -> tuple[float, float]:
        """Train on this rank's rows; return the mean next-token loss and the gradient norm."""
        self.model.train()
        self.optimizer.zero_grad()
        predicted = batch["input_ids"][:, 1:].numel()  # on every rank, whose mean FSDP takes
        total = torch.zeros(())
        for rows in batch.make_microbatch_iterator(MICROBATCH_ROWS):
            tokens, seen = rows["input_ids"], {key: torch.cat(rows[key]) for key in SEEN & {*rows}}
            if seen:
                image = self.model.config.image_token_id
                seen["mm_token_type_ids"] = (tokens == image).int()
            logits = self.model(input_ids=tokens, use_cache=False, **seen).logits
            loss = torch.nn.functional.cross_entropy(
                logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum"
            )
            (loss / predicted).backward()
            total += loss.detach() / predicted
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        dist.all_reduce(total)
        return float(total / dist.get_world_size()), float(_whole(norm))


def main(engine: Engine, path: Path, steps: int) -> dict[str, Any]:
    """CPU seconds of every step on both sides, and what was verified."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    policy = MegatronPolicy(_config(engine, path), init_reference_model=False, timeout_s=120.0)
    plain = PlainLoop(path, engine.sharded)
    seconds: dict[str, list[float]] = {"plain loop": [], "ours": []}
    generator = torch.Generator().manual_seed(dist.get_rank())
    config = plain.model.config
    for _ in range(steps):
        batch = _draw_batch(config, engine.length, generator)
        started = time.process_time()
        expected = plain.step(batch)
        seconds["plain loop"].append(time.process_time() - started)
        started = time.process_time()
        result = policy.train(batch, NextTokenLoss())
        got = result["loss"].item(), result["grad_norm"].item()
        seconds["ours"].append(time.process_time() - started)
        for what, ours, theirs in zip(("loss", "gradient norm"), got, expected, strict=True):
            if abs(ours - theirs) > engine.relative * abs(theirs):
                raise RuntimeError(f"{what} {ours} of the policy, {theirs} of the plain loop")
    difference = _difference(policy, plain)
    policy.shutdown()
    verified = (
        f"loss and gradient norm of every step equal within {engine.relative:g}; weights after "
        f"{steps} steps of {LEARNING_RATE:g} equal within {difference:.1e}"
    )
    return seconds | {"verified": verified}


def _draw_batch(config: Any, length: int, generator: torch.Generator) -> BatchedDataDict:
    """Random tokens, with a picture in each row of a model that sees it."""
    size = ROWS, length
    words = getattr(config, "image_token_id", config.get_text_config().vocab_size)
    batch = BatchedDataDict(
        {
            "input_ids": torch.randint(words, size, generator=generator),
            "token_mask": torch.ones(size),
            "sample_mask": torch.ones(ROWS),
        }
    )
    if (vision := getattr(config, "vision_config", None)) is not None:
        patches, values = math.prod(GRID), 3 * vision.temporal_patch_size * vision.patch_size**2
        batch["input_ids"][:, 1 : 1 + patches // vision.spatial_merge_size**2] = words
        pixels = torch.randn(ROWS, patches, values, generator=generator)
        batch["pixel_values"] = list(pixels)
        batch["image_grid_thw"] = [torch.tensor([GRID])] * ROWS
    return batch


def _config(engine: Engine, path: Path) -> dict[str, Any]:
    return {
        "model_name": str(path),
        "precision": "float32",
        "train_global_batch_size": ROWS * dist.get_world_size(),
        "train_micro_batch_size": MICROBATCH_ROWS,
        "max_total_sequence_length": engine.length,
        "max_grad_norm": CLIP,
        **engine.keys,
    }


def _difference(policy: MegatronPolicy, plain: PlainLoop) -> float:
    """How far the tensor that differs most is off, as a root mean square: Adam takes full steps for
    single gradients that are nearly 0, either way. RuntimeError if it is too much. Rank 0 compares.
    """
    exporter = policy.exporter
    trained = dict(stream_tensors(exporter, exporter.plan()))
    held = {name: _whole(p.detach()) for name, p in plain.model.named_parameters()}
    if dist.get_rank():
        return 0.0
    with tempfile.TemporaryDirectory() as folder:  # names on file can be others
        plain.model.save_pretrained(folder, state_dict=held)
        weights = load_file(Path(folder, SINGLE))
    if trained.keys() != weights.keys():
        raise RuntimeError(f"other weights: {sorted(trained.keys() ^ weights.keys())}")
    furthest = max(
        float((trained[name] - weights[name]).square().mean().sqrt()) for name in weights
    )
    if furthest > WEIGHTS:
        raise RuntimeError(f"policy and plain loop end with weights {furthest} apart")
    return furthest


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


if __name__ == "__main__":
    print(json.dumps(main(ENGINES[sys.argv[1]], Path(sys.argv[2]), int(sys.argv[3]))))
