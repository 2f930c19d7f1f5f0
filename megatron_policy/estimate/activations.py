"""Bytes that the forward pass of a microbatch keeps for its backward pass.

Counted tensor by tensor, as a layer's modules save them: with torch kernels ("local"), which tests
measure with hooks, or with Transformer Engine's, as its `autograd.Function`s (2.2 to 2.18) read; a
tensor that several operations save counts once. Layers are assumed to spread tokens evenly over
experts. What tensor and sequence parallelism split: Korthikanti et al. 2022, "Reducing Activation
Recomputation in Large Transformer Models".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import chain

from megatron_policy.attention.tile_attention import tiles
from megatron_policy.converters.architecture import (
    Architecture,
    Attention,
    Layer,
    LayerPart,
    Norm,
    Norms,
)
from megatron_policy.converters.architecture.part import (
    FP32,
    INT64,
    CoreBytes,
    Kernels,
    Linear,
    Linears,
    PartBytes,
    RankShare,
    Slabs,
    Tiles,
)
from megatron_policy.estimate.adapters import LayerTraining, ModelAdapters
from megatron_policy.packing.multiples import round_up
from megatron_policy.packing.tokens import PackedSequence, attention_pieces
from megatron_policy.parallel.topology import Topology
from megatron_policy.recurrence.chunks import SIZE, count_together


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
    pictures: int = 0
    """Bytes that towers keep of its rows' pictures and sound."""


