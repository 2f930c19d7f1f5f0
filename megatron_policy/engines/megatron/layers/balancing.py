"""What training adds to a router: which tokens count, auxiliary losses, and sums over a step.

A token counts if it is within its row's `input_lengths` and its row's `sample_mask` is not 0. An
auxiliary loss is a mean over rows, weighted as the policy's loss weighs them, so that it does not
depend on how a batch is cut, except for the counts of experts of its kind.

Shapes: T tokens of this rank, E experts, K chosen experts, S scopes in which experts are counted, M
microbatches, N numbers of rows.
Sources: Fedus et al. 2021, "Switch Transformers" (load balancing); Zoph et al. 2022, "ST-MoE"
(z-loss); DeepSeek-AI 2024, "DeepSeek-V3 Technical Report" (balance within a sequence); Qiu et al.
2025, "Demons in the Detail" (balance over the global batch).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_policy.converters.architecture import Moe, Scoring
from megatron_policy.device import current_device
from megatron_policy.packing.microbatch import Microbatch, routed

BY_MICROBATCH, BY_SEQUENCE, BY_GLOBAL_BATCH = "aux_loss", "seq_aux_loss", "global_aux_loss"
NOT_COUNTED = 0
"""The row number of positions that do not count; Megatron-Core also pads with it."""


@dataclass(frozen=True)
class RoutedRows:
    """The rows of all microbatches of one run of the schedule, numbered from 1.

    Microbatch m has the numbers from `1 + m * most` on.
    """

    most: int
    """The most rows of a microbatch."""
    token_weights_N: torch.Tensor
    """The weight of each of a row's tokens in a mean over the global batch, fp32."""
    numbers: tuple[torch.Tensor, ...]
    """The row number of each position that this rank computes in each microbatch, int64 `[R, T]`
    with R rows that are computed in parallel and T positions of this context-parallel rank."""

    @classmethod
    def of(cls, microbatches: Sequence[Microbatch], context_rank: int) -> RoutedRows:
        """Number the rows; those of dummies and of microbatches without shares do not count."""
        most = max(1, *(each.tokens_BS.size(0) for each in microbatches))
        weights_N = torch.zeros(1 + most * len(microbatches), device=current_device())
        numbers = []
        for index, each in enumerate(microbatches):
            rows, first = each.tokens_BS.size(0), 1 + index * most
            numbers_BS = torch.zeros_like(each.tokens_BS)
            if each.shares is not None and not each.dummy:
                counts_BS = routed(each.data)
                numbers_BS = torch.arange(first, first + rows, device=weights_N.device)
                numbers_BS = numbers_BS.unsqueeze(1) * counts_BS
                lengths_B = counts_BS.sum(1).clamp(min=1)
                weights_N[first : first + rows] = each.shares / lengths_B
            taken_TR = each.layout.take(numbers_BS, context_rank, NOT_COUNTED)
            numbers.append(taken_TR.T.contiguous())
        return cls(most, weights_N, tuple(numbers))

    def within_microbatch(self, numbers_T: torch.Tensor) -> torch.Tensor:
        """Which row of its microbatch each token belongs to, from 0; 0 where it does not count."""
        return (numbers_T - 1).clamp(min=0) % self.most


@contextmanager
def routing(models: Iterable[torch.nn.Module], rows: RoutedRows | None) -> Iterator[None]:
    """Within this context the row numbers of microbatches stand for `rows`; without them routers
    observe nothing.
    """
    observers = [each for m in models for each in m.modules() if isinstance(each, Balancing)]
    for observer in observers:
        observer.rows = rows
    try:
        yield
    finally:
        for observer in observers:
            observer.rows = observer.numbers_T = None


