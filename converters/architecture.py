"""What a decoder-only model is, in numbers: the values every layout and every builder derives from.

Knows neither Hugging Face nor Megatron-Core names of files, tensors or config fields.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_policy.errors import ConversionError

VOCAB_MULTIPLE = 128
"""Rows of a rank's embedding shard come in multiples of this, which is Megatron's own default."""

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


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3's rotary scaling: wavelengths beyond the original context grow by `factor`."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding over the whole head; its frequencies may be scaled."""

    base: float
    scaling: Llama3Scaling | None = None


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One dense decoder. ConversionError when the numbers contradict each other."""

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    ffn_hidden_size: int
    vocab_size: int
    max_position_embeddings: int
    layernorm_epsilon: float
    rope: Rope
    tied: bool
    """The output layer is the embedding."""
    add_qkv_bias: bool = False
    add_bias_linear: bool = False
    """Every linear layer of a block has a bias: qkv, attention output, both MLP matrices."""
    qk_layernorm: bool = False
    window: int | None = None
    """Keys a query sees, itself included, on windowed layers; None: all."""
    # Per layer; empty means every layer when `window` is set. Left out of the hash, which keys the
    # cache of layouts once per parameter and must not cost a walk over all layers.
    windowed: tuple[bool, ...] = field(default=(), hash=False)
    attention_dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in _COUNTS:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConversionError(f"{name} must be a positive integer, not {value!r}")
        if self.num_attention_heads % self.num_query_groups:
            raise ConversionError(
                f"{self.num_attention_heads} attention heads cannot be shared evenly by "
                f"{self.num_query_groups} key/value heads: it must be a multiple of them"
            )
        if self.kv_channels % 2:
            raise ConversionError(
                f"rotary embedding needs an even head size, not {self.kv_channels}"
            )
        if self.windowed and (self.window is None or len(self.windowed) != self.num_layers):
            raise ConversionError(
                f"windowed names {len(self.windowed)} layers with window {self.window}; "
                f"it must name all {self.num_layers} and have a window"
            )

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
    def qkv_bias(self) -> bool:
        """Whether the fused query/key/value projection has a bias."""
        return self.add_qkv_bias or self.add_bias_linear

    def shape(self, dims: tuple[str, ...]) -> tuple[int, ...]:
        """The sizes that dimension names such as ("ffn_hidden_size", "hidden_size") stand for."""
        return tuple(getattr(self, dim) for dim in dims)

    def holds(self, condition: str) -> bool:
        """Whether a row's condition is met: "" always, "tied" or "!tied" by that attribute."""
        name = condition.removeprefix("!")
        return not name or bool(getattr(self, name)) == (name == condition)


def padded_vocab(vocab_size: int, tp: int, multiple: int = VOCAB_MULTIPLE) -> int:
    """Rows of the embedding over all `tp` ranks: `vocab_size` rounded up to multiple * tp."""
    step = multiple * tp
    return -(-vocab_size // step) * step
