"""The host's rows as ours: what it packs for towers row by row, and of Nemotron Omni, whose makers'
processor has a layout of its own, in that of transformers' processor.

Shapes: N pictures, frames or clips of a row, C channels, H and W pixels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial, wraps
from typing import Any

import torch

from megatron_policy.batch import BatchedDataDict
from megatron_policy.converters.architecture import FilmMedium, PatchMedium, Shell, SoundMedium
from megatron_policy.errors import BatchError
from megatron_policy.hosts.nemo_rl.host_imports import to_host_batch

_SEEN = ("pixel_values", "imgs_sizes", "num_frames")
_HEARD = ("sound_clips", "sound_length")
"""What the makers' layout has of pictures or videos, and of sound."""
Own = torch.Tensor | None
"""What a row has under one key."""


def from_host_batch(data: Any, shell: Shell | None = None) -> Any:
    """The host's rows as ours, with the plan they came with: what the host packs for towers
    (`PackedTensor`) is a list with a tensor, or None, for each row, in the layout that the `shell`
    reads. What is no batch is left alone. BatchError, naming the row, for what is in no layout of
    Nemotron Omni.
    """
    if not isinstance(data, Mapping):
        return data
    taken = BatchedDataDict(data)
    for key, value in data.items():
        if hasattr(value, "as_tensor") and hasattr(value, "slice"):
            taken[key] = [value.slice([row]).as_tensor() for row in range(len(value))]
    media = () if shell is None else shell.media
    films = next((each for each in media if isinstance(each, FilmMedium)), None)
    for medium in media:
        if isinstance(medium, PatchMedium) and films is not None and _SEEN[1] in taken:
            _convert(taken, _SEEN, partial(_read_pixels, medium, films))
        elif isinstance(medium, SoundMedium) and medium.bins_last and _HEARD[0] in taken:
            _convert(taken, _HEARD, partial(_read_clips, medium))
    return taken


def read_host_batch(worker: Any, data: Any) -> Any:
    """`from_host_batch` in the layout that the model of this worker's policy reads."""
    return from_host_batch(data, worker.policy.exporter.table.architecture.shell)


def exchange_host_batches(method: Callable[..., Any]) -> Callable[..., Any]:
    """`method`, which gets the host's rows as ours and returns a batch of the host's type."""

    @wraps(method)
    def call(self: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
        return to_host_batch(method(self, read_host_batch(self, data), *args, **kwargs))

    return call


def _convert(
    batch: BatchedDataDict, keys: tuple[str, ...], read: Callable[..., Mapping[str, torch.Tensor]]
) -> None:
    """Put in the place of what rows have under `keys` what `read` makes of it, by key."""
    rows = next(len(batch[key]) for key in keys if key in batch)
    columns = [batch.pop(key, [None] * rows) for key in keys]
    made = list[Mapping[str, torch.Tensor]]()
    for row, own in enumerate(zip(*columns, strict=True)):
        there = [key for key, each in zip(keys, own, strict=True) if each is not None]
        lacking = [key for key in keys[:2] if key not in there]
        if there and lacking:
            raise BatchError(f"row {row} has {there[0]!r} without {lacking[0]!r}: pass both")
        made.append(read(row, *own) if there else {})
    for key in dict.fromkeys(key for each in made for key in each):
        batch[key] = [each.get(key) for each in made]


def _read_pixels(
    still: PatchMedium,
    films: FilmMedium,
    row: int,
    pixels_NCHW: torch.Tensor,
    sizes_N2: torch.Tensor,
    frames: Own,
) -> dict[str, torch.Tensor]:
    """The patches of pictures, without the padding behind their sizes, or videos of so many
    `frames`, of which those that are read together are joined.
    """
    most, count = pixels_NCHW.shape[2:], len(pixels_NCHW)
    legal = pixels_NCHW.ndim == 4 and sizes_N2.shape == (count, 2) and count > 0
    side = math.isqrt(math.prod(still.patch or ()) // pixels_NCHW.size(1)) if legal else 1
    odd = not legal or (sizes_N2 < 1).any() or (sizes_N2 > torch.tensor(most)).any()
    if odd or (sizes_N2 % side).any():
        raise BatchError(
            f"row {row} has pixel_values {[*pixels_NCHW.shape]} and imgs_sizes "
            f"{sizes_N2.tolist()}: pass [pictures, channels, height, width], and the pixels of "
            f"each in height and width that are not padding, multiples of {side}"
        )
    counts = [1] * count if frames is None else frames.flatten().long().tolist()
    if sum(counts) != count or min(counts) < 1:
        raise BatchError(
            f"row {row} has {count} pictures or frames, but num_frames count {counts}: pass the "
            "number of each video's, or 1 for each picture"
        )
    cropped = [each[:, :h, :w] for each, (h, w) in zip(pixels_NCHW, sizes_N2.tolist(), strict=True)]
    if {*counts} == {1}:
        values = torch.cat([_cut(each, side) for each in cropped])
        return {still.values: values, still.grids: sizes_N2.long() // side}
    if len({*counts}) > 1 or (sizes_N2 != sizes_N2[0]).any():
        raise BatchError(
            f"row {row} has videos of {counts} frames of sizes {sizes_N2.tolist()}: those of a row "
            "are read if all are alike, and no picture is beside them"
        )
    together = films.channels // pixels_NCHW.size(1)
    videos = []
    for frames_FCHW in torch.stack(cropped).split(counts):
        missing = -len(frames_FCHW) % together
        filled = torch.cat([frames_FCHW, *[frames_FCHW[-1:]] * missing])
        videos.append(filled.unflatten(0, (-1, together)).flatten(1, 2))
    return {films.values: torch.stack(videos)}


def _cut(picture_CHW: torch.Tensor, side: int) -> torch.Tensor:
    """`[patches, values]`: its patches line by line."""
    rows, columns = (each // side for each in picture_CHW.shape[1:])
    split = picture_CHW.reshape(-1, rows, side, columns, side)
    return split.permute(1, 3, 0, 2, 4).flatten(0, 1).flatten(1)


def _read_clips(
    medium: SoundMedium, row: int, clips_NFB: torch.Tensor, lengths_N: torch.Tensor
) -> dict[str, torch.Tensor]:
    """The same clips, and 1 for each of their frames that count."""
    legal = clips_NFB.ndim == 3 and lengths_N.shape == (len(clips_NFB),)
    if not legal or (lengths_N < 1).any() or (lengths_N > clips_NFB.size(1)).any():
        raise BatchError(
            f"row {row} has sound_clips {[*clips_NFB.shape]} and sound_length "
            f"{lengths_N.tolist()}: pass [clips, frames, bins], and how many frames of each count"
        )
    mask = torch.arange(clips_NFB.size(1)) < lengths_N.unsqueeze(1)
    return {medium.values: clips_NFB, medium.mask: mask.long()}
