"""The experts of a rank in one grouped matrix product per projection, where the device has it.

Shapes: T tokens of this rank's experts, sorted by expert; P the same with padding; E experts; H
model, F feed-forward channels; N outputs and K inputs of a projection.
"""

from __future__ import annotations

import copy
import logging
from functools import cache
from typing import Any

import torch
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_policy.device import compute_capability, is_accelerated, to_device

_log = logging.getLogger(__name__)
_ALIGNMENT = 8
"""Channels, and tokens of an expert: kernels want rows of 16 bytes in bfloat16, also where they sum
over tokens.
"""
_LEAST_CAPABILITY = (8, 0)
"""Of torch.nn.functional.grouped_mm, by its documentation in torch 2.13."""


class GroupedExperts(SequentialMLP):
    """Megatron-Core's loop over experts, or the same parameters in grouped products. Experts read
    and give vectors of `latent_size` channels, by default of the model's width.
    """

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        *args: Any,
        latent_size: int | None = None,
        **given: Any,
    ) -> None:
        own = copy.copy(config)
        own.moe_latent_size = latent_size
        super().__init__(num_local_experts, own, *args, **given)

    def forward(
        self,
        permuted_local_hidden_states: torch.Tensor,
        tokens_per_expert: torch.Tensor,
        permuted_probs: torch.Tensor,
    ) -> tuple[torch.Tensor, None]:
        """Outputs `[T, H]` of tokens `[T, H]`, the first `tokens_per_expert[0]` of which are of
        this rank's first expert, times their router weights `[T]`.
        """
        if not self._are_grouped(permuted_local_hidden_states):
            if is_accelerated() and len(permuted_local_hidden_states):
                _say_that_experts_loop(str(permuted_local_hidden_states.dtype))
            one_by_one: tuple[torch.Tensor, None] = super().forward(
                permuted_local_hidden_states, tokens_per_expert, permuted_probs
            )
            return one_by_one
        places_T, counts_E = _pad_places(tokens_per_expert)
        rows = int(counts_E.sum())
        places_T, ends_E = to_device(places_T), to_device(counts_E.cumsum(0).to(torch.int32))

        def padded(values: torch.Tensor) -> torch.Tensor:
            return values.new_zeros(rows, *values.shape[1:]).index_copy(0, places_T, values)

        probs_P1 = padded(permuted_probs).unsqueeze(-1)
        inner_PF = self._project("linear_fc1", padded(permuted_local_hidden_states), ends_E)
        if (bias_PF := self._bias("linear_fc1", counts_E)) is not None:
            inner_PF = inner_PF + bias_PF
        dtype = inner_PF.dtype
        inner_PF = (self._activate(inner_PF) * probs_P1).to(dtype)
        out_PH = self._project("linear_fc2", inner_PF, ends_E)
        if (bias_PH := self._bias("linear_fc2", counts_E)) is not None:
            out_PH = out_PH + (bias_PH * probs_P1).to(dtype)
        return out_PH[places_T], None

    def _are_grouped(self, tokens_TH: torch.Tensor) -> bool:
        """Whether products can be grouped: enough tokens and channels for the kernels, on a device
        that has them.
        """
        widths = {size for p in self._weights("linear_fc1") for size in p.shape}
        widths |= {size for p in self._weights("linear_fc2") for size in p.shape}
        aligned = all(size % _ALIGNMENT == 0 for size in widths)
        adapted = any(hasattr(m, "adapter") for e in self.local_experts for m in e.children())
        usable = bool(len(tokens_TH)) and aligned and not adapted
        return usable and has_grouped_products(tokens_TH)

    def _weights(self, name: str) -> list[torch.Tensor]:
        return [getattr(expert, name).weight for expert in self.local_experts]

    def _project(self, name: str, rows_PK: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
        weights = self._weights(name)
        found: torch.Tensor = _GroupedProduct.apply(rows_PK, ends_E, *weights)  # type: ignore[no-untyped-call]
        return found

    def _bias(self, name: str, counts_E: torch.Tensor) -> torch.Tensor | None:
        """Each row's bias, `[P, N]`."""
        biases = [getattr(expert, name).bias for expert in self.local_experts]
        if biases[0] is None:
            return None
        rows = int(counts_E.sum())
        return torch.stack(biases).repeat_interleave(to_device(counts_E), 0, output_size=rows)

    def _activate(self, inner_PF: torch.Tensor) -> torch.Tensor:
        config: Any = self.config
        if not config.gated_linear_unit:
            activated: torch.Tensor = config.activation_func(inner_PF)
            return activated
        gate, up = inner_PF.chunk(2, dim=-1)
        if (limit := config.activation_func_clamp_value) is not None:
            gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
        product: torch.Tensor = config.activation_func(gate) * (up + config.glu_linear_offset)
        return product


@cache
def _say_that_experts_loop(dtype: str) -> None:
    """Once for each dtype."""
    _log.warning(
        "experts are computed one by one, which is slow: grouped products need bfloat16 (these are "
        "%s), compute capability %d.%d, a torch with torch.nn.functional.grouped_mm, and widths "
        "that are multiples of %d",
        dtype,
        *_LEAST_CAPABILITY,
        _ALIGNMENT,
    )


def has_grouped_products(tokens: torch.Tensor) -> bool:
    """Whether torch has grouped products for these tokens' device and dtype. On a CPU it would only
    loop, as Megatron-Core does.
    """
    return (
        tokens.dtype == torch.bfloat16
        and hasattr(torch.nn.functional, "grouped_mm")
        and compute_capability() >= _LEAST_CAPABILITY
    )


def _pad_places(tokens_per_expert: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each token's row among the padded ones, `[T]`, and each expert's number of those, `[E]`, both
    on the CPU.
    """
    counts_E = torch.as_tensor(tokens_per_expert).cpu().long()
    padded_E = -(-counts_E // _ALIGNMENT) * _ALIGNMENT
    shift_E = (padded_E.cumsum(0) - padded_E) - (counts_E.cumsum(0) - counts_E)
    places_T = torch.arange(int(counts_E.sum())) + shift_E.repeat_interleave(counts_E)
    return places_T, padded_E


class _GroupedProduct(torch.autograd.Function):
    """Rows `[P, K]` times the weights `[N, K]` of E experts: `[P, N]`. Expert e has the rows from
    the end of the one before to `ends_E[e]`.

    The weights, which optimizers keep apart, are stacked for each product and not saved stacked.
    """

    @staticmethod
    def forward(
        ctx: Any, rows_PK: torch.Tensor, ends_E: torch.Tensor, *weights_NK: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(rows_PK, ends_E, *weights_NK)
        stacked_ENK = torch.stack(weights_NK)
        return torch.nn.functional.grouped_mm(rows_PK, stacked_ENK.mT, offs=ends_E)

    @staticmethod
    def backward(ctx: Any, grad_PN: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows_PK, ends_E, *weights_NK = ctx.saved_tensors
        grad_PN = grad_PN.contiguous()
        product = torch.nn.functional.grouped_mm
        grad_rows = product(grad_PN, torch.stack(weights_NK), offs=ends_E)
        grad_ENK = product(grad_PN.mT, rows_PK, offs=ends_E)
        # A kernel need not write the result of an expert without rows.
        empty_E = ends_E.diff(prepend=ends_E.new_zeros(1)) == 0
        grad_ENK = grad_ENK.masked_fill(empty_E.view(-1, 1, 1), 0.0)
        return (grad_rows, None, *grad_ENK.unbind())
