"""Bytes that core attention keeps of a microbatch: scores and masks by tile, as ranks compute them.

Shapes: Q queries, K keys of a tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from megatron_policy.converters.architecture import Architecture, Mla
from megatron_policy.estimate.states import FP32
from megatron_policy.packing.multiples import round_up
from megatron_policy.packing.tiles import tiles
from megatron_policy.packing.tokens import PackedSequence, causal_pieces
from megatron_policy.parallel.topology import Topology

INT64 = 8


@dataclass(frozen=True)
class Kernels:
    """Which modules compute a layer."""

    transformer_engine: bool
    fused_activation: bool
    """SwiGLU in one kernel, which keeps nothing but its input."""
    fused_rope: bool = False
    fused_norm: bool = False
    """RMS norms in one kernel, which keeps its input and a number for each vector."""
    fused_dropout: bool = False
    """Dropout in one kernel, whose mask has one byte for each element."""
    one_call: bool = False
    """Attention takes all sequences at once and needs no masks; else there is a call for each tile,
    with a mask unless the tile is square. Softcaps and sinks are computed in tiles anyway.
    """


@dataclass(frozen=True)
class MicrobatchShape:
    """`tokens` of a microbatch on one context-parallel rank, padding included, in sequences of
    `length` before context parallelism; `positions` of them have cosines and sines of their own.
    """

    tokens: int
    length: int
    positions: int
    packed: bool = False
    """Sequences follow one another in one row."""


@dataclass(frozen=True)
class Core:
    """Bytes of core attention, its inputs and the input of the output projection included."""

    total: int
    kept: int
    """Where it is computed again."""
    again: int
    """While it is computed again; the output projection's input is gone by then."""

    @classmethod
    def of(cls, inputs: int, inside: int, context: int, total: int) -> Core:
        """`inputs` are queries, keys and values, `inside` what only core attention keeps, `context`
        the input of the output projection.
        """
        return cls(total, inputs + context, inputs + inside)


@dataclass(frozen=True)
class _Tiles:
    """Of the causal attention of all sequences of a microbatch on one rank."""

    number: int
    """How many calls compute it."""
    keys: int
    """The sum of K over all tiles of each row."""
    scores: int
    """The sum of Q x K."""
    masks: int
    """The sum of Q x K over masks; tiles of one shape share theirs."""


@lru_cache(maxsize=4096)
def _tiles(
    length: int,
    sequences: int,
    packed: bool,
    window: int | None,
    explicit: bool,
    cp: int,
    rank: int,
) -> _Tiles:
    whole = PackedSequence(0, round_up(length, 2 * cp if cp > 1 else 1))
    reach = None if window is None else window - 1
    found = tiles(causal_pieces([whole], cp, rank), reach, explicit)
    masked = {t.shape for t in found if t.reach is not None or t.queries not in (1, t.keys)}
    return _Tiles(
        number=len(found) * (sequences if packed else 1),
        keys=sequences * sum(tile.keys for tile in found),
        scores=sequences * sum(tile.queries * tile.keys for tile in found),
        masks=sum(queries * keys for queries, keys, _ in masked),
    )


