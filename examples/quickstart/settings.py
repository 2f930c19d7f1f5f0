"""All the numbers of the demo, and the policy's configuration made from them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

# Learning rates below are for a model of this width; wider models need smaller steps.
REFERENCE_WIDTH = 128


@dataclass(frozen=True)
class Imitation:
    """Supervised training on demonstrations: `steps` optimizer steps of `batch_size` rows."""

    steps: int = 600
    batch_size: int = 128
    steps_per_call: int = 10
    learning_rate: float = 3e-3


@dataclass(frozen=True)
class GRPO:
    """Each step: `group_size` answers to each of `problems`, then optimizer steps over all
    of them.
    """

    steps: int = 120
    problems: int = 32
    group_size: int = 8
    batch_size: int = 128
    learning_rate: float = 1e-3
    clip: float = 0.2
    kl_weight: float = 0.02
    measure_every: int = 10


class Engine(StrEnum):
    """What trains the model."""

    MEGATRON = "megatron"
    FSDP2 = "fsdp2"


@dataclass(frozen=True)
class Layout:
    """`workers` ranks. Megatron-Core splits the model over `tensor_parallel` of them; FSDP2 shards
    it over all.
    """

    workers: int = 2
    tensor_parallel: int = 2
    engine: Engine = Engine.MEGATRON

    @property
    def replicas(self) -> int:
        """Ranks or groups of them that share a batch out."""
        if self.engine is Engine.FSDP2:
            return self.workers
        return max(1, self.workers // self.tensor_parallel)


@dataclass(frozen=True)
class Lengths:
    """Tokens of the longest prompt and of the longest answer, including its end."""

    prompt: int
    answer: int


def policy_section(
    model: str,
    phase: Imitation | GRPO,
    calls: int,
    layout: Layout,
    lengths: Lengths,
    width: int,
    seed: int,
) -> dict[str, Any]:
    """The `policy` section, in the host's format, for one phase of `calls` calls of `train`."""
    rate = phase.learning_rate * min(1.0, REFERENCE_WIDTH / width) ** 2
    micro = max(1, min(64, phase.batch_size // layout.replicas))
    common = {
        "model_name": model,
        "precision": "float32",
        "seed": seed,
        "train_global_batch_size": phase.batch_size,
        "train_micro_batch_size": micro,
        "logprob_batch_size": micro,
        "generation_batch_size": 256,
        "generation": {"max_new_tokens": lengths.answer + 1, "temperature": 1.0},
        "max_total_sequence_length": lengths.prompt + lengths.answer + 1,
        "max_grad_norm": 1.0,
    }
    if layout.engine is Engine.FSDP2:
        return common | fsdp2_sections(rate, calls)
    return common | {"megatron_cfg": megatron_section(rate, calls, layout.tensor_parallel)}


def megatron_section(rate: float, calls: int, tensor_parallel: int) -> dict[str, Any]:
    """Megatron-Core, with its own optimizer and schedule."""
    return {
        "enabled": True,
        "tensor_model_parallel_size": tensor_parallel,
        "optimizer": {
            "optimizer": "adam",
            "lr": rate,
            "min_lr": rate / 10,
            "weight_decay": 0.0,
            "adam_beta2": 0.98,
        },
        "scheduler": {
            "lr_decay_style": "cosine",
            "lr_decay_iters": max(3, calls),
            "lr_warmup_iters": 2,
            "lr_warmup_init": rate / 10,
        },
    }


def fsdp2_sections(rate: float, calls: int) -> dict[str, Any]:
    """Transformers' own modules under FSDP2, with an optimizer and schedules of torch."""
    warmup = {"start_factor": 0.1, "total_iters": 2}
    decay = {"T_max": max(1, calls - 2), "eta_min": rate / 10}
    return {
        "dtensor_cfg": {"enabled": True},
        "optimizer": {
            "name": "torch.optim.AdamW",
            "kwargs": {"lr": rate, "weight_decay": 0.0, "betas": [0.9, 0.98]},
        },
        "scheduler": [
            {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": warmup},
            {"name": "torch.optim.lr_scheduler.CosineAnnealingLR", "kwargs": decay},
            {"milestones": [2]},
        ],
    }
