"""All the numbers of the demo, and the policy's configuration made from them."""

from __future__ import annotations

from dataclasses import dataclass
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


@dataclass(frozen=True)
class Layout:
    """`workers` ranks, `tensor_parallel` of which share a replica of the model."""

    workers: int = 2
    tensor_parallel: int = 2


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
    replicas = max(1, layout.workers // layout.tensor_parallel)
    micro = max(1, min(64, phase.batch_size // replicas))
    return {
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
        "megatron_cfg": {
            "enabled": True,
            "tensor_model_parallel_size": layout.tensor_parallel,
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
        },
    }
