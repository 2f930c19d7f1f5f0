"""Rotary frequencies of an architecture, and the module that computes the angles for every kind of
layer.

Shapes: T positions, R rows, P rotated pairs of a head.
Sources: Su et al. 2021, "RoFormer"; for scaling those of `converters/architecture/rotary.py`. Where
a source is ambiguous this follows transformers (modeling_rope_utils.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_policy.converters.architecture import Attention
from megatron_policy.converters.architecture.rotary import (
    BY_LENGTH,
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    Rope,
    YarnScaling,
)
from megatron_policy.device import current_device, to_device
from megatron_policy.engines.megatron.layers.sequences import SequenceParams, sequences_of
from megatron_policy.packing.microbatch import Microbatch


def inverse_frequencies(rope: Rope, head_dim: int, length: int = 0) -> torch.Tensor:
    """Radians per position of each rotated pair, fp32 `[P]`, on the CPU.

    Some scaling methods depend on the `length` of the text; 0 stands for a short one.
    """
    size = rope.size(head_dim)
    exponents = torch.arange(0, size, 2, dtype=torch.int64).float() / size
    match rope.scaling:
        case None:
            return _plain(rope.base, exponents)
        case LinearScaling(factor):
            return _plain(rope.base, exponents) / factor
        case DynamicScaling(factor, max_position):
            # In fp32, as in transformers.
            stretch = factor * torch.tensor(max(length, max_position)) / max_position - (factor - 1)
            return _plain(rope.base * stretch ** (size / (size - 2)), exponents)
        case Llama3Scaling() as scaling:
            return _scale_llama3(_plain(rope.base, exponents), scaling)
        case YarnScaling() as scaling:
            return _scale_yarn(rope.base**exponents, rope.base, size, scaling)
        case LongScaling() as scaling:
            long = length > scaling.original_max_position
            factors = torch.tensor(scaling.long if long else scaling.short)
            return 1.0 / (factors * rope.base**exponents)


def _plain(base: float | torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    return 1.0 / (base**exponents)


def _scale_llama3(frequencies: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    """Slow rotations are stretched by `factor`, fast ones kept, those in between blended linearly
    in 1 / wavelength.
    """
    wavelengths = 2 * math.pi / frequencies
    longest = scaling.original_max_position / scaling.low_freq_factor
    shortest = scaling.original_max_position / scaling.high_freq_factor
    stretched = frequencies / scaling.factor
    blend = (scaling.original_max_position / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - blend) * stretched + blend * frequencies
    return torch.where(
        wavelengths > longest,
        stretched,
        torch.where(wavelengths < shortest, frequencies, blended),
    )


def _scale_yarn(
    periods: torch.Tensor, base: float, size: int, scaling: YarnScaling
) -> torch.Tensor:
    """Pairs that turn more than `beta_fast` times in the original context are kept, those that turn
    less than `beta_slow` times are stretched, those in between blended linearly in their index.
    """

    def pair_turning(times: float) -> float:
        turn = scaling.original_max_position / (times * 2 * math.pi)
        return size * math.log(turn) / (2 * math.log(base))

    low, high = pair_turning(scaling.beta_fast), pair_turning(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    if low == high:
        high += 0.001  # a step, not a division by zero
    pairs = torch.arange(size // 2, dtype=torch.float32)
    stretched = ((pairs - low) / (high - low)).clamp(0, 1)
    return (1.0 / (scaling.factor * periods)) * stretched + (1.0 / periods) * (1 - stretched)


def attention_factor(rope: Rope) -> float:
    """The factor on cosine and sine."""
    scaling = rope.scaling
    return scaling.attention_factor if isinstance(scaling, YarnScaling | LongScaling) else 1.0


class Rotary(torch.nn.Module):
    """Angles of every kind of layer, concatenated: `[T, 1, 1, 2 P of each]`, in fp32.

    Replaces Megatron-Core's module in a GPTModel. Each layer's attention takes its own `columns`: a
    block of recomputed layers can only be given one tensor.
    """

    def __init__(self, ropes: Iterable[Rope], head_dim: int) -> None:
        super().__init__()
        self.ropes = tuple(ropes)
        self.head_dim = head_dim
        self.text_length: int | None = None
        """The text length to assume, independent of padding and of shorter microbatches; None for
        the computed length.
        """
        self.longest: int | None = None
        """The most tokens of a text, if all texts are turned like the longest possible one."""
        self.by_row = False
        """Whether each row of a batch is turned by its own length."""
        self.lengths_TR: torch.Tensor | None = None
        """The length of each token's row, on the host, for the next microbatch; None where all
        tokens have the text length.
        """
        self._angles: dict[tuple[int, int], torch.Tensor] = {}
        self._frequencies: dict[int, list[torch.Tensor]] = {}

    @property
    def depends_on_length(self) -> bool:
        """Whether the angles of a text's first positions depend on its length."""
        return self.longest is None and any(
            isinstance(rope.scaling, BY_LENGTH) for rope in self.ropes
        )

    def differs(self, before: int, after: int) -> bool:
        """Whether the angles of a text's first positions change between these two lengths."""
        if not self.depends_on_length:
            return False
        pairs = (
            (inverse_frequencies(rope, self.head_dim, n) for n in (before, after))
            for rope in self.ropes
            if isinstance(rope.scaling, BY_LENGTH)
        )
        return not all(torch.equal(*pair) for pair in pairs)

    def forward(self, wanted: int | SequenceParams | torch.Tensor, **_: Any) -> torch.Tensor:
        """The angles of positions 0 to `wanted` - 1, or of the positions `wanted` or of sequences
        `wanted`; `[T, R, 1, 2 P of each]` where rows have lengths or positions of their own.
        """
        if isinstance(wanted, torch.Tensor):
            return self._compute(wanted, len(wanted))
        if isinstance(wanted, int):
            if self.lengths_TR is not None:
                return self._compute(torch.arange(wanted).unsqueeze(1), self.lengths_TR)
            key = (wanted, self.text_length or wanted)
            if key not in self._angles:
                positions_T1 = torch.arange(wanted, device=current_device()).unsqueeze(1)
                # One length is in use at a time.
                self._angles = {key: self._compute(positions_T1, key[1])}
            return self._angles[key]
        lengths = self.text_length or wanted.longest if self.lengths_TR is None else self.lengths_TR
        return self._compute(wanted.positions_TR, lengths)

    def _compute(self, positions_TR: torch.Tensor, text_length: int | torch.Tensor) -> torch.Tensor:
        """The angles at these positions, or three of each token, of texts of one length, or of each
        token's `[T, R]`: those are made on the host, which knows the lengths.
        """
        if isinstance(text_length, torch.Tensor):
            lengths, which_TR = text_length.unique(return_inverse=True)
            positions_TR = positions_TR.cpu()
            tables = [
                [inverse_frequencies(rope, self.head_dim, n) for n in lengths.tolist()]
                for rope in self.ropes
            ]
            frequencies = [torch.stack(table)[which_TR] for table in tables]
        else:
            frequencies = self._frequencies_of(text_length if self.depends_on_length else 0)
        if not self.ropes:
            return positions_TR.new_empty((len(positions_TR), 1, 1, 0), dtype=torch.float32)
        angles = []
        for rope, of_rope in zip(self.ropes, frequencies, strict=True):
            turning_TRP = positions_TR.unsqueeze(-1)
            if positions_TR.ndim == 3:  # each pair is turned by one of three positions
                assert rope.axes, "a token has one position"
                turning_TRP = positions_TR.index_select(-1, to_device(torch.tensor(rope.axes)))
            once = turning_TRP.float() * of_rope
            angles.append(
                once.repeat_interleave(2, -1) if rope.interleaved else once.repeat(1, 1, 2)
            )
        return to_device(torch.cat(angles, -1).unsqueeze(2))

    def _frequencies_of(self, text_length: int) -> list[torch.Tensor]:
        if text_length not in self._frequencies:
            lengths = (
                text_length if self.longest is None else rope.longest(self.longest)
                for rope in self.ropes
            )
            self._frequencies = {
                text_length: [
                    to_device(inverse_frequencies(rope, self.head_dim, length))
                    for rope, length in zip(self.ropes, lengths, strict=True)
                ]
            }
        return self._frequencies[text_length]

    def get_rotary_seq_len(
        self,
        inference_context: Any,
        transformer: Any,
        transformer_input: torch.Tensor | None,
        transformer_config: Any,
        packed_seq_params: PackedSeqParams | None = None,
        **_: Any,
    ) -> int | SequenceParams | torch.Tensor:
        """The number of positions, the sequences, or the positions of all tokens of a text, that
        Megatron-Core is about to need. It asks before each forward pass and hands the answer to
        `forward` unchanged.
        """
        if inference_context is not None:
            self.text_length = self.lengths_TR = None
        if (sequences := sequences_of(packed_seq_params)) is not None:
            return sequences
        assert_whole(inference_context, transformer_config)
        received: torch.Tensor | None = transformer.input_tensor
        if received is None:
            received = transformer_input
        assert received is not None
        given = received.size(0)
        if inference_context is None:
            parts: int = transformer_config.tensor_model_parallel_size
            return given * parts if transformer_config.sequence_parallel else given
        length: int = inference_context.max_sequence_length
        if self.depends_on_length:
            length = inference_context.sequence_len_offset + given
        known_TR: torch.Tensor | None = inference_context.positions_TR
        return length if known_TR is None else known_TR[:length]


