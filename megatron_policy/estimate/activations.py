"""Bytes that the forward pass of a microbatch keeps for its backward pass.

Counted tensor by tensor, as a layer's modules save them: with torch kernels ("local"), which tests
measure with hooks, or with Transformer Engine's, as its `autograd.Function`s (2.2 to 2.18) read; a
tensor that several operations save counts once. Layers are assumed to spread tokens evenly over
experts. What tensor and sequence parallelism split: Korthikanti et al. 2022, "Reducing Activation
Recomputation in Large Transformer Models".
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_policy.config import MegatronConfig
from megatron_policy.converters.architecture import Activation, Architecture, Mla, Moe, Norm
from megatron_policy.estimate.states import FP32
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


@dataclass(frozen=True)
class MicrobatchShape:
    """`tokens` of a microbatch on one context-parallel rank, padding included, in sequences of
    `length` before context parallelism; `positions` of them have cosines and sines of their own.
    """

    tokens: int
    length: int
    positions: int


@dataclass(frozen=True)
class Saved:
    """Bytes that one layer keeps, by part."""

    norms: int
    """The inputs of norms and what else their backward pass needs."""
    norm_outputs: int
    """The inputs of the linear layers that follow norms."""
    projections: int
    """Of attention: norms of queries and keys, or what MLA compresses; rotary embedding."""
    core: int
    """Queries, keys, values, and what the attention kernel keeps."""
    mlp: int
    """The MLP, or router, dispatch and experts."""

    @property
    def total(self) -> int:
        return self.norms + self.norm_outputs + self.projections + self.core + self.mlp


@dataclass(frozen=True)
class LayerActivations:
    """What the layers of one model keep under one layout. `width` is the bytes of an activation."""

    arch: Architecture
    topology: Topology
    width: int
    sequence_parallel: bool
    kernels: Kernels

    def saved(self, layer: int, batch: MicrobatchShape) -> Saved:
        """What decoder layer number `layer` keeps of a microbatch."""
        arch = self.arch
        stream = self.stream(batch)
        inputs = int(arch.pre_norm) * (1 if arch.parallel else 2)
        outputs = 2 if arch.post_norm else 0
        moe = arch.moe if arch.has_experts(layer) else None
        return Saved(
            norms=(inputs + outputs) * stream * self._norm(arch.hidden_size),
            norm_outputs=(1 if arch.parallel else 2) * self.hidden(batch),
            projections=self._projections(batch),
            core=self._core(batch),
            mlp=self._dense(batch) if moe is None else self._experts(moe, batch),
        )

    def stream(self, batch: MicrobatchShape) -> int:
        """Tokens of the residual stream on a rank."""
        split = self.topology.tp if self.sequence_parallel else 1
        return -(-batch.tokens // split)

    def hidden(self, batch: MicrobatchShape) -> int:
        """Bytes of the residual stream."""
        return self.width * self.arch.hidden_size * self.stream(batch)

    def ends(self, batch: MicrobatchShape, first: bool, last: bool) -> int:
        """Bytes that embedding (`first`), final norm and head (`last`) keep, with a loss of
        log-probabilities.
        """
        kept = batch.tokens * INT64 if first else 0
        if last:
            kept += self.stream(batch) * self._norm(self.arch.hidden_size)
            # The head takes its tokens' hidden states; numbers, targets and log-sums of each.
            hidden = self.width * self.arch.hidden_size
            kept += batch.tokens * (hidden + 3 * INT64 + 2 * FP32)
        return kept

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

    def _heads(self) -> tuple[int, int]:
        """Query and key heads of a rank."""
        tp, arch = self.topology.tp, self.arch
        return arch.num_attention_heads // tp, max(1, arch.num_query_groups // tp)

    def _projections(self, batch: MicrobatchShape) -> int:
        arch = self.arch
        heads, groups = self._heads()
        channels = arch.mla.qk_rope_head_dim if arch.mla else arch.kv_channels
        # Cosine and sine, of queries and of keys, anew in each layer.
        rope = 0 if self.kernels.fused_rope else 4 * batch.positions * channels * self.width
        if arch.mla is not None:
            return rope + self._compressed(arch.mla, batch)
        normed = (heads + groups) * self._norm(arch.kv_channels) if arch.qk_norm else 0
        return rope + normed * batch.tokens

    def _compressed(self, mla: Mla, batch: MicrobatchShape) -> int:
        """Compressed vectors go through a norm, whose output the expanding projection keeps."""
        sizes = [size for size in (mla.kv_lora_rank, mla.q_lora_rank) if size]
        kept = sum(self._norm(size) + self.width * size for size in sizes)
        return self.stream(batch) * kept

    def _core(self, batch: MicrobatchShape) -> int:
        arch, e = self.arch, self.width
        heads, groups = self._heads()
        if arch.mla is not None:
            return self._latent_core(arch.mla, heads) * batch.tokens
        query, key = heads * arch.kv_channels * e, groups * arch.kv_channels * e
        gathered = 1 if self.kernels.transformer_engine else self.topology.cp
        if arch.attention_sinks or arch.attention_softcap is not None:
            # Keys and values are repeated for each query head.
            return (2 + 2 * gathered) * query * batch.tokens + self._scores(heads, batch)
        if gathered > 1:
            # The output projection's input is a copy of the contexts of all rectangles.
            return (3 * query + 2 * key * gathered + heads * FP32) * batch.tokens
        # Values are a view of the joint projection's output, which is kept whole; with fewer
        # groups than ranks that of all ranks.
        joint = query + 2 * key
        if arch.num_query_groups < self.topology.tp:
            joint = (arch.query_size + 2 * arch.kv_size) * e
        return (query + key + joint + query + heads * FP32) * batch.tokens

    def _latent_core(self, mla: Mla, heads: int) -> int:
        head, value = mla.qk_nope_head_dim + mla.qk_rope_head_dim, mla.v_head_dim
        if self.kernels.transformer_engine:
            return heads * (self.width * 2 * (head + value) + FP32)
        gathered, widest = self.topology.cp, max(head, value)
        # The output projection's input is a copy, as the context is in rectangles or padded.
        copied = value if gathered > 1 or head != value else 0
        values = gathered * widest if head != value else 0  # padded to equal sizes
        if gathered > 1:  # in one collective with the keys
            sizes = 2 * widest + gathered * (head + value) + values + copied
        elif head == value:  # a view of what expands keys and values
            sizes = 3 * head + mla.qk_nope_head_dim + value
        else:
            sizes = 3 * widest + values + copied
        return heads * (self.width * sizes + FP32)

    def _scores(self, heads: int, batch: MicrobatchShape) -> int:
        """Of attention that computes its scores: through the softcap, after softmax in fp32, and as
        factors of the values.
        """
        pair = FP32 + (self.width if self.width != FP32 else 0)
        pair += self.width if self.arch.attention_softcap is not None else 0
        keys = batch.length + int(self.arch.attention_sinks)
        if (cp := self.topology.cp) > 1:
            # Two of 2 * cp pieces of a sequence, one early and one late, see these on average.
            keys = keys * (2 * cp + 1) // (4 * cp)
        return heads * batch.tokens * keys * pair

    def _dense(self, batch: MicrobatchShape) -> int:
        return batch.tokens * self._gated(self.arch.ffn_hidden_size // self.topology.tp)

    def _gated(self, inner: int, weighted: bool = False) -> int:
        """Bytes per token of an MLP with `inner` channels on this rank, without its input: the
        first projection's output, the input of the last one, and what is between.
        """
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


def chunk_bytes(
    layers: range, model: LayerActivations, settings: MegatronConfig, batch: MicrobatchShape
) -> int:
    """What the layers of a model chunk keep of a microbatch between its two passes."""
    saved = [model.saved(layer, batch) for layer in layers]
    number = settings.recompute_num_layers or 1
    match settings.recompute_granularity, settings.recompute_method:
        case "full", "block":
            kept = sum(each.total for each in saved[number:])
            return min(number, len(saved)) * model.hidden(batch) + kept
        case "full", _:
            return -(-len(saved) // number) * model.hidden(batch)
        case "selective", _:
            return sum(_selective(each, settings.recompute_modules or ()) for each in saved)
    return sum(each.total for each in saved)


def recomputed_bytes(
    layers: range, model: LayerActivations, settings: MegatronConfig, batch: MicrobatchShape
) -> int:
    """The most that the backward pass of a chunk computes again and holds at once."""
    saved = [model.saved(layer, batch) for layer in layers]
    number = settings.recompute_num_layers or 1
    if settings.recompute_granularity == "full":
        at_once = number if settings.recompute_method != "block" else 1
        sizes = [each.total for each in saved]
        return max(sum(sizes[i : i + at_once]) for i in range(0, len(sizes), at_once))
    if settings.recompute_granularity == "selective":
        modules = settings.recompute_modules or ()
        return max(each.total - _selective(each, modules) for each in saved)
    return 0


def _selective(saved: Saved, modules: tuple[str, ...]) -> int:
    """What is left of a layer if these modules are computed again."""
    left = saved.total
    if "layernorm" in modules:
        left -= saved.norm_outputs
    if "mlp" in modules:
        left -= saved.mlp
    # Of core attention only its inputs are kept, which the estimate counts as all of it: kernels
    # keep little more.
    return left
