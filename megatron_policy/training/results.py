"""What a training step reports to its caller."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from megatron_policy.device import current_device
from megatron_policy.training.losses import Metrics, ValidCounts
from megatron_policy.training.rollout_mismatch import MismatchMeter


@dataclass(frozen=True)
class OptimStats:
    """One optimizer step: the gradient's L2 norm before clipping, what the step used, and what its
    routers did.
    """

    grad_norm: float
    lr: float
    wd: float
    routing: Mapping[str, float] = field(default_factory=dict)
    loss_scale: float | None = None
    skipped: tuple[str, ...] = ()
    """Why a step was not taken, for each such step of those that these statistics stand for."""


def complete_metrics(
    metrics: Metrics, divisor_of: Callable[[str], float], counts: ValidCounts, stats: OptimStats
) -> Metrics:
    """One microbatch's metrics, each divided by `divisor_of` its name, plus the step's statistics.
    Minima and maxima are not sums and are not divided.
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


class TrainResult(dict[str, Any]):
    """What training reports, on every rank:

    - `loss`: fp32 `[global batches]`, summed over data-parallel ranks,
    - `grad_norm`: fp32 `[1]`, the L2 norm before clipping, of the last step. If that step was
      skipped: 0 where nothing counted, not finite where gradients overflowed,
    - `lr`, `weight_decay`: of the last step,
    - `valid_sequences`, `valid_tokens`: how many counted, of each global batch,
    - `microbatch_metrics`: the loss's metrics, a list per name, of this data-parallel rank's
      microbatches, or of all ranks' where a driver has merged them; they add up to the true values.
      Layers for multi-token prediction add theirs: `mtp_1_loss` for the first, before the factor,
    - `moe_metrics`: what the routers of experts did in the last step (docs/experts.md names them),
      the same on every rank; absent without experts, in `eval_mode` and for a skipped step,
    - `rollout_mismatch`: how far the log-probabilities of the weights that the call began with are
      from those in the data of the engine that sampled the rows, over all ranks, by the names in
      docs/monitoring.md; absent where the data have none,
    - `skipped_steps`: how many steps of this call changed nothing, since no token or sequence
      counted, or since gradients overflowed float16; `skipped`: the reasons, such as "no valid
      tokens", absent if all steps were taken. Neither in `eval_mode`,
    - `loss_scale`: with precision float16 only, and not in `eval_mode`: the factor on the losses of
      the next step,
    - `step`: how many optimizer steps the policy has taken, also before it was resumed,
    - `speed`: how fast the call was and where time was lost, by name (docs/interface.md).
    """


def result_of(
    losses: Sequence[float],
    stats: OptimStats,
    counts: Sequence[ValidCounts],
    metrics: Sequence[Metrics],
    mismatch: MismatchMeter,
    group: dist.ProcessGroup,
    *,
    eval_mode: bool = False,
) -> TrainResult:
    """The result of a call from this rank's `losses`, which are summed over the data-parallel
    `group`, the metrics of its microbatches, and their part in the rollouts' mismatch.
    """
    numbers = [*losses, float(bool(mismatch.parts))]
    total = torch.tensor(numbers, dtype=torch.float32, device=current_device())
    dist.all_reduce(total, group=group)
    total = total.cpu()
    names = dict.fromkeys(name for each in metrics for name in each)
    rest: dict[str, Any] = {"moe_metrics": dict(stats.routing)} if stats.routing else {}
    if total[-1]:  # on some rank, which all know alike
        rest["rollout_mismatch"] = mismatch.over_ranks(group).metrics()
    if stats.loss_scale is not None:
        rest["loss_scale"] = stats.loss_scale
    if not eval_mode:
        rest["skipped_steps"] = len(stats.skipped)
    if stats.skipped:
        rest["skipped"] = "; ".join(dict.fromkeys(stats.skipped))
    return TrainResult(
        loss=total[:-1].clone(),
        grad_norm=torch.tensor([stats.grad_norm]),
        lr=stats.lr,
        weight_decay=stats.wd,
        valid_sequences=[each.sequences.item() for each in counts],
        valid_tokens=[each.tokens.item() for each in counts],
        microbatch_metrics={name: [m[name] for m in metrics if name in m] for name in names},
        rank=dist.get_rank(),
        **rest,
    )