def assert_whole(inference_context: Any, config: Any) -> None:
    """Positions can be inferred only where a rank computes whole sequences."""
    assert inference_context is not None or config.context_parallel_size == 1, (
        "under context parallelism the model needs to know its sequences"
    )


def columns(part: Attention, ropes: Iterable[Rope]) -> slice | None:
    """Where the angles of a layer's attention are in what `Rotary` returns of all `ropes`; None if
    it does not rotate.
    """
    start = 0
    for rope in ropes:
        width = 2 * len(range(0, rope.size(part.kv_channels), 2))
        if rope == part.rope:
            return slice(start, start + width)
        start += width
    return None


def _find_rotaries(models: Iterable[torch.nn.Module]) -> list[Rotary]:
    found = (getattr(model, "rotary_pos_emb", None) for model in models)
    return [each for each in found if isinstance(each, Rotary)]


def outgrown(models: Iterable[torch.nn.Module], before: int, after: int) -> bool:
    """Whether what was computed for a text of one length is invalid for the other length."""
    return any(rotary.differs(before, after) for rotary in _find_rotaries(models))


def choose_text_length(models: Iterable[torch.nn.Module], choice: str, longest: int) -> None:
    """Let the models' rotary embeddings follow `policy.rope_length`, which is `choice`; no text has
    more than `longest` tokens.
    """
    for rotary in _find_rotaries(models):
        rotary.longest = longest if choice == "maximum" else None
        rotary.by_row = choice == "row"


def set_row_lengths(model: torch.nn.Module, microbatch: Microbatch, rank: int) -> None:
    """Set the lengths of the rows that the model's next forward pass computes on context-parallel
    rank `rank`, if it turns each by its own. Rows without `input_lengths` are as long as the batch
    is wide.
    """
    for rotary in _find_rotaries([model]):
        if not rotary.by_row or not rotary.depends_on_length:
            continue
        data, layout = microbatch.host.data, microbatch.host.layout
        rows, width = data["input_ids"].shape
        lengths_B = data.get("input_lengths")
        if lengths_B is None:
            lengths_B = torch.full((rows,), microbatch.text_length)
        rotary.lengths_TR = layout.take(lengths_B.cpu()[:, None].expand(rows, width), rank)


def set_text_length(models: Iterable[torch.nn.Module], length: int) -> None:
    """Set the text length that the next batches assume: padding does not lengthen the text, nor
    does cutting off some rows' padding shorten it.
    """
    for rotary in _find_rotaries(models):
        rotary.text_length = length
