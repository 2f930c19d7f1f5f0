"""Compares two checkpoints of any format bit by bit, and each with its own digests; or one alone
with these.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_policy.convert.blockwise import BlockBuffer, check_memory, cut
from megatron_policy.convert.open_checkpoint import (
    HF,
    OpenCheckpoint,
    damaged_tensor,
    digest_of,
    open_checkpoint,
)
from megatron_policy.convert.plan import DEFAULT_MAX_MEMORY
from megatron_policy.converters.files.raw_files import RawFiles
from megatron_policy.converters.formats.dist_files import find
from megatron_policy.converters.formats.hf_names import MANIFEST
from megatron_policy.converters.formats.opening import open_model
from megatron_policy.errors import ConversionError
from megatron_policy.formats.digests import Digest
from megatron_policy.formats.manifest import DirectoryManifest, read_manifest

SHOWN = 20
"""Differences that are spelled out; the others are only counted."""

MISSING, SHAPE, DTYPE, VALUES, DIGEST = "missing", "shape", "dtype", "values", "digest"

_PART = 2**18
"""Elements compared at a time where blocks differ, which needs extra memory."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Difference:
    """One difference; `kind` is missing, shape, dtype, values, or digest.

    A digest differs when a tensor, or a file, is not what its own checkpoint's manifest says.
    """

    kind: str
    name: str
    message: str


@dataclass(frozen=True)
class Comparison:
    """The first `SHOWN` differences, how many there are by kind, and what was compared."""

    differences: tuple[Difference, ...]
    summary: Mapping[str, int]
    tensors: int
    nbytes: int
    """Bytes of the compared tensors, counted once."""
    has_digests: tuple[bool, bool]
    """Whether each checkpoint has digests of its bytes."""
    skipped: tuple[str, ...]
    """Tensors that only one checkpoint has and that feed nothing."""

    @property
    def equal(self) -> bool:
        """Whether there is no difference."""
        return not self.summary


def verify(
    a: str | Path,
    b: str | Path,
    max_memory: int = DEFAULT_MAX_MEMORY,
    progress: Callable[[int, int], None] | None = None,
    config: str | Path | None = None,
) -> Comparison:
    """Compare two checkpoints tensor by tensor under their HF names, and each with its digests.

    Tensors that feed nothing are skipped if one side lacks them; a tied copy must equal its
    original. A Megatron-Core checkpoint without its own config takes `config`, or that of the HF
    checkpoint it is compared with. ConfigError and ConversionError as for `convert`.
    """
    check_memory(max_memory)
    with RawFiles() as files:
        left = open_checkpoint(a, files, _config_for(a, b, config))
        right = open_checkpoint(b, files, _config_for(b, a, config))
        return _Comparing(left, right, max_memory, progress or (lambda done, total: None)).all()


def _config_for(
    path: str | Path, other: str | Path, config: str | Path | None
) -> str | Path | None:
    """The config for the checkpoint at `path`, if it has to be given."""
    if config is not None:
        return config
    if find(path) is not None and find(other) is None and (Path(other) / "config.json").is_file():
        return Path(other)
    return None


class _Comparing:
    """Two open checkpoints while they are compared."""

    def __init__(
        self,
        left: OpenCheckpoint,
        right: OpenCheckpoint,
        max_memory: int,
        progress: Callable[[int, int], None],
    ) -> None:
        self._sides = (left, right)
        self._tables = [side.table for side in self._sides if side.table is not None]
        self._max_memory, self._progress = max_memory, progress
        self._found: list[Difference] = []
        self._counts: Counter[str] = Counter()
        self._buffer = BlockBuffer(max_memory)
        self._skipped: list[str] = []
        self._done = 0
        self._total = sum(info.nbytes for side in self._sides for info in side.infos.values())

    def all(self) -> Comparison:
        """Compare everything."""
        left, right = self._sides
        for side in self._sides:
            for name, message in side.problems.items():
                self._add(DIGEST, name, message)
        common = [name for name in left.infos if name in right.infos]
        for one, other in ((left, right), (right, left)):
            for name in one.infos:
                if name not in other.infos:
                    self._alone(name, one, other)
        for name in common:
            self._compare(name, (left, name), (right, name))
        return Comparison(
            tuple(self._found),
            dict(self._counts),
            len(common),
            sum(left.infos[name].nbytes for name in common),
            (left.manifest is not None, right.manifest is not None),
            tuple(self._skipped),
        )

    def _add(self, kind: str, name: str, message: str) -> None:
        self._counts[kind] += 1
        if len(self._found) < SHOWN:
            self._found.append(Difference(kind, name, message))

    def _alone(self, name: str, side: OpenCheckpoint, other: OpenCheckpoint) -> None:
        """Handle a tensor that only one side has: it can feed nothing, or be a tied copy."""
        original = next((t.copies()[name] for t in self._tables if name in t.copies()), None)
        if original in side.infos and original in other.infos:
            self._compare(name, (side, name), (side, str(original)))
            return
        if any(name in table.ignored for table in self._tables):
            self._skipped.append(name)
        else:
            self._add(MISSING, name, f"{name} is in {side.root}, but not in {other.root}")
        for _ in self._blocks((side, name)):
            pass

    def _compare(self, name: str, left: _Tensor, right: _Tensor) -> None:
        one, other = left[0].infos[left[1]], right[0].infos[right[1]]
        for kind, a, b in ((SHAPE, one.shape, other.shape), (DTYPE, one.dtype, other.dtype)):
            if a != b:
                self._add(
                    kind, name, f"{name}: {a} in {_describe(left)}, {b} in {_describe(right)}"
                )
                for tensor in (left, right):
                    for _ in self._blocks(tensor):
                        pass
                return
        count, example = 0, ""
        for first, (x, y) in self._blocks(left, right):
            for at in _differing(x, y):
                if not count:
                    place = [int(i) for i in np.unravel_index(first + int(at[0]), one.shape)]
                    example = f"first at {place}: {x[at[0]].item()} and {y[at[0]].item()}"
                count += len(at)
        if count:
            message = f"{name}: {count} of {one.elements} differ, {example}"
            self._add(VALUES, name, f"{message} ({_describe(left)} and {_describe(right)})")

    def _blocks(self, *tensors: _Tensor) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
        """Yield (first element, values of each tensor) of each block; check the digests at
        the end.
        """
        infos = [side.infos[name] for side, name in tensors]
        dtype = infos[0].dtype
        scratch = max(side.tensors.scratch(name, dtype) for side, name in tensors)
        plan = cut(infos[0], (dtype,) * len(tensors), scratch, self._max_memory)
        digests = [Digest() for _ in tensors]
        for first, held, spare in self._buffer.blocks(plan):
            for (side, name), values, digest in zip(tensors, held, digests, strict=True):
                side.tensors.read(name, first, values, spare)
                if side.manifest is not None:
                    digest.update(values)
                self._done += values.nbytes
            self._progress(self._done, self._total)
            yield first, held
        for (side, name), digest in zip(tensors, digests, strict=True):
            stated = side.manifest.tensors.get(name) if side.manifest else None
            if stated is not None and stated[1] != digest.text():
                self._add(DIGEST, name, str(damaged_tensor(side.root, name)))


