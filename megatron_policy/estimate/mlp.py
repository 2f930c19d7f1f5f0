"""Bytes that MLPs keep of a microbatch: dense ones, and mixtures of experts with their router."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_policy.converters.architecture import Activation, Architecture, Moe
from megatron_policy.estimate.adapters import (
    EXPERT_FC1,
    EXPERT_FC2,
    FC1,
    FC2,
    SHARED_FC1,
    SHARED_FC2,
    Linears,
    RankTokens,
)
from megatron_policy.estimate.attention import INT64
from megatron_policy.estimate.states import FP32
from megatron_policy.parallel.topology import Topology


@dataclass(frozen=True)
class Mlps:
    """The MLPs of one model. `width` is the bytes of an activation; `fused` says whether SwiGLU is
    one kernel, which keeps nothing but its input.
    """

    arch: Architecture
    topology: Topology
    width: int
    fused: bool

    def of_layer(self, layer: int, tokens: RankTokens, linears: Linears, needed: bool) -> int:
        """What the MLP of layer number `layer` keeps, without its input and its adapters; `needed`
        says whether its input needs gradients.
        """
        arch = self.arch
        if arch.moe is not None and arch.has_experts(layer):
            return self._experts(arch.moe, tokens, linears, needed)
        inner = arch.ffn_hidden_size // self.topology.tp
        return tokens.whole * self._mlp(FC1, FC2, inner, linears, needed)

    def _experts(self, moe: Moe, tokens: RankTokens, linears: Linears, needed: bool) -> int:
        """Router, dispatch, experts and the shared MLP."""
        # Scores, their transposed copy and the map of experts; choices, weights and places.
        router = moe.experts * (2 * FP32 + 1) + moe.chosen * (2 * INT64 + FP32)
        inner = moe.ffn_hidden_size // self.topology.expert_tp
        experts = self._mlp(EXPERT_FC1, EXPERT_FC2, inner, linears, needed, weighted=True)
        experts += self.width * self.arch.hidden_size * linears.keep(EXPERT_FC1) + FP32 * needed
        inner = moe.shared_ffn_hidden_size // self.topology.tp
        shared = self._mlp(SHARED_FC1, SHARED_FC2, inner, linears, needed)
        routed = tokens.routed * experts
        return tokens.stream * router * needed + routed + tokens.whole * shared

    def _mlp(
        self,
        first: str,
        last: str,
        inner: int,
        linears: Linears,
        needed: bool,
        weighted: bool = False,
    ) -> int:
        """Bytes per token of these linear layers with `inner` channels on this rank, without the
        input: the output of the first, the input of the last, and what is between.
        """
        taken = self.width * inner * linears.keep(last)
        if not (needed or linears.adapted(first)):
            return taken
        if self.arch.activation is Activation.XIELU:
            # The factors of both its branches, one of them of a weight, and which it takes.
            return taken + (self.width * (3 + int(linears.trained)) + 1) * inner
        if not self.arch.gated:
            return taken + self.width * inner
        widths = 2
        if not self.fused:
            # The activation's output and the other half with its offset, factors of each other;
            # clamped halves and a sigmoid besides.
            widths += 4 if self.arch.activation is Activation.CLAMPED_SWIGLU else 2
        return taken + self.width * inner * (widths + int(weighted))
