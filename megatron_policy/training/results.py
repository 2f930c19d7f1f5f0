"""What a training step tells its caller: losses and metrics in the host's form; computes none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_policy.device import current_device
from megatron_policy.training.losses import Metrics, ValidCounts


@dataclass(frozen=True)
class OptimStats:
    """One optimizer step: the gradient's L2 norm before clipping, and what the step used."""

    grad_norm: float
    lr: float
    wd: float


def completed(
    metrics: Metrics, divisor_of: Callable[[str], float], counts: ValidCounts, stats: OptimStats
) -> Metrics:
    """One microbatch's metrics, each divided by what `divisor_of` says for its name, and what the
    step used. Extrema are no sums: they stay what they are.
    """
    divided = {
        name: value if "_min" in name or "_max" in name else value / divisor_of(name)
        for name, value in metrics.items()
    }
    return divided | {
        "lr": stats.lr,
        "wd": stats.wd,
        "global_valid_seqs": counts.sequences.item(),
        "global_valid_toks": counts.tokens.item(),
    }


def result_of(
    losses: Sequence[float],
    stats: OptimStats,
    metrics: Sequence[Metrics],
    group: dist.ProcessGroup,
) -> dict[str, Any]:
    """`global_loss` (fp32 `[global batches]`: `losses` summed over the data-parallel `group`),
    `grad_norm` (fp32 `[1]`), `all_mb_metrics` (this data-parallel rank's, a list per name), `rank`.
    """
    total = torch.tensor(losses, dtype=torch.float32, device=current_device())
    dist.all_reduce(total, group=group)
    names = dict.fromkeys(name for each in metrics for name in each)
    return {
        "global_loss": total.cpu(),
        "grad_norm": torch.tensor([stats.grad_norm]),
        "all_mb_metrics": {name: [m[name] for m in metrics if name in m] for name in names},
        "rank": dist.get_rank(),
    }
