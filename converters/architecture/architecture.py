"""A decoder-only model in numbers: the values from which every layout and every builder derives."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any, NamedTuple

from megatron_policy.errors import ConversionError

from .rotary import Rope
from .traits import Activation, Mla, Moe, Norm, QkNorm, QueryGrowth, ScalarHead

VOCAB_MULTIPLE = 128
"""A rank's embedding shard has a multiple of this many rows (Megatron's own default)."""

MOST_LAYERS = 10_000
"""More are a mistake in the config, and listing them would take forever."""

MOST_EXPERTS = 1_000_000
"""Over all layers together."""

WIDEST = 2**24
"""More elements in one dimension of a weight are a mistake in the config: numbers of rows and of
columns are listed one by one, and their products counted in 64 bits.
"""

_FACTORS = (
    "layernorm_epsilon",
    "attention_scale",
    "attention_softcap",
    "embedding_scale",
    "residual_scale",
    "logit_scale",
    "logit_softcap",
)
_COUNTS = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "ffn_hidden_size",
    "vocab_size",
    "max_position_embeddings",
)
_LENGTHS = ("num_layers", "max_position_embeddings")


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One decoder. Raises ConversionError when the numbers contradict each other."""

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    ffn_hidden_size: int
    """Of the dense layers; unused when every layer is a mixture of experts."""
    vocab_size: int
    max_position_embeddings: int
    layernorm_epsilon: float
    rope: Rope
    tied: bool
    """The output layer is the embedding."""
    norm: Norm = Norm.RMS
    norm_bias: bool = False
    pre_norm: bool = True
    """The inputs of attention and MLP are normalised."""
    post_norm: bool = False
    """The outputs of attention and MLP are normalised before the residual sum."""
    parallel: bool = False
    """Attention and MLP take the same normalised input, and their outputs are added together."""
    activation: Activation = Activation.SILU
    gated: bool = True
    """The MLP multiplies its activation by a second projection."""
    qkv_bias: bool = False
    proj_bias: bool = False
    """On the attention output."""
    mlp_bias: bool = False
    """On both matrices of an MLP, and of every expert."""
    qk_norm: QkNorm = QkNorm.NONE
    window: int | None = None
    """Keys that a query sees on windowed layers, itself included; None: all."""
    # Per-layer values are left out of the hash, which keys the cache of layouts once per parameter
    # and must not walk over all layers.
    windowed: tuple[bool, ...] = field(default=(), hash=False)
    """Which layers have the window; empty means every layer if `window` is set."""
    window_rope: Rope | None = None
    """Rotary embedding of windowed layers where it differs from `rope`."""
    without_rope: tuple[bool, ...] = field(default=(), hash=False)
    """Which layers have no rotary embedding; empty means all layers have it."""
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0
    """Applied to what attention and MLP add to the residual stream."""
    embedding_dropout: float = 0.0
    attention_scale: float | None = None
    """Factor on query-key products; None: 1 / sqrt(head size)."""
    query_growth: QueryGrowth | None = None
    """How queries grow with their position; None: they do not."""
    attention_softcap: float | None = None
    """Attention scores s become cap * tanh(s / cap)."""
    attention_sinks: bool = False
    """Each head has a learnt score that takes part in the softmax and attends to nothing."""
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    """Factor on what attention and MLP add to the residual stream."""
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    """Applied after `logit_scale`."""
    moe: Moe | None = None
    moe_layers: tuple[bool, ...] = field(default=(), hash=False)
    """Which layers have experts; empty means every layer if `moe` is set."""
    mla: Mla | None = None
    """If set, `kv_channels` of query and key heads is the sum of both parts of a head in `mla`."""
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

    def __post_init__(self) -> None:
        for name in _COUNTS:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConversionError(f"{name} must be a positive integer, not {value!r}")
        if self.num_layers > MOST_LAYERS:
            raise ConversionError(f"{self.num_layers} layers are more than {MOST_LAYERS}")
        for name, width in self._widths():
            if width > WIDEST:
                raise ConversionError(f"{name} is {width}: no weight is wider than {WIDEST}")
        if self.moe is not None and self.moe.experts * self.num_layers > MOST_EXPERTS:
            raise ConversionError(
                f"{self.moe.experts} experts in {self.num_layers} layers are more than "
                f"{MOST_EXPERTS} in total"
            )
        for name in _FACTORS:
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int | float) and 0 < value < math.inf):
                raise ConversionError(f"{name} must be a positive number, not {value!r}")
        if self.num_attention_heads % self.num_query_groups:
            raise ConversionError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_query_groups})"
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
        rotated = self.mla.qk_rope_head_dim if self.mla else self.kv_channels
        for rope in filter(None, (self.rope, self.window_rope)):
            rope.check(rotated)
        for name, basis in (("windowed", self.window), ("moe_layers", self.moe)):
            if getattr(self, name) and basis is None:
                raise ConversionError(f"{name} names layers of a kind that the model does not have")
        for name in ("windowed", "moe_layers", "without_rope"):
            if getattr(self, name) and len(getattr(self, name)) != self.num_layers:
                raise ConversionError(
                    f"{name} names {len(getattr(self, name))} layers, not all {self.num_layers}"
                )

    def _widths(self) -> Iterator[tuple[str, int]]:
        """Every number that is a dimension of some weight."""
        yield from ((name, getattr(self, name)) for name in _COUNTS if name not in _LENGTHS)
        yield "num_attention_heads * head_dim", self.num_attention_heads * self.kv_channels
        for prefix, part in (("moe", self.moe), ("mla", self.mla)):
            for each in fields(part) if part is not None else ():
                value = getattr(part, each.name)
                if isinstance(value, int):
                    yield f"{prefix}.{each.name}", value

    @property
    def heads_per_group(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_attention_heads // self.num_query_groups

    @property
    def query_size(self) -> int:
        """Output rows of the query projection."""
        return self.num_attention_heads * self.kv_channels

    @property
    def kv_size(self) -> int:
        """Output rows of the key projection, and of the value projection."""
        return self.num_query_groups * self.kv_channels

    @property
    def expanded_size(self) -> int:
        """Output rows of the projection that expands `mla`'s compressed keys and values."""
        assert self.mla is not None
        return self.num_attention_heads * (self.mla.qk_nope_head_dim + self.mla.v_head_dim)

    @property
    def context_size(self) -> int:
        """Inputs of the attention output projection."""
        return self.num_attention_heads * (self.mla.v_head_dim if self.mla else self.kv_channels)

    @property
    def mtp_projection_size(self) -> int:
        """Inputs of the projection of a multi-token-prediction layer."""
        return 2 * self.hidden_size

    @property
    def mlp_widths(self) -> tuple[int, ...]:
        """Inner channels of the MLPs of dense layers and of shared experts, each once."""
        dense = (self.ffn_hidden_size,) if self.moe is None or self.moe_layers else ()
        shared = (self.moe.shared_ffn_hidden_size,) if self.moe else ()
        return tuple(dict.fromkeys(filter(None, (*dense, *shared))))

    @property
    def uniform_layers(self) -> bool:
        """Whether all layers have parameters of the same names and shapes."""
        return self.moe is None or not self.moe_layers

    def has_experts(self, layer: int) -> bool:
        """Whether this layer's MLP is a mixture of experts; those of all further layers are."""
        if layer >= self.num_layers:
            return self.moe is not None
        return self.moe is not None and (not self.moe_layers or self.moe_layers[layer])

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """The layers whose MLP is a mixture of experts."""
        return tuple(layer for layer in range(self.num_layers) if self.has_experts(layer))

    def has_window(self, layer: int) -> bool:
        """Whether this layer's queries see only a window of keys."""
        return self.window is not None and (not self.windowed or self.windowed[layer])

    def rope_of(self, layer: int) -> Rope | None:
        """This layer's rotary embedding; None where it has none."""
        if self.without_rope and self.without_rope[layer]:
            return None
        return self.window_rope if self.window_rope and self.has_window(layer) else self.rope

    def shape(self, dims: tuple[str | int, ...]) -> tuple[int, ...]:
        """The sizes of dimensions such as ("moe.experts", "hidden_size"); a number is a size."""
        return tuple(dim if isinstance(dim, int) else attrgetter(dim)(self) for dim in dims)

    def holds(self, condition: str, layer: int | None = None) -> bool:
        """Whether all words of a row's condition hold; "" always does.

        A word names a value that must be true, such as "tied" or "moe.shared_gate"; with "!" in
        front it must be false. "experts" asks whether `layer` has experts.
        """
        return all(
            self._holds(word.removeprefix("!"), layer) == (word[0] != "!")
            for word in condition.split()
        )

    def _holds(self, name: str, layer: int | None) -> bool:
        if name == "experts":
            return layer is not None and self.has_experts(layer)
        value: Any = self
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
