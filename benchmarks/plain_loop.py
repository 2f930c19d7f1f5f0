"""A training step written with Megatron-Core alone, including its loss.

Shapes: B rows of a global batch, S positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func

Microbatch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class PlainLoop:
    """One pipeline stage, one chunk: its fields are what Megatron-Core's schedule takes."""

    model: DistributedDataParallel
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler

    def step(
        self, tokens_BS: torch.Tensor, mask_BS: torch.Tensor, rows: int
    ) -> tuple[float, float]:
        """Train on microbatches of `rows`; return the mean next-token loss and the
        gradient norm.
        """
        where = next(self.model.parameters()).device
        tokens_BS, mask_BS = tokens_BS.to(where), mask_BS.to(where)
        labels_BS, counted_BS = tokens_BS.roll(-1, 1), mask_BS.roll(-1, 1)
        counted_BS[:, -1] = 0  # the last token has nothing to predict
        total = counted_BS.sum()
        microbatches = list(
            zip(tokens_BS.split(rows), labels_BS.split(rows), counted_BS.split(rows), strict=True)
        )
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        losses = self._forward_backward(microbatches, total)
        succeeded, norm, _ = self.optimizer.step()
        assert succeeded
        self.scheduler.step(increment=tokens_BS.size(0))
        return float(torch.stack(losses).sum()), float(norm)

    def _forward_backward(
        self, microbatches: Sequence[Microbatch], total: torch.Tensor
    ) -> list[torch.Tensor]:
        rows, length = microbatches[0][0].shape
        positions_BS = torch.arange(length, device=total.device).expand(rows, length)

        def forward(
            batches: Iterator[Microbatch], model: torch.nn.Module
        ) -> tuple[torch.Tensor, Any]:
            tokens, labels, counted = next(batches)

            def loss(losses_BS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
                value = (losses_BS * counted).sum() / total
                return value, torch.ones((), dtype=torch.int), value.detach().clone()

            return model(tokens, positions_BS, None, labels=labels), loss

        kept: list[torch.Tensor] = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter(microbatches),
            model=self.model,
            num_microbatches=len(microbatches),
            seq_length=length,
            micro_batch_size=rows,
            forward_only=False,
        )
        return kept