def _differing(x: Tensor, y: Tensor) -> Iterator[Any]:
    """The indices of elements whose bits differ, one part at a time."""
    bits = _BITS[x.element_size()]
    x, y = x.view(bits), y.view(bits)
    if torch.equal(x, y):
        return
    for start in range(0, len(x), _PART):
        part = slice(start, start + _PART)
        found = (x[part] != y[part]).numpy().nonzero()[0] + start
        if len(found):
            yield found


_Tensor = tuple[OpenCheckpoint, str]
"""A tensor of one side, by its name there."""


def _describe(tensor: _Tensor) -> str:
    side, name = tensor
    return f"{side.root}: {name}"


@dataclass(frozen=True)
class Check:
    """What a checkpoint is, and a message for everything in it that contradicts its digests."""

    root: Path
    kind: str
    manifest: DirectoryManifest
    tensors: int
    nbytes: int
    problems: tuple[str, ...]


def check(
    path: str | Path,
    max_memory: int = DEFAULT_MAX_MEMORY,
    progress: Callable[[int, int], None] | None = None,
    config: str | Path | None = None,
) -> Check:
    """Compare a checkpoint with its own digests; ConversionError if it has none, or is undamaged
    and not the model that its config.json describes.

    ConfigError and ConversionError as for `convert`; `progress` gets bytes done and in total.
    """
    check_memory(max_memory)
    if (root := find(path)) is not None and read_manifest(root) is None:
        raise _without_digests(root)
    with RawFiles() as files:
        checkpoint = open_checkpoint(path, files, config)
        if checkpoint.manifest is None:
            raise _without_digests(checkpoint.root)
        problems = [*checkpoint.problems.values()]
        total = sum(info.nbytes for info in checkpoint.infos.values())
        stated, done, buffer = checkpoint.manifest.tensors, 0, BlockBuffer(max_memory)
        for name in sorted({*stated} - {*checkpoint.infos}):
            problems.append(f"{checkpoint.root} lacks {name}, which its {MANIFEST} names")
        if not problems:
            _check_model(checkpoint, checkpoint.manifest.origin["family"])
        for name, info in checkpoint.infos.items():
            if name not in stated:
                problems.append(f"{checkpoint.root}: {name} has no digest in {MANIFEST}")
            elif digest_of(checkpoint, name, buffer, max_memory) != stated[name][1]:
                problems.append(str(damaged_tensor(checkpoint.root, name)))
            done += info.nbytes
            if progress is not None:
                progress(done, total)
        return Check(
            checkpoint.root,
            checkpoint.kind,
            checkpoint.manifest,
            len(checkpoint.infos),
            total,
            tuple(problems),
        )


def _check_model(checkpoint: OpenCheckpoint, family: str) -> None:
    """ConversionError unless a Hugging Face model that was written as one of that family has the
    tensors of its config.json. Models without a family here are not compared.
    """
    table, infos = checkpoint.table, checkpoint.infos
    if checkpoint.kind != HF or table is None:
        return
    found = {name: info.shape for name, info in infos.items()}
    dtypes = {name: info.dtype for name, info in infos.items()}
    try:
        table.check_hf(found, dtypes)
    except ConversionError as error:
        # A part of the layers for multi-token prediction may be there, which nothing then reads.
        without = open_model(checkpoint.root, checkpoint.overrides).table
        try:
            assert without is not None
            without.check_hf(found, dtypes)
        except ConversionError:
            raise ConversionError(f"{checkpoint.root}: {error}") from error
    if table.family != family:
        raise ConversionError(
            f"{checkpoint.root} has the config.json of a {table.family} model, but weights that "
            f"were written as those of a {family} model: give it the config.json of their model"
        )


def _without_digests(root: Path) -> ConversionError:
    return ConversionError(
        f"{root} has no digests, so it cannot be checked: give a second checkpoint to "
        "compare it with"
    )
