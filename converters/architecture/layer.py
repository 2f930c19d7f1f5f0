"""A decoder layer: what mixes tokens, what each token then passes through, and where it is
normalised.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import chain, zip_longest

from megatron_policy.errors import ConversionError

from .attention import Attention
from .channel_delta_net import ChannelDeltaNet
from .delta_net import DeltaNet
from .mamba2 import Mamba2
from .mla import Mla
from .mlp import Mlp
from .moe import Moe
from .part import LayerPart, Linears
from .short_convolution import ShortConvolution

Mixer = Attention | Mla | DeltaNet | ChannelDeltaNet | Mamba2 | ShortConvolution
Feed = Mlp | Moe

MOST_LAYERS = 10_000
"""More are a mistake in the config, and listing them would take forever."""


class Norms(Enum):
    """Where a layer normalises."""

    BEFORE = "before"
    """The inputs of mixer and feed."""
    AFTER = "after"
    """Their outputs, before the residual sum."""
    AROUND = "around"
    """Both."""
    ONE = "one"
    """One input for mixer and feed, whose outputs are added together."""

    @property
    def before(self) -> bool:
        return self is not Norms.AFTER

    @property
    def after(self) -> bool:
        return self in (Norms.AFTER, Norms.AROUND)

    @property
    def parallel(self) -> bool:
        return self is Norms.ONE


@dataclass(frozen=True)
class Beside:
    """A second mixer of a layer, which reads what the first one reads. What both give is added."""

    mixer: Mamba2
    scale: float = 1.0
    """Factor on what it gives."""
    scale_of_first: float = 1.0


@dataclass(frozen=True)
class Layer:
    """The parts of one layer, or its only one. Layers that are alike are one object."""

    mixer: Mixer | None
    feed: Feed | None
    norms: Norms = Norms.BEFORE
    beside: Beside | None = None

    def __post_init__(self) -> None:
        if not self.parts:
            raise ConversionError("a layer has neither a mixer nor a feed")

    @property
    def parts(self) -> tuple[Mixer | Feed, ...]:
        """Those that it has."""
        return (*self.mixers, *(() if self.feed is None else (self.feed,)))

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        """Its mixer, and the one beside that."""
        second = None if self.beside is None else self.beside.mixer
        return tuple(mixer for mixer in (self.mixer, second) if mixer is not None)

    def list_mixer_linears(self, hidden_size: int) -> Linears:
        """The linear layers of its mixers, those of two side by side together."""
        every = (mixer.list_linears(hidden_size) for mixer in self.mixers)
        return tuple(tuple(chain(*groups)) for groups in zip_longest(*every, fillvalue=()))

    def find_part(self, kind: type[LayerPart] | None) -> LayerPart | None:
        """This layer's part of that kind, if it has one."""
        return next((part for part in self.parts if type(part) is kind), None)


def stack(
    number: int,
    mixer: Mixer | Sequence[Mixer | None],
    feed: Feed | Sequence[Feed | None],
    norms: Norms | Sequence[Norms] = Norms.BEFORE,
    beside: Beside | None = None,
) -> tuple[Layer, ...]:
    """`number` layers; mixer, feed and norms are one for all, or one for each. All have
    the mixer `beside` their own.
    """
    check_number(number)
    mixers = mixer if isinstance(mixer, Sequence) else (mixer,) * number
    feeds = feed if isinstance(feed, Sequence) else (feed,) * number
    places = norms if isinstance(norms, Sequence) else (norms,) * number
    for named in (len(mixers), len(feeds), len(places)):
        if named != number:
            raise ConversionError(
                f"the config has {number} layers, but names the kind of {named}, not of every layer"
            )
    made: dict[tuple[Mixer | None, Feed | None, Norms], Layer] = {}
    return tuple(
        made.setdefault(parts, Layer(*parts, beside))
        for parts in zip(mixers, feeds, places, strict=True)
    )


def check_number(number: object) -> None:
    """ConversionError unless a model can have so many layers."""
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise ConversionError(f"num_layers must be a positive integer, not {number!r}")
    if number > MOST_LAYERS:
        raise ConversionError(f"{number} layers are more than {MOST_LAYERS}")
