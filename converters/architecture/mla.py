"""Multi-head latent attention (MLA; DeepSeek-V2, 2024): keys and values from a compressed
vector.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from .attention import (
    PROJ,
    count_angle_bytes,
    count_copied_bytes,
    count_mask_bytes,
    count_pair_flops,
)
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
)
from .rotary import Rope

Q_PROJ, Q_DOWN, Q_UP, KV_DOWN, KV_UP = (
    f"self_attention.linear_{name}"
    for name in ("q_proj", "q_down_proj", "q_up_proj", "kv_down_proj", "kv_up_proj")
)


@dataclass(frozen=True, kw_only=True)
class Mla(LayerPart):
    """Latent attention; every head has keys and values of its own."""

    num_attention_heads: int
    rope: Rope | None
    q_lora_rank: int | None
    """Width of the compressed query; None: queries are projected directly."""
    kv_lora_rank: int
    """Width of the compressed keys and values."""
    qk_nope_head_dim: int
    """The part of a query or key head without rotary embedding."""
    qk_rope_head_dim: int
    """The part of a query or key head that is rotated, if any is; all key heads share it."""
    v_head_dim: int
    layernorm_epsilon: float = 1e-6
    """Of the norms of compressed vectors."""
    attention_dropout: float = 0.0
    attention_scale: float | None = None
    """Factor on query-key products; None: 1 / sqrt(head size)."""

    window: ClassVar[None] = None
    norm_apart: ClassVar[bool] = True
    needs_sequence_parallel: ClassVar[str] = "latent attention"

    def __post_init__(self) -> None:
        heads, head = self.num_attention_heads, self.kv_channels
        check_counts(self, "num_attention_heads", "kv_channels")
        check_widths(num_attention_heads=heads, kv_channels=head)
        check_widths(**{"num_attention_heads * head_dim": heads * head})
        names: tuple[str, ...] = ("q_lora_rank", "kv_lora_rank")
        names += ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        check_widths(**{f"mla.{name}": getattr(self, name) for name in names})
        check_factors(self, "attention_scale")
        if self.rope is not None:
            self.rope.check(self.qk_rope_head_dim)

    @property
    def num_query_groups(self) -> int:
        return self.num_attention_heads

    @property
    def kv_channels(self) -> int:
        """The size of a query or key head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def query_size(self) -> int:
        """Output rows of the query projection."""
        return self.num_attention_heads * self.kv_channels

    @property
    def down_size(self) -> int:
        """Output rows of the projection that compresses keys and values."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def expanded_size(self) -> int:
        """Output rows of the projection that expands compressed keys and values."""
        return self.num_attention_heads * (self.qk_nope_head_dim + self.v_head_dim)

    @property
    def context_size(self) -> int:
        """Inputs of the output projection."""
        return self.num_attention_heads * self.v_head_dim

    @property
    def sizes(self) -> tuple[object, ...]:
        heads = self.num_attention_heads, self.qk_nope_head_dim, self.qk_rope_head_dim
        return *heads, self.v_head_dim, self.q_lora_rank, self.kv_lora_rank

    @property
    def splits(self) -> tuple[SplitCount, ...]:
        heads = self.num_attention_heads
        groups = SplitCount(heads, "key-value groups", multiples=True)
        return SplitCount(heads, "attention heads"), groups

    def list_linears(self, hidden_size: int) -> Linears:
        down = Linear(KV_DOWN, hidden_size * self.down_size, out=Place.STREAM)
        up = Linear(KV_UP, self.kv_lora_rank * self.expanded_size)
        output = Linear(PROJ, self.context_size * hidden_size, Place.WHOLE, Place.STREAM)
        if self.q_lora_rank is None:
            return (Linear(Q_PROJ, hidden_size * self.query_size), down), (up,), (output,)
        q_down = Linear(Q_DOWN, hidden_size * self.q_lora_rank, out=Place.STREAM)
        q_up = Linear(Q_UP, self.q_lora_rank * self.query_size)
        return (q_down, down), (q_up, up), (output,)

    def count_core_flops(self, lengths: Iterable[int]) -> int:
        """Operations of the query-key products and of the weighted sums of values."""
        return count_pair_flops(lengths, None, self.query_size + self.context_size)

    def count_exchanged(self, tp: int, cp: int) -> int:
        """Channels of a token's keys and values, which visit all context-parallel ranks."""
        return self.num_attention_heads // tp * (self.kv_channels + self.v_head_dim)

    def count_cached(self, tokens: int, width: int) -> int:
        """Bytes that generation keeps of a sequence: keys and values of all its tokens."""
        return self.count_exchanged(1, 1) * tokens * width

    def count_kept(self, share: RankShare, needed: bool) -> PartBytes:
        training = share.training
        projected = training.keep(PROJ)
        # Compressed vectors go through a norm, whose output the expanding projection keeps.
        inner = 0
        for down, up, size in (
            (KV_DOWN, KV_UP, self.kv_lora_rank),
            (Q_DOWN, Q_UP, self.q_lora_rank or 0),
        ):
            if size:
                inner += share.stream * share.norm(size) * (needed or training.adapted(down))
                inner += share.stream * share.width * size * training.keep(up)
        if needed or training.adapted(Q_PROJ, Q_DOWN, Q_UP, KV_DOWN, KV_UP):
            if self.rope is not None:
                inner += count_angle_bytes(self.rope, self.qk_rope_head_dim, share)
            return PartBytes(inner, self._core(share, projected))
        heads = self.num_attention_heads // share.tp
        context = heads * self.v_head_dim * share.whole * share.width * projected
        return PartBytes(inner, CoreBytes(context, context, 0))

    def _core(self, share: RankShare, projected: bool) -> CoreBytes:
        """Keys and values have as many heads as queries."""
        heads, found = self.num_attention_heads // share.tp, share.tiles(None, False)
        token = heads * share.whole * share.width
        head, value = self.kv_channels, self.v_head_dim
        # What expands keys and values, of which values are a view, is kept whole.
        inputs = (2 * head + self.qk_nope_head_dim + value) * token
        sums, context = heads * FP32 * share.whole, value * token
        if share.kernels.transformer_engine:
            own = sums + context
            return CoreBytes.of(inputs, own, context, 2 * (head + value) * token + sums)
        widest = max(head, value)
        inside = widest * token + sums + count_mask_bytes(share, found)
        if share.cp > 1:
            # One collective gathers keys and values; values are padded to the size of keys.
            inside += share.cp * (head + value) * token
            inside += heads * widest * share.width * found.keys if head != value else 0
            total = widest * token + inside
        elif head == value:
            total = inputs + inside
        else:  # values are padded to the size of keys
            inside += widest * token
            total = 2 * widest * token + inside
        context = context * projected
        again = context if head != value else count_copied_bytes(share, found, context)
        return CoreBytes.of(inputs, inside, context, total + again)
