"""Bytes that the forward pass of a microbatch keeps for its backward pass.

Counted tensor by tensor, as a layer's modules save them: with torch kernels ("local"), which tests
measure with hooks, or with Transformer Engine's, as its `autograd.Function`s (2.2 to 2.18) read; a
tensor that several operations save counts once. Layers are assumed to spread tokens evenly over
experts. What tensor and sequence parallelism split: Korthikanti et al. 2022, "Reducing Activation
Recomputation in Large Transformer Models".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_policy.converters.architecture import Architecture, Mla, Norm
from megatron_policy.converters.architecture.traits import QkNorm
from megatron_policy.estimate.adapters import (
    ATTENTION,
    KV_DOWN,
    KV_UP,
    MLP,
    MLP_READ_HIDDEN,
    PROJ,
    Q_DOWN,
    Q_UP,
    READ_HIDDEN,
    Linears,
    ModelAdapters,
    RankTokens,
)
from megatron_policy.estimate.attention import INT64, Core, CoreAttention, Kernels, MicrobatchShape
from megatron_policy.estimate.mlp import Mlps
from megatron_policy.estimate.states import FP32
from megatron_policy.parallel.topology import Topology

NO_CORE = Core(0, 0, 0)


@dataclass(frozen=True)
class Half:
    """Bytes that attention or the MLP of a layer keeps, with the norms around it."""

    stream: int
    """The residual stream where it enters."""
    norm: int
    """Of the norm before it, without its output."""
    norm_output: int
    """The input of the first linear layers, if they keep it."""
    inner: int
    """Of the half itself, without core attention."""
    core: Core = NO_CORE
    after: int = 0
    """Of the norm after it."""
    norm_apart: bool = False
    """The norm before it is a module of its own, which can be computed again by itself."""
    whole: bool = False
    """It is computed again as a whole where `mlp` is."""
    norm_copies: bool = False
    """The norm keeps a copy of its input."""
    unkept: int = 0
    """The input of the first linear layers, if they do not keep it."""

    @property
    def total(self) -> int:
        """Without recomputation."""
        return self.norm + self.norm_output + self.inner + self.core.total + self.after

    def kept(self, modules: tuple[str, ...]) -> int:
        """Between the passes, if these modules are computed again."""
        norm, output, inner = self.norm, self.norm_output, self.inner
        if self.whole and "mlp" in modules:
            inner, output = 0, output + self.unkept
            if not self.norm_apart and norm:  # part of the first linear layer
                norm, output = 0, self.stream
        if self.norm_apart and "layernorm" in modules:
            norm, output = self.stream, 0
        core = self.core.kept if "core_attn" in modules else self.core.total
        return norm + output + inner + core + self.after

    def again(self, modules: tuple[str, ...]) -> int:
        """The most during its backward pass."""
        most = self.total
        if self.whole and "mlp" in modules:
            most += self.unkept
        if "core_attn" in modules:
            most -= self.core.total
            most += max(self.core.kept, self.core.again - self.after)
        copied = self.norm_copies and self.norm_apart and "layernorm" in modules
        return most + (self.stream if copied else 0)


@dataclass(frozen=True)
class Saved:
    """What one layer keeps."""

    attention: Half
    mlp: Half

    @property
    def total(self) -> int:
        """Without recomputation."""
        return self.attention.total + self.mlp.total

    def kept(self, modules: tuple[str, ...]) -> int:
        """Between the passes, if these modules are computed again."""
        return self.attention.kept(modules) + self.mlp.kept(modules)

    def again(self, modules: tuple[str, ...]) -> int:
        """The most during its backward pass, in which the MLP comes first."""
        last = self.attention.again(modules)
        return max(self.attention.kept(modules) + self.mlp.again(modules), last)


@dataclass(frozen=True)
class LayerActivations:
    """What the layers of one model keep under one layout, on context-parallel rank `rank`. `width`
    is the bytes of an activation.
    """

    arch: Architecture
    topology: Topology
    width: int
    sequence_parallel: bool
    kernels: Kernels
    rank: int = 0
    adapters: ModelAdapters | None = None
    """All that is trained, if there are any."""

    def saved(self, layer: int, batch: MicrobatchShape, needed: bool = True) -> Saved:
        """What decoder layer number `layer` keeps of a microbatch; numbers from `num_layers` on are
        the layers for multi-token prediction. `needed` says whether its input needs gradients, as
        it does unless everything before it is frozen.
        """
        linears = Linears.of(self.adapters, layer)
        attention = self._attention(layer, batch, linears, needed)
        if not self.arch.parallel:
            needed = needed or linears.adapted(*ATTENTION)
        return Saved(attention, self._mlp(layer, batch, linears, needed))

    def _attention(
        self, layer: int, batch: MicrobatchShape, linears: Linears, needed: bool
    ) -> Half:
        arch, core, hidden = self.arch, self._core(), self.hidden(batch)
        norm = self.stream(batch) * self._norm(arch.hidden_size)
        kept = linears.keep(*READ_HIDDEN) or (arch.parallel and linears.keep(*MLP_READ_HIDDEN))
        projected = linears.keep(PROJ)
        inside = needed or linears.adapted(*READ_HIDDEN, Q_UP, KV_UP)
        context = core.context(batch) * projected
        return Half(
            stream=hidden,
            norm=norm * arch.pre_norm * needed,
            norm_output=hidden * kept,
            inner=self._projections(layer, batch, linears, needed, inside)
            + self._adapted(linears, ATTENTION, batch),
            core=core.of_layer(layer, batch, projected) if inside else Core(context, context, 0),
            after=norm * arch.post_norm * (needed or linears.adapted(*ATTENTION)),
            norm_apart=self._norm_apart(arch.mla is not None),
            norm_copies=self._copies_input(),
        )

    def _mlp(self, layer: int, batch: MicrobatchShape, linears: Linears, needed: bool) -> Half:
        arch = self.arch
        moe = arch.moe if arch.has_experts(layer) else None
        entered = 0 if arch.parallel else self.hidden(batch)
        norm = self.stream(batch) * self._norm(arch.hidden_size)
        # Megatron-Core's router keeps its input, frozen or not.
        kept = linears.keep(*MLP_READ_HIDDEN) or (moe is not None and needed)
        return Half(
            stream=entered,
            norm=0 if arch.parallel else norm * arch.pre_norm * needed,
            norm_output=entered * kept,
            inner=self._mlps().of_layer(layer, self._tokens(batch), linears, needed)
            + self._adapted(linears, MLP, batch),
            after=norm * arch.post_norm * (needed or linears.adapted(*MLP)),
            norm_apart=self._norm_apart(moe is not None),
            whole=moe is None,  # Megatron-Core computes no mixture of experts again
            norm_copies=self._copies_input(),
            unkept=entered * (not kept),
        )

    def kind(self, layer: int) -> tuple[bool | int, ...]:
        """What decides how much decoder layer number `layer` keeps, besides its input."""
        arch = self.arch
        rotated = arch.rope_of(layer) is not None
        own = -1 if self.adapters is None else layer
        return arch.has_window(layer), arch.has_experts(layer), rotated, own

    def adapts(self, layer: int) -> bool:
        """Whether a layer has adapters."""
        return self.adapters is not None and bool(self.adapters.layers[layer])

    def _norm_apart(self, always: bool) -> bool:
        """Whether the norm before a half is a module of its own: `always`, or unless Transformer
        Engine has it inside the linear layer that follows it.
        """
        apart = self.arch.pre_norm and not self.arch.parallel
        return apart and (always or not self.kernels.transformer_engine)

    def stream(self, batch: MicrobatchShape) -> int:
        """Tokens of the residual stream on a rank."""
        split = self.topology.tp if self.sequence_parallel else 1
        return -(-batch.tokens // split)

    def hidden(self, batch: MicrobatchShape) -> int:
        """Bytes of the residual stream."""
        return self.width * self.arch.hidden_size * self.stream(batch)

    def angles(self, batch: MicrobatchShape) -> int:
        """Bytes of the rotary angles, which layers that are computed again keep between them."""
        arch = self.arch
        if arch.mla is not None:
            return 0
        ropes = {rope for rope in (arch.rope, arch.window_rope) if rope is not None}
        return batch.positions * sum(rope.size(arch.kv_channels) for rope in ropes) * FP32

    def embedding(self, batch: MicrobatchShape) -> int:
        """Bytes that the embedding keeps, unless it is frozen."""
        return 0 if self.adapters is not None else batch.tokens * INT64

    def head(self, batch: MicrobatchShape) -> int:
        """Bytes that the final norm and the head keep, with a loss of log-probabilities: the
        tokens' hidden states; numbers, targets and log-sums of each.
        """
        hidden = self.width * self.arch.hidden_size
        kept = self.stream(batch) * self._norm(self.arch.hidden_size)
        return kept + batch.tokens * (hidden + 3 * INT64 + 2 * FP32)

    def further(self, batch: MicrobatchShape, layer: int, full: bool) -> tuple[int, int]:
        """Bytes that a layer for multi-token prediction keeps before its final norm, and in its
        backward pass: its inputs, their norms, the projection, and its decoder layer.
        """
        norms = 2 * self.stream(batch) * self._norm(self.arch.hidden_size)
        own = norms + 2 * self.hidden(batch) + self.saved(layer, batch).total
        if not full:
            return own, own
        return 2 * self.hidden(batch), 2 * self.hidden(batch) + own

    def _tokens(self, batch: MicrobatchShape) -> RankTokens:
        """The tensor-parallel ranks of an expert gather their tokens."""
        own, moe = self.stream(batch), self.arch.moe
        gathered = self.topology.expert_tp if self.sequence_parallel else 1
        return RankTokens(own, batch.tokens, 0 if moe is None else own * moe.chosen * gathered)

    def _adapted(self, linears: Linears, names: Sequence[str], batch: MicrobatchShape) -> int:
        """Bytes of the adapters beside these linear layers, without the inputs that they keep."""
        mask = 1 if self.kernels.fused_dropout else self.width
        return linears.kept(names, self.arch, self.topology, self._tokens(batch), self.width, mask)

    def _mlps(self) -> Mlps:
        return Mlps(self.arch, self.topology, self.width, self.kernels.fused_activation)

    def _core(self) -> CoreAttention:
        return CoreAttention(self.arch, self.topology, self.width, self.kernels, self.rank)

    def _norm(self, size: int) -> int:
        """Bytes per vector of a norm, without its output. A weight that is not trained needs none
        of what it is multiplied with.
        """
        if self.kernels.transformer_engine:
            return self.width * size + FP32
        weighted = int(self.adapters is None)
        match self.arch.norm:
            case Norm.LAYER:
                return self.width * size + 2 * FP32
            case Norm.RMS_PLUS_ONE:
                return FP32 * size + FP32 + FP32 * size * weighted
        own = self.width if self.kernels.fused_norm else FP32
        return own * size + FP32 + self.width * size * weighted

    def _copies_input(self) -> bool:
        """Whether norms keep their inputs in fp32."""
        if self.kernels.transformer_engine or self.arch.norm is Norm.LAYER or self.width == FP32:
            return False
        return self.arch.norm is Norm.RMS_PLUS_ONE or not self.kernels.fused_norm

    def _projections(
        self, layer: int, batch: MicrobatchShape, linears: Linears, needed: bool, inside: bool
    ) -> int:
        """Between the norm and core attention, whose inputs need gradients if it is `inside`."""
        arch = self.arch
        channels = arch.mla.qk_rope_head_dim if arch.mla else arch.kv_channels
        rope = arch.rope_of(layer) if layer < arch.num_layers else arch.rope
        rotated = 0
        if rope is not None and inside and not self.kernels.fused_rope:
            # Cosine and sine, of queries and of keys, anew in each layer.
            rotated = 4 * batch.positions * rope.size(channels) * self.width
        if arch.mla is not None:
            return rotated + self._compressed(arch.mla, batch, linears, needed)
        return rotated + batch.tokens * self._query_norms() * inside

    def _query_norms(self) -> int:
        """Bytes per token of the norms of queries and keys."""
        arch = self.arch
        heads, groups = self._core().heads()
        channels = (heads + groups) * arch.kv_channels
        factors = (1 + int(self.adapters is None)) * FP32 * channels
        match arch.qk_norm:
            case QkNorm.NONE:
                return 0
            case QkNorm.ALL_HEADS:  # the input and what the weight multiplies, and the square's sum
                return factors + 2 * FP32 * 2
            case QkNorm.EACH_HEAD:
                return factors + 2 * FP32 * (heads + groups)
        return (heads + groups) * self._norm(arch.kv_channels)

    def _compressed(self, mla: Mla, batch: MicrobatchShape, linears: Linears, needed: bool) -> int:
        """Compressed vectors go through a norm, whose output the expanding projection keeps."""
        kept = 0
        for down, up, size in (
            (KV_DOWN, KV_UP, mla.kv_lora_rank),
            (Q_DOWN, Q_UP, mla.q_lora_rank or 0),
        ):
            if size:
                kept += self._norm(size) * (needed or linears.adapted(down))
                kept += self.width * size * linears.keep(up)
        return self.stream(batch) * kept