@dataclass(frozen=True)
class CoreAttention:
    """Core attention of one model's layers on context-parallel rank `rank`. `width` is the bytes of
    an activation.
    """

    arch: Architecture
    topology: Topology
    width: int
    kernels: Kernels
    rank: int

    def of_layer(self, layer: int, batch: MicrobatchShape, context: bool = True) -> Core:
        """What layer number `layer` keeps of a microbatch; without `context` the output projection
        keeps no input.
        """
        arch = self.arch
        explicit = arch.attention_sinks or arch.attention_softcap is not None
        window = arch.window if layer < arch.num_layers and arch.has_window(layer) else None
        found = _tiles(
            batch.length,
            max(1, batch.tokens * self.topology.cp // batch.length),
            batch.packed,
            window,
            explicit,
            self.topology.cp,
            self.rank,
        )
        if arch.mla is not None:
            return self._latent(arch.mla, batch, found, context)
        if explicit:
            return self._explicit(batch, found, context)
        return self._fused(batch, found, context)

    def context(self, batch: MicrobatchShape) -> int:
        """Bytes of the output projection's input."""
        arch, (heads, _) = self.arch, self.heads()
        channels = arch.kv_channels if arch.mla is None else arch.mla.v_head_dim
        return heads * channels * batch.tokens * self.width

    def heads(self) -> tuple[int, int]:
        """Query and key heads of a rank."""
        tp, arch = self.topology.tp, self.arch
        return arch.num_attention_heads // tp, max(1, arch.num_query_groups // tp)

    def _inputs(self, batch: MicrobatchShape) -> tuple[int, int, int]:
        """Of queries, of keys, and of the joint projection's output, which is kept whole as values
        are a view of it; with fewer groups than ranks that of all ranks.
        """
        arch, (heads, groups) = self.arch, self.heads()
        token = batch.tokens * self.width
        query, key = heads * arch.kv_channels * token, groups * arch.kv_channels * token
        if arch.num_query_groups < self.topology.tp:
            return query, key, (arch.query_size + 2 * arch.kv_size) * token
        return query, key, query + 2 * key

    def _fused(self, batch: MicrobatchShape, found: _Tiles, context: bool) -> Core:
        """In kernels that hold no scores, but their outputs and a sum for each query."""
        heads, groups = self.heads()
        query, key, joint = self._inputs(batch)
        inputs, inside = query + key + joint, query + heads * FP32 * batch.tokens
        if self.kernels.transformer_engine:
            return Core.of(inputs, inside, query, inputs + inside)
        gathered = 0
        if self.topology.cp > 1:  # keys and values of all ranks, or of all rectangles
            keys = found.keys if self.kernels.one_call else self.topology.cp * batch.tokens
            gathered = 2 * groups * self.arch.kv_channels * self.width * keys
        inside += gathered + self._masks(found)
        total = inside + (query if gathered else inputs)
        copied = self._copied(found, query) * context
        return Core.of(inputs, inside, query * context, total + copied)

    def _explicit(self, batch: MicrobatchShape, found: _Tiles, context: bool) -> Core:
        """Where scores are computed: through the softcap, after softmax in fp32, and as factors of
        the values. Keys and values are repeated for each query head.
        """
        heads, _ = self.heads()
        query, key, joint = self._inputs(batch)
        pair = FP32 + (self.width if self.width != FP32 else 0)
        sinks = batch.tokens * pair if self.arch.attention_sinks else 0
        pair += self.width if self.arch.attention_softcap is not None else 0
        repeated = 2 * self.arch.kv_channels * self.width * found.keys
        inside = heads * (found.scores * pair + sinks + repeated)
        projected = query * context
        return Core.of(query + key + joint, inside, projected, query + inside + projected)

    def _latent(self, mla: Mla, batch: MicrobatchShape, found: _Tiles, projected: bool) -> Core:
        """Of MLA; keys and values have as many heads as queries."""
        heads, _ = self.heads()
        token = heads * batch.tokens * self.width
        head, value = mla.qk_nope_head_dim + mla.qk_rope_head_dim, mla.v_head_dim
        # What expands keys and values, of which values are a view, is kept whole.
        inputs = (2 * head + mla.qk_nope_head_dim + value) * token
        sums, context = heads * FP32 * batch.tokens, value * token
        if self.kernels.transformer_engine:
            own = sums + context
            return Core.of(inputs, own, context, 2 * (head + value) * token + sums)
        widest = max(head, value)
        inside = widest * token + sums + self._masks(found)
        if self.topology.cp > 1:
            # One collective gathers keys and values; values are padded to the size of keys.
            inside += self.topology.cp * (head + value) * token
            inside += heads * widest * self.width * found.keys if head != value else 0
            total = widest * token + inside
        elif head == value:
            total = inputs + inside
        else:  # values are padded to the size of keys
            inside += widest * token
            total = 2 * widest * token + inside
        context = context * projected
        copied = context if head != value else self._copied(found, context)
        return Core.of(inputs, inside, context, total + copied)

    def _masks(self, found: _Tiles) -> int:
        return 0 if self.kernels.one_call else found.masks * self.width

    def _copied(self, found: _Tiles, context: int) -> int:
        """The output projection's input is a copy if several calls compute it."""
        return context if found.number > 1 and not self.kernels.one_call else 0
