"""The readings of a model, and how far apart two of them are.

Shapes: B rows, S positions, V vocabulary, D model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from megatron_policy.batch import BatchedDataDict
from megatron_policy.converters.architecture import Medium, Shell
from megatron_policy.converters.architecture.media import Found, Make, SoundMedium

ROUNDING = {"float32": 1e-4, "bfloat16": 5e-2}
"""Largest unsuspicious error of a layer's output, relative to its largest value."""


_FRAMES = 30
"""Of a clip of sound."""


@dataclass(frozen=True)
class Job:
    """Which model to run, how, and on how many random tokens."""

    model: str
    vocab_size: int
    num_layers: int
    tp: int
    pp: int
    sequence_parallel: bool
    dtype: str
    rows: int
    tokens: int
    seed: int
    per_layer: bool
    timeout_s: float
    ep: int = 1
    etp: int | None = None
    sequences: list[list[int]] | None = None
    """Rows to read in place of random ones, of which only the logprobs are wanted."""

    def draw(self) -> torch.Tensor:
        """The token ids, int64 `[B, S]`, the same on every rank."""
        if self.sequences is not None:
            return torch.tensor(self.sequences)
        random = torch.Generator().manual_seed(self.seed)
        return torch.randint(0, self.vocab_size, (self.rows, self.tokens), generator=random)


def draw_batch(job: Job, shell: Shell | None) -> BatchedDataDict:
    """The job's tokens, and if there is a `shell` a picture of random pixels in each row, as far as
    the row has room for it behind its first token: row r has (r + 1) squares of 2 x 2 tokens. A
    clip of random sound, as long in all rows, follows if the model hears any.
    """
    tokens_BS = job.draw()
    data = BatchedDataDict(input_ids=tokens_BS)
    if shell is None:
        return data
    if job.sequences is not None:  # of which all is text
        return BatchedDataDict({**data, "mm_token_type_ids": torch.zeros_like(tokens_BS)})
    for medium in shell.media:
        named = {medium.placeholder, medium.placeholder if medium.start is None else medium.start}
        for token in named:
            tokens_BS.masked_fill_(tokens_BS == token, shell.text)
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(job.seed))
    found: dict[str, list[torch.Tensor | None]] = {}
    for row, tokens_S in enumerate(tokens_BS):
        place = 1
        for medium, given in _make_media(shell, row, draw):
            tokens = medium.count_tokens(given)
            if fits := place + tokens < len(tokens_S):
                if medium.start is not None:
                    tokens_S[place - 1] = medium.start
                tokens_S[place : place + tokens] = medium.placeholder
                place += tokens + 2
            for key, values in given.items():
                found.setdefault(key, []).append(values if fits else None)
    return BatchedDataDict({**data, **found})


def _make_media(shell: Shell, row: int, make: Make) -> Iterator[tuple[Medium, Found]]:
    """The picture of row number `row`, and its clips if the model hears."""
    side = shell.pictures.side
    yield shell.pictures, shell.pictures.make_picture((2 * side, 2 * side * (row + 1)), make)
    yield from ((medium, medium.make_clip(_FRAMES, make)) for medium in shell.sounds)


def count_room(shell: Shell | None, rows: int) -> int:
    """The least tokens of rows that all have room for the pictures and clips of `draw_batch`."""
    if shell is None:
        return 0
    made = (_make_media(shell, row, torch.zeros) for row in range(rows))
    return max(sum(medium.count_tokens(given) + 2 for medium, given in row) for row in made)


def count_media(job: Job, shell: Shell | None) -> dict[str, int]:
    """How many rows of the job have a picture and, if the model hears, a clip of sound."""
    if shell is None:
        return {}
    data = draw_batch(job, shell)
    return {
        "clips" if isinstance(medium, SoundMedium) else "pictures": sum(
            given is not None for given in data[medium.values]
        )
        for medium in (shell.pictures, *shell.sounds)
    }


@dataclass(frozen=True)
class ModelOutputs:
    """fp32 on the CPU: `logits` `[B, S, V]`, `logprobs` `[B, S - 1]` of each next token, and the
    `layers`' outputs `[B, S, D]` by global number.
    """

    logits: torch.Tensor
    logprobs: torch.Tensor
    layers: Mapping[int, torch.Tensor]


def keep_output(kept: dict[int, torch.Tensor], number: int) -> Callable[..., None]:
    """A forward hook that keeps a layer's output as `number`, in fp32 on the CPU."""

    def hook(module: torch.nn.Module, args: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        kept[number] = hidden.float().cpu()

    return hook


def keep_input(kept: dict[int, torch.Tensor], number: int) -> Callable[..., None]:
    """A hook before a layer that keeps its input as `number`, in fp32 on the CPU."""

    def hook(module: torch.nn.Module, args: Any) -> None:
        kept[number] = args[0].float().cpu()

    return hook


@dataclass(frozen=True)
class Deviation:
    """Between two tensors, elementwise: the largest and the mean absolute difference, and the
    largest absolute value of the reference.
    """

    max: float
    mean: float
    scale: float

    @classmethod
    def between(cls, ours: torch.Tensor, reference: torch.Tensor) -> Deviation:
        """The difference; NaN if either is NaN, which exceeds every limit."""
        apart = (ours.double() - reference.double()).abs()
        scale = float(reference.abs().max())
        return cls(float(apart.max()), float(apart.mean()), scale)

    @property
    def relative(self) -> float:
        """The largest difference relative to the reference's largest value."""
        return self.max / self.scale if self.scale else self.max


@dataclass(frozen=True)
class Parity:
    """The differences, and the limits for logits and logprobs."""

    job: Job
    family: str
    logits: Deviation
    logprobs: Deviation
    layers: Mapping[int, Deviation]
    logits_limit: float
    logprobs_limit: float
    media: Mapping[str, int] = field(default_factory=dict)
    """Rows that have `pictures`, and those that have `clips`, of models that see and hear."""
    room: int = 0
    """The least tokens of rows that all have them."""

    @property
    def holds(self) -> bool:
        """Whether logits and logprobs are within their limits."""
        return self.logits.max <= self.logits_limit and self.logprobs.max <= self.logprobs_limit

    @property
    def warnings(self) -> tuple[str, ...]:
        """Which of what the model sees and hears was not compared, and how it is."""
        rows, tokens = self.job.rows, self.job.tokens
        return tuple(
            f"{rows - count} of {rows} rows have no {name.removesuffix('s')}: "
            f"a row of {tokens} tokens has no room for one, give --tokens {self.room}"
            for name, count in self.media.items()
            if count < rows
        )

    @property
    def first_layer_apart(self) -> int | None:
        """The first layer whose output is off by more than rounding; None if there is none."""
        limit = ROUNDING[self.job.dtype]
        apart = (n for n in sorted(self.layers) if not self.layers[n].relative <= limit)
        return next(apart, None)
