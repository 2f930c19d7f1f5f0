"""Bytes that the forward pass of a microbatch keeps for its backward pass.

Counted tensor by tensor, as a layer's modules save them: with torch kernels ("local"), which tests
measure with hooks, or with Transformer Engine's, as its `autograd.Function`s (2.2 to 2.18) read; a
tensor that several operations save counts once. Layers are assumed to spread tokens evenly over
experts. What tensor and sequence parallelism split: Korthikanti et al. 2022, "Reducing Activation
Recomputation in Large Transformer Models".
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_policy.converters.architecture import Activation, Architecture, Mla, Moe, Norm
from megatron_policy.converters.architecture.traits import QkNorm
from megatron_policy.estimate.attention import INT64, Core, CoreAttention, Kernels, MicrobatchShape
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
    """The input of the first linear layer."""
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

    @property
    def total(self) -> int:
        """Without recomputation."""
        return self.norm + self.norm_output + self.inner + self.core.total + self.after

    def kept(self, modules: tuple[str, ...]) -> int:
        """Between the passes, if these modules are computed again."""
        norm, output, inner = self.norm, self.norm_output, self.inner
        if self.whole and "mlp" in modules:
            inner = 0
            if not self.norm_apart and norm:  # part of the first linear layer
                norm, output = 0, self.stream
        if self.norm_apart and "layernorm" in modules:
            norm, output = self.stream, 0
        core = self.core.kept if "core_attn" in modules else self.core.total
        return norm + output + inner + core + self.after

    def again(self, modules: tuple[str, ...]) -> int:
        """The most during its backward pass."""
        most = self.total
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

    def saved(self, layer: int, batch: MicrobatchShape) -> Saved:
        """What decoder layer number `layer` keeps of a microbatch; numbers from `num_layers` on are
        the layers for multi-token prediction.
        """
        arch = self.arch
        moe = arch.moe if arch.has_experts(layer) else None
        hidden, norm = self.hidden(batch), self.stream(batch) * self._norm(arch.hidden_size)
        apart = arch.pre_norm and not arch.parallel
        with_te = self.kernels.transformer_engine
        before, after = norm * int(arch.pre_norm), norm * int(arch.post_norm)
        attention = Half(
            stream=hidden,
            norm=before,
            norm_output=hidden,
            inner=self._projections(layer, batch),
            core=self._core().of_layer(layer, batch),
            after=after,
            # Transformer Engine has norms inside the linear layers that follow them.
            norm_apart=apart and (not with_te or arch.mla is not None),
            norm_copies=self._copies_input(),
        )
        mlp = Half(
            stream=0 if arch.parallel else hidden,
            norm=0 if arch.parallel else before,
            norm_output=0 if arch.parallel else hidden,
            inner=self._dense(batch) if moe is None else self._experts(moe, batch),
            after=after,
            norm_apart=apart and (not with_te or moe is not None),
            whole=moe is None,  # Megatron-Core computes no mixture of experts again
            norm_copies=self._copies_input(),
        )
        return Saved(attention, mlp)

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
        """Bytes that the embedding keeps."""
        return batch.tokens * INT64

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

    def _core(self) -> CoreAttention:
        return CoreAttention(self.arch, self.topology, self.width, self.kernels, self.rank)

    def _norm(self, size: int) -> int:
        """Bytes per vector of a norm, without its output."""
        if self.kernels.transformer_engine:
            return self.width * size + FP32
        match self.arch.norm:
            case Norm.LAYER:
                return self.width * size + 2 * FP32
            case Norm.RMS_PLUS_ONE:
                return FP32 * size + FP32 + FP32 * size
        own = self.width if self.kernels.fused_norm else FP32
        return own * size + FP32 + self.width * size

    def _copies_input(self) -> bool:
        """Whether norms keep their inputs in fp32."""
        if self.kernels.transformer_engine or self.arch.norm is Norm.LAYER or self.width == FP32:
            return False
        return self.arch.norm is Norm.RMS_PLUS_ONE or not self.kernels.fused_norm

    def _projections(self, layer: int, batch: MicrobatchShape) -> int:
        arch = self.arch
        channels = arch.mla.qk_rope_head_dim if arch.mla else arch.kv_channels
        rope = arch.rope_of(layer) if layer < arch.num_layers else arch.rope
        rotated = 0
        if rope is not None and not self.kernels.fused_rope:
            # Cosine and sine, of queries and of keys, anew in each layer.
            rotated = 4 * batch.positions * rope.size(channels) * self.width
        if arch.mla is not None:
            return rotated + self._compressed(arch.mla, batch)
        return rotated + batch.tokens * self._query_norms()

    def _query_norms(self) -> int:
        """Bytes per token of the norms of queries and keys."""
        arch = self.arch
        heads, groups = self._core().heads()
        channels = (heads + groups) * arch.kv_channels
        match arch.qk_norm:
            case QkNorm.NONE:
                return 0
            case QkNorm.ALL_HEADS:  # the input and what the weight multiplies, and the square's sum
                return 2 * FP32 * channels + 2 * FP32 * 2
            case QkNorm.EACH_HEAD:
                return 2 * FP32 * channels + 2 * FP32 * (heads + groups)
        return (heads + groups) * self._norm(arch.kv_channels)

    def _compressed(self, mla: Mla, batch: MicrobatchShape) -> int:
        """Compressed vectors go through a norm, whose output the expanding projection keeps."""
        sizes = [size for size in (mla.kv_lora_rank, mla.q_lora_rank) if size]
        kept = sum(self._norm(size) + self.width * size for size in sizes)
        return self.stream(batch) * kept

    def _dense(self, batch: MicrobatchShape) -> int:
        return batch.tokens * self._gated(self.arch.ffn_hidden_size // self.topology.tp)

    def _gated(self, inner: int, weighted: bool = False) -> int:
        """Bytes per token of an MLP with `inner` channels on this rank, without its input: the
        first projection's output, the input of the last one, and what is between.
        """
        if self.arch.activation is Activation.XIELU:
            # The factors of both its branches, and which of them it takes.
            return (self.width * 5 + 1) * inner
        if not self.arch.gated:
            return self.width * 2 * inner
        widths = 3
        if not self.kernels.fused_activation:
            # The activation's output and the other half with its offset, factors of each other;
            # clamped halves and a sigmoid besides.
            widths += 4 if self.arch.activation is Activation.CLAMPED_SWIGLU else 2
        return self.width * inner * (widths + int(weighted))

    def _experts(self, moe: Moe, batch: MicrobatchShape) -> int:
        """Router, dispatch, experts and the shared MLP of a layer."""
        topology = self.topology
        own = self.stream(batch)
        # Scores, their transposed copy and the map of experts; choices, weights and places.
        router = own * (moe.experts * (2 * FP32 + 1) + moe.chosen * (2 * INT64 + FP32))
        # The tensor-parallel ranks of an expert gather their tokens.
        gathered = topology.expert_tp if self.sequence_parallel else 1
        taken = own * moe.chosen * gathered
        inner = moe.ffn_hidden_size // topology.expert_tp
        experts = taken * (
            self.width * self.arch.hidden_size + FP32 + self._gated(inner, weighted=True)
        )
        shared = moe.shared_ffn_hidden_size // topology.tp
        return router + experts + (batch.tokens * self._gated(shared) if shared else 0)