class Balancing(torch.nn.Module):
    """Observes one router in training: its auxiliary losses and how many tokens experts take.

    Evaluation, and the first of two forward passes where activations are computed again, are not
    observed.
    """

    step_sums: torch.Tensor
    """fp64 `[E + 2]`, since the step began: tokens of each expert, then the means of load balancing
    loss and z-loss without their coefficients. Of this rank until the step is taken, then of all
    ranks.
    """
    favoured_E: torch.Tensor
    """Tokens that favour each expert, since the step began, on all ranks; fp64. Only
    `global_aux_loss` counts them.
    """

    def __init__(self, moe: Moe, config: Any, groups: Any) -> None:
        """`config` is Megatron-Core's, and `groups` its router, which has the process groups."""
        super().__init__()
        self.moe = moe
        self.kind: str = config.moe_router_load_balancing_type
        self.coefficient: float = config.moe_aux_loss_coeff
        self.z_coefficient: float = config.moe_z_loss_coeff or 0.0
        self.one_replica: dist.ProcessGroup = groups.tp_cp_group
        self.all_replicas: dist.ProcessGroup = groups.tp_dp_cp_group
        self.config = config
        self.rows: RoutedRows | None = None
        self.numbers_T: torch.Tensor | None = None
        """The row numbers of the tokens of the forward pass that is running."""
        sums = torch.zeros(moe.experts + 2, dtype=torch.float64, device=current_device())
        self.register_buffer("step_sums", sums, persistent=False)
        self.register_buffer("favoured_E", sums[:-2].clone(), persistent=False)

    def restart(self) -> None:
        """Begin a step."""
        self.step_sums.zero_()
        self.favoured_E.zero_()

    def forward(
        self, logits_TE: torch.Tensor, weights_TE: torch.Tensor, taken_TE: torch.Tensor
    ) -> torch.Tensor:
        """The experts' weights, to whose graph the gradient of the auxiliary losses is added.

        `logits_TE` are the router's, `taken_TE` says which experts a token takes.
        """
        rows, numbers_T = self.rows, self.numbers_T
        if rows is None or numbers_T is None or not (self.training and torch.is_grad_enabled()):
            return weights_TE
        counts_T1 = (numbers_T != NOT_COUNTED).unsqueeze(-1)
        token_weights_T = rows.token_weights_N[numbers_T]
        logits_TE = logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))
        self.step_sums[:-2] += (taken_TE & counts_T1).sum(0)
        added = logits_TE.new_zeros(())
        if self.coefficient:
            scores_TE = probabilities(logits_TE, self.moe)
            with torch.no_grad():
                best_TK = scores_TE.topk(self.moe.chosen, dim=-1).indices
                favoured_TE = torch.zeros_like(scores_TE).scatter(-1, best_TK, 1.0) * counts_T1
                scope_T, counts_SE = self._count(favoured_TE)
                shares_SE = counts_SE / counts_SE.sum(-1, keepdim=True).clamp(min=1)
                shares_TE = shares_SE.to(scores_TE.dtype)[scope_T]
            per_token_T = (shares_TE * scores_TE).sum(-1)
            balance = self.moe.experts * (per_token_T * token_weights_T).sum()
            self.step_sums[-2] += balance.detach()
            added = added + self.coefficient * balance
        if self.z_coefficient:
            z = (logits_TE.logsumexp(-1).square() * token_weights_T).sum()
            self.step_sums[-1] += z.detach()
            added = added + self.z_coefficient * z
        if not added.requires_grad:
            return weights_TE
        if self.config.fp16 and self.config.grad_scale_func is not None:
            added = self.config.grad_scale_func(added).squeeze()
        with_loss_TE: torch.Tensor = _AddedLoss.apply(weights_TE, added)  # type: ignore[no-untyped-call]
        return with_loss_TE

    def _count(self, favoured_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The scope of each token, and the favoured experts counted in each scope."""
        assert self.rows is not None and self.numbers_T is not None
        scopes = 1
        scope_T = torch.zeros_like(self.numbers_T)
        if self.kind == BY_SEQUENCE:
            scopes, scope_T = self.rows.most, self.rows.within_microbatch(self.numbers_T)
        counts_SE = favoured_TE.new_zeros(scopes, self.moe.experts)
        counts_SE = counts_SE.index_add(0, scope_T, favoured_TE)
        if self.kind != BY_GLOBAL_BATCH:
            dist.all_reduce(counts_SE, group=self.one_replica)
            return scope_T, counts_SE
        dist.all_reduce(counts_SE, group=self.all_replicas)
        self.favoured_E += counts_SE[0]
        return scope_T, self.favoured_E.unsqueeze(0)


def probabilities(logits_TE: torch.Tensor, moe: Moe) -> torch.Tensor:
    """The probability of each expert, `[T, E]`, as the load balancing losses define it: over all
    experts, before correction biases and groups.
    """
    if moe.scoring is not Scoring.SIGMOID:
        return logits_TE.softmax(-1)
    scores_TE = logits_TE.sigmoid()
    return scores_TE / (scores_TE.sum(-1, keepdim=True) + 1e-20)


class _AddedLoss(torch.autograd.Function):
    """Passes a tensor on; where its gradient is computed, the gradient of a loss is added."""

    @staticmethod
    def forward(ctx: Any, passed: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        return passed.view_as(passed)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return gradient, gradient.new_ones(())
