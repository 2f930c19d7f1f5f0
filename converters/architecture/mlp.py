"""An MLP: two linear layers with an activation function between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .checks import check_counts, check_factors, check_widths
from .part import LayerPart, Linear, Linears, PartBytes, Place, RankShare, SplitCount
from .traits import Activation

FC1, FC2 = "mlp.linear_fc1", "mlp.linear_fc2"


@dataclass(frozen=True, kw_only=True)
class Mlp(LayerPart):
    """A dense MLP."""

    ffn_hidden_size: int
    activation: Activation = Activation.SILU
    gated: bool = True
    """It multiplies its activation by a second projection."""
    mlp_bias: bool = False
    """On both matrices."""
    gate_factor: float = 1.0
    """On what the activation function takes."""
    out_factor: float = 1.0
    """On what it gives."""

    computed_again: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_counts(self, "ffn_hidden_size")
        check_factors(self, "gate_factor", "out_factor")
        check_widths(ffn_hidden_size=self.ffn_hidden_size)

    @property
    def sizes(self) -> tuple[object, ...]:
        return self.ffn_hidden_size, self.activation, self.gated, self.mlp_bias

    @property
    def splits(self) -> tuple[SplitCount, ...]:
        return (SplitCount(self.ffn_hidden_size, "feed-forward channels"),)

    def list_linears(self, hidden_size: int) -> Linears:
        outputs = hidden_size * self.ffn_hidden_size
        first = Linear(FC1, (1 + self.gated) * outputs)
        return (first,), (Linear(FC2, outputs, Place.WHOLE, Place.STREAM),)

    def count_kept(self, share: RankShare, needed: bool) -> PartBytes:
        inner = self.ffn_hidden_size // share.tp
        token = count_token_bytes(self.activation, self.gated, share, FC1, FC2, inner, needed)
        return PartBytes(share.whole * token)


def count_token_bytes(
    activation: Activation,
    gated: bool,
    share: RankShare,
    first: str,
    last: str,
    inner: int,
    needed: bool,
    weighted: bool = False,
) -> int:
    """Bytes per token of these linear layers with `inner` channels on this rank, without the
    input: the output of the first, the input of the last, and what is between.
    """
    taken = share.width * inner * share.training.keep(last)
    if not (needed or share.training.adapted(first)):
        return taken
    if activation is Activation.XIELU:
        # The factors of both its branches, one of them of a weight, and which it takes.
        return taken + (share.width * (3 + int(share.training.trained)) + 1) * inner
    if not gated:
        return taken + share.width * inner * (1 + int(weighted))
    widths = 2
    if not share.kernels.fused_activation:
        # The activation's output and the other half with its offset, factors of each other;
        # clamped halves and a sigmoid besides.
        widths += 4 if activation is Activation.CLAMPED_SWIGLU else 2
    return taken + share.width * inner * (widths + int(weighted))
