"""A mixture of experts: a router, experts of which each token uses some, and shared ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from megatron_policy.errors import ConversionError

from .checks import check_counts, check_widths
from .mlp import count_token_bytes
from .part import FP32, INT64, LayerPart, Linear, Linears, PartBytes, Place, RankShare, SplitCount
from .traits import Activation, Scoring

ROUTER = "mlp.router"
LATENT_FC1, LATENT_FC2 = "mlp.fc1_latent_proj", "mlp.fc2_latent_proj"
EXPERT_FC1, EXPERT_FC2 = "mlp.experts.linear_fc1", "mlp.experts.linear_fc2"
SHARED_FC1, SHARED_FC2 = "mlp.shared_experts.linear_fc1", "mlp.shared_experts.linear_fc2"


@dataclass(frozen=True, kw_only=True)
class Moe(LayerPart):
    """Mixture-of-experts MLPs: `experts` MLPs, of which each token uses `chosen`."""

    experts: int
    chosen: int
    ffn_hidden_size: int
    scoring: Scoring
    renormalized: bool = False
    """The chosen experts' scores are divided by their sum."""
    least_sum: float = 0.0
    """If that sum is smaller, the scores are divided by this instead."""
    added_to_sum: float = 1e-20
    """The sum is made so much larger before it divides."""
    scale: float = 1.0
    """Factor on the chosen experts' weights."""
    groups: int = 1
    groups_chosen: int = 1
    """Experts are in `groups`; a token only uses experts of its best `groups_chosen` groups."""
    correction_bias: bool = False
    """A bias, kept in fp32, that affects which experts are chosen but not their weights."""
    router_bias: bool = False
    shared_ffn_hidden_size: int = 0
    """Width of the shared MLP that every token also passes through; 0: there is none."""
    shared_gate: bool = False
    """The shared MLP's output is multiplied by a sigmoid gate computed from the token."""
    aux_loss_coeff: float | None = field(default=None, compare=False)
    """The makers' coefficient of the load balancing loss, if they publish one; of use in training
    only.
    """
    stacked: bool = field(default=False, compare=False)
    """The checkpoint has one tensor of all experts of a layer, where its family has both forms."""
    activation: Activation = Activation.SILU
    mlp_bias: bool = False
    """On both matrices of every expert."""
    gated: bool = True
    """An expert multiplies its activation by a second projection; so does the shared MLP."""
    latent_size: int = 0
    """Width of the vectors that experts read and give, to which tokens are projected and from
    which they are projected back; 0: that of the model.
    """
    inputs_first: bool = field(default=False, compare=False)
    """Stacks of experts have inputs before outputs in the checkpoint."""

    norm_apart: ClassVar[bool] = True
    keeps_input: ClassVar[bool] = True
    """Megatron-Core's router keeps its input, frozen or not."""
    needs_sequence_parallel: ClassVar[str] = "experts"

    def __post_init__(self) -> None:
        counts = ("experts", "chosen", "ffn_hidden_size", "groups", "groups_chosen")
        check_counts(self, *counts, of="moe.")
        names = (*counts, "shared_ffn_hidden_size", "latent_size")
        check_widths(**{f"moe.{name}": getattr(self, name) for name in names})
        if self.experts % self.groups or self.groups_chosen > self.groups:
            raise ConversionError(
                f"{self.experts} experts in {self.groups} groups, {self.groups_chosen} of them "
                "chosen: experts must divide evenly into groups, and topk_group must not "
                "exceed n_group"
            )
        if self.chosen > self.experts // self.groups * self.groups_chosen:
            raise ConversionError(
                f"{self.chosen} experts cannot be chosen from {self.experts} in "
                f"{self.groups_chosen} of {self.groups} groups"
            )

    @property
    def shared_gates(self) -> int:
        """Rows of the shared MLP's gate."""
        return int(self.shared_gate)

    @property
    def sizes(self) -> tuple[object, ...]:
        biases = self.correction_bias, self.router_bias, self.mlp_bias, self.shared_gate
        widths = self.ffn_hidden_size, self.shared_ffn_hidden_size, self.latent_size
        return self.experts, *widths, self.activation, self.gated, *biases

    @property
    def splits(self) -> tuple[SplitCount, ...]:
        shared = self.shared_ffn_hidden_size
        return (SplitCount(shared, "feed-forward channels"),) if shared else ()

    def list_linears(self, hidden_size: int) -> Linears:
        width, up = self.latent_size or hidden_size, 1 + self.gated
        own = width * self.chosen * self.ffn_hidden_size
        shared, latent = hidden_size * self.shared_ffn_hidden_size, hidden_size * self.latent_size
        routed = (Place.ROUTED, Place.ROUTED, self.experts, self.chosen)
        router = Linear(ROUTER, hidden_size * (self.experts + self.shared_gates))
        first = (Linear(EXPERT_FC1, up * own, *routed), Linear(SHARED_FC1, up * shared))
        last = Linear(EXPERT_FC2, own, *routed)
        shared_last = Linear(SHARED_FC2, shared, Place.WHOLE, Place.STREAM)
        if not latent:
            return (router, *first), (last, shared_last)
        into, out = (Linear(name, latent, out=Place.STREAM) for name in (LATENT_FC1, LATENT_FC2))
        return (router, into, first[1]), first[:1], (last, shared_last), (out,)

    def count_kept(self, share: RankShare, needed: bool) -> PartBytes:
        # Scores, their transposed copy and the map of experts; choices, weights and places.
        router = self.experts * (2 * FP32 + 1) + self.chosen * (2 * INT64 + FP32)
        inner = self.ffn_hidden_size // share.expert_tp
        kind = (self.activation, self.gated, share)
        experts = count_token_bytes(*kind, EXPERT_FC1, EXPERT_FC2, inner, needed, weighted=True)
        width = self.latent_size or share.hidden_size
        experts += share.width * width * share.training.keep(EXPERT_FC1)
        experts += FP32 * needed
        inner = self.shared_ffn_hidden_size // share.tp
        shared = count_token_bytes(*kind, SHARED_FC1, SHARED_FC2, inner, needed)
        routed = share.tokens(Place.ROUTED, self.chosen) * experts
        # Experts read what the latent projection gives, and the other one reads what they give.
        latent = share.width * self.latent_size * share.training.keep(LATENT_FC2)
        # The shared MLP's output and its gate, which are multiplied.
        gate = share.width * (share.hidden_size + 1) * self.shared_gate
        whole = share.whole * shared
        return PartBytes(share.stream * ((router + gate) * needed + latent) + routed + whole)