@lru_cache(maxsize=4096)
def _count_tiles(
    batch: MicrobatchShape, window: int | None, explicit: bool, cp: int, rank: int
) -> Tiles:
    """The tiles of causal attention on context-parallel rank `rank`."""
    whole = PackedSequence(0, round_up(batch.length, 2 * cp if cp > 1 else 1))
    reach = None if window is None else window - 1
    found = tiles(attention_pieces([whole], cp, rank), reach, explicit)
    masked = {t.shape for t in found if t.reach is not None or t.queries not in (1, t.keys)}
    sequences = max(1, batch.tokens * cp // batch.length)
    return Tiles(
        number=len(found) * (sequences if batch.packed else 1),
        keys=sequences * sum(tile.keys for tile in found),
        scores=sequences * sum(tile.queries * tile.keys for tile in found),
        masks=sum(queries * keys for queries, keys, *_ in masked),
    )


def count_slabs(batch: MicrobatchShape, cp: int, count: Callable[[Slabs], int]) -> Slabs:
    """The slabs of `Chunks.of` all sequences of the microbatch, also those of other
    context-parallel ranks; `count` says how many numbers a scan holds of one.
    """
    together = count_together(count(Slabs(1, SIZE, 1, 0)))
    sequences = max(1, batch.tokens * cp // batch.length)
    steps = -(-batch.length // SIZE)
    if sequences > together:  # each step is cut
        return Slabs(sequences, SIZE, together, (steps - 1) * sequences)
    joined = together // sequences
    kept = (-(-steps // joined) - 1) * sequences
    return Slabs(sequences, SIZE, min(steps, joined) * sequences, kept)


@dataclass(frozen=True)
class SavedBytes:
    """Bytes that mixer or feed of a layer keeps, with the norms around it."""

    stream: int
    """The residual stream where it enters."""
    norm: int
    """Of the norm before it, without its output."""
    norm_output: int
    """The input of the first linear layers, if they keep it."""
    inner: int
    """Of the part itself, without core attention."""
    core: CoreBytes
    again_inside: int
    """Of what the part always computes again, besides all else, at most."""
    after: int
    """Of the norm after it."""
    norm_apart: bool
    """The norm before it is a module of its own, which can be computed again by itself."""
    whole: bool
    """It is computed again as a whole where `mlp` is."""
    norm_copies: bool
    """The norm keeps a copy of its input."""
    unkept: int
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
        most = self.total + self.again_inside
        if self.whole and "mlp" in modules:
            most += self.unkept
        if "core_attn" in modules:
            most -= self.core.total
            most += max(self.core.kept, self.core.again - self.after)
        copied = self.norm_copies and self.norm_apart and "layernorm" in modules
        return most + (self.stream if copied else 0)

    def beside(self, second: PartBytes) -> SavedBytes:
        """With a second part, which reads the same."""
        core = CoreBytes(*map(sum, zip(self.core, second.core, strict=True)))
        again = max(self.again_inside, second.again)
        return replace(self, inner=self.inner + second.inner, core=core, again_inside=again)


_NOTHING = SavedBytes(0, 0, 0, 0, CoreBytes(), 0, 0, False, False, False, 0)
"""Of a part that a layer does not have."""


@dataclass(frozen=True)
class LayerBytes:
    """What one layer keeps."""

    mixer: SavedBytes
    feed: SavedBytes

    @property
    def total(self) -> int:
        """Without recomputation."""
        return self.mixer.total + self.feed.total

    def kept(self, modules: tuple[str, ...]) -> int:
        """Between the passes, if these modules are computed again."""
        return self.mixer.kept(modules) + self.feed.kept(modules)

    def again(self, modules: tuple[str, ...]) -> int:
        """The most during its backward pass, in which the feed comes first."""
        last = self.mixer.again(modules)
        return max(self.mixer.kept(modules) + self.feed.again(modules), last)


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

    def saved(self, number: int, batch: MicrobatchShape, needed: bool = True) -> LayerBytes:
        """What decoder layer `number` keeps of a microbatch; numbers from `num_layers` on are the
        layers for multi-token prediction. `needed` says whether its input needs gradients, as
        it does unless everything before it is frozen.
        """
        layer, training = self.arch.find_layer(number), LayerTraining.of(self.adapters, number)
        parallel, share = layer.norms.parallel, self._share(batch, training)
        of_mixers = layer.list_mixer_linears(self.arch.hidden_size)
        names = [_names([group]) for group in of_mixers]
        of_feed = () if layer.feed is None else layer.feed.list_linears(self.arch.hidden_size)
        also = [_names([group]) for group in of_feed]
        mixer = feed = _NOTHING
        if layer.mixer is not None:
            kept = training.keep(*names[0]) or (parallel and training.keep(*chain(*also[:1])))
            given = (layer.norms, share, training, needed, kept)
            mixer = self._save(layer.mixer, of_mixers, *given)
            for second in layer.mixers[1:]:
                mixer = mixer.beside(second.count_kept(share, needed))
            needed = needed or (not parallel and training.adapted(*chain(*names)))
        if layer.feed is not None:
            kept = training.keep(*also[0]) or (layer.feed.keeps_input and needed)
            given = (layer.norms, share, training, needed, kept)
            feed = self._save(layer.feed, of_feed, *given, parallel)
        return LayerBytes(mixer, feed)

    def _save(
        self,
        part: LayerPart,
        linears: Linears,
        norms: Norms,
        share: RankShare,
        training: LayerTraining,
        needed: bool,
        kept: bool,
        shares_input: bool = False,
    ) -> SavedBytes:
        """What a part with these linear layers keeps; `kept` says whether the first of them keep
        their input, unless it `shares_input` with another part.
        """
        norm = share.stream * share.norm(share.hidden_size)
        entered = 0 if shares_input else share.width * share.hidden_size * share.stream
        own = part.count_kept(share, needed)
        adapters = training.count_adapters(linears, self.arch, self.topology, share)
        te, fp32 = share.kernels.transformer_engine, share.width == FP32
        plus_one = self.arch.norm is Norm.RMS_PLUS_ONE
        copies = not (te or fp32 or self.arch.norm is Norm.LAYER)
        return SavedBytes(
            stream=entered,
            norm=norm * norms.before * needed * (not shares_input),
            norm_output=entered * kept,
            inner=own.inner + adapters,
            core=own.core,
            again_inside=own.again,
            after=norm * norms.after * (needed or training.adapted(*_names(linears))),
            # Transformer Engine has it inside the linear layer that follows it.
            norm_apart=norms.before and not norms.parallel and (part.norm_apart or not te),
            whole=part.computed_again,
            norm_copies=copies and (plus_one or not share.kernels.fused_norm),
            unkept=entered * (not kept),
        )

    def _share(self, batch: MicrobatchShape, training: LayerTraining) -> RankShare:
        at = self.topology

        def count(window: int | None, explicit: bool) -> Tiles:
            return _count_tiles(batch, window, explicit, at.cp, self.rank)

        return RankShare(
            stream=self.stream(batch),
            whole=batch.tokens,
            positions=batch.positions,
            hidden_size=self.arch.hidden_size,
            width=self.width,
            tp=at.tp,
            cp=at.cp,
            expert_tp=at.expert_tp,
            sequence_parallel=self.sequence_parallel,
            kernels=self.kernels,
            training=training,
            tiles=count,
            norm=self._norm,
            slabs=partial(count_slabs, batch, at.cp),
        )

    def kind(self, number: int) -> tuple[Layer, int]:
        """What decides how much a decoder layer keeps, besides its input."""
        return self.arch.find_layer(number), -1 if self.adapters is None else number

    def adapts(self, layer: int) -> bool:
        """Whether a layer has adapters."""
        return self.adapters is not None and bool(self.adapters.layers[layer])

    def stream(self, batch: MicrobatchShape) -> int:
        """Tokens of the residual stream on a rank."""
        split = self.topology.tp if self.sequence_parallel else 1
        return -(-batch.tokens // split)

    def hidden(self, batch: MicrobatchShape) -> int:
        """Bytes of the residual stream."""
        return self.width * self.arch.hidden_size * self.stream(batch)

    def angles(self, batch: MicrobatchShape) -> int:
        """Bytes of the rotary angles, which layers that are computed again keep between them."""
        attention = self.arch.find_part(Attention)
        if attention is None:
            return 0
        sizes = (rope.size(attention.kv_channels) for rope in self.arch.ropes)
        return batch.positions * sum(sizes) * FP32

    def embedding(self, batch: MicrobatchShape) -> int:
        """Bytes that the embedding keeps, unless it is frozen."""
        return 0 if self.adapters is not None else batch.tokens * INT64

    def splice(self, batch: MicrobatchShape) -> int:
        """Bytes that pictures' features keep where they take the places of tokens: the sources of
        each token, in the caller's rows and in the rank's, and which tokens have one.
        """
        if not batch.pictures or self.arch.shell is None:
            return 0
        return batch.tokens * (2 * INT64 * (1 + self.arch.shell.deep) + 1)

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


def _names(linears: Iterable[Iterable[Linear]]) -> list[str]:
    return [linear.name for group in linears for linear in group]
