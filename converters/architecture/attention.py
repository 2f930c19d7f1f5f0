"""Attention: heads of queries, of which several can share a key and a value."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megatron_policy.errors import ConversionError

from .checks import check_counts, check_factors, check_widths
from .part import (
    FP32,
    CoreBytes,
    LayerPart,
    Linear,
    Linears,
    PartBytes,
    Place,
    RankShare,
    SplitCount,
    Tiles,
)
from .rotary import Rope
from .traits import QkNorm, QueryGrowth

QKV, PROJ = "self_attention.linear_qkv", "self_attention.linear_proj"


@dataclass(frozen=True, kw_only=True)
class Attention(LayerPart):
    """Causal attention over all tokens, or over a window of them."""

    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    """The size of a head."""
    rope: Rope | None
    """The rotary embedding; None: there is none."""
    window: int | None = None
    """Keys that a query sees, itself included; None: all."""
    qkv_bias: bool = False
    proj_bias: bool = False
    """On the output."""
    qk_norm: QkNorm = QkNorm.NONE
    attention_dropout: float = 0.0
    """On the attention weights."""
    attention_scale: float | None = None
    """Factor on query-key products; None: 1 / sqrt(head size)."""
    query_growth: QueryGrowth | None = None
    """How queries grow with their position; None: they do not."""
    attention_softcap: float | None = None
    """Attention scores s become cap * tanh(s / cap)."""
    attention_sinks: bool = False
    """Each head has a learnt score that takes part in the softmax and attends to nothing."""
    attention_output_gate: bool = False
    """The projection of queries also gives a gate for each channel, by whose sigmoid the output is
    multiplied.
    """

    def __post_init__(self) -> None:
        heads, groups, head = self.num_attention_heads, self.num_query_groups, self.kv_channels
        check_counts(self, "num_attention_heads", "num_query_groups", "kv_channels")
        check_widths(num_attention_heads=heads, num_query_groups=groups, kv_channels=head)
        check_widths(**{"num_attention_heads * head_dim": heads * head})
        check_factors(self, "attention_scale", "attention_softcap")
        if heads % groups:
            raise ConversionError(
                f"num_attention_heads ({heads}) must be a multiple of "
                f"num_key_value_heads ({groups})"
            )
        if self.rope is not None:
            self.rope.check(head)

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
    def gate_size(self) -> int:
        """Rows of the gate."""
        return self.query_size * self.attention_output_gate

    @property
    def gated_query_size(self) -> int:
        """Rows of the query projection with those of the gate."""
        return self.query_size + self.gate_size

    @property
    def context_size(self) -> int:
        """Inputs of the output projection."""
        return self.query_size

    @property
    def sizes(self) -> tuple[object, ...]:
        heads = self.num_attention_heads, self.num_query_groups, self.kv_channels
        biases = self.qkv_bias, self.proj_bias, self.qk_norm, self.attention_sinks
        return *heads, *biases, self.attention_output_gate

    @property
    def splits(self) -> tuple[SplitCount, ...]:
        own = self.qk_norm in (QkNorm.EACH_HEAD, QkNorm.ALL_HEADS)
        what = "key-value groups, whose norms differ" if own else "key-value groups"
        groups = SplitCount(self.num_query_groups, what, multiples=not own)
        return SplitCount(self.num_attention_heads, "attention heads"), groups

    def list_linears(self, hidden_size: int) -> Linears:
        qkv = Linear(QKV, hidden_size * (self.gated_query_size + 2 * self.kv_size))
        proj = Linear(PROJ, self.context_size * hidden_size, Place.WHOLE, Place.STREAM)
        return (qkv,), (proj,)

    def count_core_flops(self, lengths: Iterable[int]) -> int:
        """Operations of the query-key products and of the weighted sums of values."""
        return count_pair_flops(lengths, self.window, self.query_size + self.context_size)

    def count_exchanged(self, tp: int, cp: int) -> int:
        """Channels of a token's keys and values, which visit all context-parallel ranks."""
        return 2 * max(self.kv_size // tp, self.kv_channels)

    def count_cached(self, tokens: int, width: int) -> int:
        """Bytes that generation keeps of a sequence: keys and values of all its tokens."""
        return 2 * self.kv_size * tokens * width

    def count_kept(self, share: RankShare, needed: bool) -> PartBytes:
        projected = share.training.keep(PROJ)
        heads, groups = self._heads(share.tp)
        if not (needed or share.training.adapted(QKV)):
            context = heads * self.kv_channels * share.whole * share.width * projected
            return PartBytes(0, CoreBytes(context, context, 0))
        inner = share.whole * self._query_norms(share, heads, groups)
        if self.rope is not None:
            inner += count_angle_bytes(self.rope, self.kv_channels, share)
        explicit = self.attention_sinks or self.attention_softcap is not None
        core = self._explicit_core if explicit else self._fused_core
        context = projected
        if self.attention_output_gate:  # its sigmoid, which multiplies what core attention gives
            inner += heads * self.kv_channels * share.whole * (FP32 + share.width * projected)
            context = True
        return PartBytes(inner, core(share, share.tiles(self.window, explicit), context))

    def _heads(self, tp: int) -> tuple[int, int]:
        """Query and key heads of a rank."""
        return self.num_attention_heads // tp, max(1, self.num_query_groups // tp)

    def _query_norms(self, share: RankShare, heads: int, groups: int) -> int:
        """Bytes per token of the norms of queries and keys."""
        channels = (heads + groups) * self.kv_channels
        factors = (1 + int(share.training.trained)) * FP32 * channels
        match self.qk_norm:
            case QkNorm.NONE:
                return 0
            case QkNorm.ALL_HEADS:  # the input and what the weight multiplies, and the square's sum
                return factors + 2 * FP32 * 2
            case QkNorm.EACH_HEAD:
                return factors + 2 * FP32 * (heads + groups)
        return (heads + groups) * share.norm(self.kv_channels)

    def _inputs(self, share: RankShare) -> tuple[int, int, int]:
        """Of a rank's queries; of those, if they are a copy, and of keys; and of the joint
        projection's output, which is kept whole as values are a view of it; with fewer groups than
        ranks that of all ranks.
        """
        heads, groups = self._heads(share.tp)
        token = share.whole * share.width
        query, key = heads * self.kv_channels * token, groups * self.kv_channels * token
        joint = query * (1 + self.attention_output_gate) + 2 * key
        if self.num_query_groups < share.tp:
            joint = (self.gated_query_size + 2 * self.kv_size) * token
        if self.rope is not None or self.qk_norm is not QkNorm.NONE:
            return query, query + key, joint
        # As they are, keys are a view of it too, and so are queries that are in a row there.
        return query, query if 1 < groups < heads else 0, joint

    def _fused_core(self, share: RankShare, found: Tiles, context: bool) -> CoreBytes:
        """In kernels that hold no scores, but their outputs and a sum for each query."""
        heads, groups = self._heads(share.tp)
        query, copied, joint = self._inputs(share)
        inputs, inside = copied + joint, query + heads * FP32 * share.whole
        if share.kernels.transformer_engine:
            return CoreBytes.of(inputs, inside, query, inputs + inside)
        gathered = 0
        if share.cp > 1:  # keys and values of all ranks, or of all rectangles
            keys = found.keys if share.kernels.one_call else share.cp * share.whole
            gathered = 2 * groups * self.kv_channels * share.width * keys
        inside += gathered + count_mask_bytes(share, found)
        total = inside + ((query if copied else joint) if gathered else inputs)
        return CoreBytes.of(
            inputs,
            inside,
            query * context,
            total + count_copied_bytes(share, found, query) * context,
        )

    def _explicit_core(self, share: RankShare, found: Tiles, context: bool) -> CoreBytes:
        """Where scores are computed: through the softcap, after softmax in fp32, and as factors of
        the values. Keys and values are repeated for each query head.
        """
        heads, _ = self._heads(share.tp)
        query, copied, joint = self._inputs(share)
        pair = FP32 + (share.width if share.width != FP32 else 0)
        sinks = share.whole * pair if self.attention_sinks else 0
        pair += share.width if self.attention_softcap is not None else 0
        repeated = 2 * self.kv_channels * share.width * found.keys
        inside = heads * (found.scores * pair + sinks + repeated)
        projected = query * context
        return CoreBytes.of(copied + joint, inside, projected, query + inside + projected)


def count_visible_pairs(length: int, window: int | None = None) -> int:
    """Pairs of query and key in causal attention over `length` tokens, of which each query sees
    the last `window` keys, itself included, or all of them.
    """
    if window is None or length <= window:
        return length * (length + 1) // 2
    return window * (window + 1) // 2 + (length - window) * window


def count_pair_flops(lengths: Iterable[int], window: int | None, channels: int) -> int:
    """Operations on all visible pairs, each with so many pairs of factors."""
    return 2 * channels * sum(count_visible_pairs(length, window) for length in lengths)


def count_angle_bytes(rope: Rope, channels: int, share: RankShare) -> int:
    """Bytes of cosine and sine, of queries and of keys, anew in each layer."""
    if share.kernels.fused_rope:
        return 0
    return 4 * share.positions * rope.size(channels) * share.width


def count_mask_bytes(share: RankShare, found: Tiles) -> int:
    """Bytes of the masks of tiles."""
    return 0 if share.kernels.one_call else found.masks * share.width


def count_copied_bytes(share: RankShare, found: Tiles, context: int) -> int:
    """The output projection's input is a copy if several calls compute it."""
    return context if found.number > 1 and not share.kernels.one_call else 0
