"""A decoder-only model in numbers: the values from which every layout and every builder derives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeVar, cast

from megatron_policy.errors import ConversionError

from .attention import Attention
from .channel_delta_net import ChannelDeltaNet
from .checks import check_counts, check_factors, check_widths
from .delta_net import DeltaNet
from .layer import Feed, Layer, check_number
from .mamba2 import Mamba2
from .mla import Mla
from .mlp import Mlp
from .moe import Moe
from .part import LayerPart
from .rotary import Rope
from .shell import Shell
from .short_convolution import ShortConvolution
from .traits import Norm, ScalarHead

VOCAB_MULTIPLE = 128
"""A rank's embedding shard has a multiple of this many rows (Megatron's own default)."""

MOST_EXPERTS = 1_000_000
"""Over all layers together."""

KINDS = (Attention, Mla, DeltaNet, ChannelDeltaNet, Mamba2, ShortConvolution, Mlp, Moe)
"""The kinds of parts, in the order in which messages name them."""

_P = TypeVar("_P", bound=LayerPart)


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One decoder. Raises ConversionError when the numbers contradict each other."""

    # Left out of the hash, which keys the cache of layouts once per parameter and must not walk
    # over all layers.
    layers: tuple[Layer, ...] = field(hash=False)
    """Parts of one kind have the same parameters in all layers."""
    hidden_size: int
    vocab_size: int
    max_position_embeddings: int
    layernorm_epsilon: float
    tied: bool
    """The output layer is the embedding."""
    norm: Norm = Norm.RMS
    norm_bias: bool = False
    hidden_dropout: float = 0.0
    """Applied to what mixers and feeds add to the residual stream."""
    embedding_dropout: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    """Factor on what mixers and feeds add to the residual stream."""
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    """Applied after `logit_scale`."""
    unused_ffn_hidden_size: int = 0
    """What the config says of dense MLPs where every layer is a mixture of experts: Megatron-Core
    wants to know it, and the digests of checkpoints contain it.
    """
    unused_rope: Rope | None = None
    """What the config says of the rotary embedding of layers without a window, where none of them
    has it: the digests of checkpoints contain it.
    """
    window_rope: Rope | None = None
    """What the config says of the rotary embedding of layers with a window, also where it is that
    of all others: as above.
    """
    further_layers: int = 0
    """Multi-token-prediction layers that checkpoints can hold, numbered after all others."""
    mtp_layers: int = 0
    """How many of `further_layers`, from the first on, this model has; it leaves out the others."""
    mtp_before_norm: bool = False
    """The first of these layers takes the hidden states before the model's final norm."""
    in_full: bool = True
    """False of a model without a family: these are its sizes, not all that it computes."""
    head: ScalarHead | None = None
    """Gives one number for each token, in place of the logits of a vocabulary."""
    attachments: tuple[str, ...] = ()
    """Keys of a batch that its first stage reads beside the tokens: a tensor, or None, for each
    row.
    """
    shell: Shell | None = None
    """What surrounds a decoder that also sees pictures."""

    def __post_init__(self) -> None:
        check_number(self.num_layers)
        check_counts(self, "hidden_size", "vocab_size", "max_position_embeddings")
        check_widths(hidden_size=self.hidden_size, vocab_size=self.vocab_size)
        check_factors(self, "layernorm_epsilon", "embedding_scale", "residual_scale")
        check_factors(self, "logit_scale", "logit_softcap")
        for what, kinds in (("attention", KINDS[:2]), ("an MLP or experts", KINDS[-2:])):
            if self.parts.keys().isdisjoint(kinds):
                raise ConversionError(f"no layer of the model has {what}")
        moe = self.moe
        if moe is not None and moe.experts * self.num_layers > MOST_EXPERTS:
            raise ConversionError(
                f"{moe.experts} experts in {self.num_layers} layers are more than "
                f"{MOST_EXPERTS} in total"
            )
        if not 0 <= self.mtp_layers <= self.further_layers:
            raise ConversionError(
                f"the model has {self.further_layers} layers for multi-token prediction that can "
                f"be trained (num_nextn_predict_layers), but mtp_num_layers asks for "
                f"{self.mtp_layers}: set it to {self.further_layers}"
                + (" or less" if self.further_layers else "")
            )
        if self.head is not None and self.mtp_layers:
            raise ConversionError(
                "layers for multi-token prediction need the head of a language model, which this "
                "model does not have: set mtp_num_layers to 0"
            )

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @cached_property
    def parts(self) -> Mapping[type[LayerPart], LayerPart]:
        """One part of each kind that the model has; the others have the same sizes."""
        found: dict[type[LayerPart], LayerPart] = {}
        for layer in dict.fromkeys(self.layers):
            for part in layer.parts:
                first = found.setdefault(type(part), part)
                if part.sizes != first.sizes:
                    raise ConversionError(
                        f"layers of one model have {type(part).__name__} parts of different sizes"
                    )
        return {kind: found[kind] for kind in KINDS if kind in found}

    def find_part(self, kind: type[_P]) -> _P | None:
        """One part of that kind, if the model has any."""
        return cast("_P | None", self.parts.get(kind))

    @property
    def moe(self) -> Moe | None:
        return self.find_part(Moe)

    @property
    def mixer(self) -> Attention | Mla:
        """The attention that the model has; where both kinds are, that of the first one."""
        found = self.find_part(Attention) or self.find_part(Mla)
        assert found is not None, "checked"
        return found

    @property
    def feed(self) -> Feed:
        """A dense MLP, if the model has any, or else experts; both have one activation function."""
        found = self.find_part(Mlp) or self.moe
        assert found is not None, "checked"
        return found

    def find_layer(self, number: int) -> Layer:
        """A layer by its number; those for multi-token prediction, which come after all others, are
        like the last one that has attention and, if any layer has them, experts, or else like the
        last one with experts, or the last of all. Where layers have one part each, they have both:
        attention, and experts if there are any.
        """
        if number < self.num_layers:
            return self.layers[number]
        if self.has_single_parts:
            return Layer(self.mixer, self.moe or self.feed)
        layers = [self.layers[n] for n in self.expert_layers] or self.layers
        attend = [layer for layer in layers if isinstance(layer.mixer, Attention | Mla)]
        return (attend or layers)[-1]

    @cached_property
    def expert_layers(self) -> tuple[int, ...]:
        """The numbers of the layers that are mixtures of experts."""
        return tuple(n for n, layer in enumerate(self.layers) if isinstance(layer.feed, Moe))

    def change_experts(self, **changes: Any) -> Architecture:
        """The same model of a checkpoint that has its experts in another form."""
        made = {
            layer: replace(layer, feed=replace(layer.feed, **changes))
            for layer in dict.fromkeys(self.layers)
            if isinstance(layer.feed, Moe)
        }
        return replace(self, layers=tuple(made.get(layer, layer) for layer in self.layers))

    @cached_property
    def uniform_layers(self) -> bool:
        """Whether all layers have parameters of the same names and shapes."""
        return len({(type(layer.mixer), type(layer.feed)) for layer in set(self.layers)}) == 1

    @cached_property
    def has_single_parts(self) -> bool:
        """Whether any layer has a mixer or a feed alone."""
        return any(len(layer.parts) < 2 for layer in set(self.layers))

    def cost_layers(self, further: int = 0) -> tuple[int, ...]:
        """Elements by which each layer multiplies a token. The last one counts with the head, and
        with what predicts `further` tokens.
        """
        predicting = self.find_layer(self.num_layers)
        costs = {
            layer: sum(
                linear.elements
                for part in layer.parts
                for group in part.list_linears(self.hidden_size)
                for linear in group
            )
            for layer in {*self.layers, predicting}
        }
        head = 0 if self.head else self.hidden_size * self.vocab_size
        mtp = costs[predicting] + self.hidden_size * self.mtp_projection_size + head
        *others, last = (costs[layer] for layer in self.layers)
        return *others, last + head + further * mtp

    @cached_property
    def ropes(self) -> tuple[Rope, ...]:
        """The kinds of rotary embedding that layers have."""
        mixers = (layer.mixer for layer in dict.fromkeys(self.layers))
        ropes = (mixer.rope for mixer in mixers if mixer is not None)
        return tuple(dict.fromkeys(rope for rope in ropes if rope is not None))

    @property
    def positions(self) -> int:
        """The longest text, in tokens, that the model is made for."""
        limit = self.max_position_embeddings
        return max((rope.positions(limit) for rope in self.ropes), default=limit)

    @property
    def mtp_projection_size(self) -> int:
        """Inputs of the projection of a multi-token-prediction layer."""
        return 2 * self.hidden_size

    def shape(
        self, dims: tuple[str | int, ...], kind: type[LayerPart] | None = None
    ) -> tuple[int, ...]:
        """The sizes of dimensions, which are names of attributes of the part of that kind or else
        of the model, such as ("experts", "hidden_size"); a number is a size.
        """
        part = None if kind is None else self.parts[kind]
        return tuple(
            dim if isinstance(dim, int) else getattr(part if hasattr(part, dim) else self, dim)
            for dim in dims
        )

    def holds(
        self, condition: str, kind: type[LayerPart] | None = None, layer: int | None = None
    ) -> bool:
        """Whether `layer` has a part of that kind for which all words of a row's condition hold; ""
        always does. Without a kind the words are about the model.

        A word names a value that must be true, such as "tied" or "head.per_token"; with "!" in
        front it must be false.
        """
        about: object = self
        if kind is not None:
            assert layer is not None, f"{kind} is a part of layers"
            about = self.find_layer(layer).find_part(kind)
        return about is not None and all(
            _is_true(about, word.removeprefix("!")) == (word[0] != "!")
            for word in condition.split()
        )


def _is_true(about: object, name: str) -> bool:
    value: Any = about
    for part in name.split("."):
        value = value and getattr(value, part)
    return bool(value)


def padded_vocab(vocab_size: int, tp: int, multiple: int = VOCAB_MULTIPLE) -> int:
    """Rows of the embedding over all `tp` ranks: `vocab_size` rounded up to multiple * tp."""
    step = multiple * tp
    return -(-vocab_size // step) * step


class VocabShard(NamedTuple):
    """A rank's entries of the vocabulary: `real` of them from `first` on, then padding up to `rows`
    in all.
    """

    first: int
    real: int
    rows: int


def vocab_shard(vocab_size: int, rank: int, tp: int) -> VocabShard:
    """The shard of tensor-parallel rank `rank` of `tp`; ranks at the end can have padding only."""
    rows = padded_vocab(vocab_size, tp) // tp
    first = rank * rows
    return VocabShard(first, max(0, min(vocab_size - first, rows)), rows)
