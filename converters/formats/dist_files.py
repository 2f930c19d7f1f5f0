"""Reads Megatron-Core's sharded checkpoint format `torch_dist`: keys, and where their bytes are.

Only this module, dist_metadata.py and dist_writing.py know how `torch.distributed.checkpoint`
keeps tensors in files. Needs no process group and does not import Megatron-Core.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path

from megatron_policy.converters.architecture import Architecture
from megatron_policy.converters.files import strict_json
from megatron_policy.converters.files.contained import expanded, inside, read
from megatron_policy.converters.files.raw_files import RawFiles
from megatron_policy.converters.rows import Vocab
from megatron_policy.converters.rows.blocks import Shape
from megatron_policy.converters.rows.shards import unpadded_shape
from megatron_policy.converters.table import Entry
from megatron_policy.errors import ConfigError, ConversionError

from .dist_keys import OPTIMIZER_STATE, KeyedSlice, not_weights, readable
from .dist_metadata import METADATA, read_metadata
from .dist_records import data_offset
from .stored import Chunk, Stored, tiled

FORMAT = "metadata.json"
_MAX_BYTES = 2**20
"""Size limit of the files that say what a directory is."""
_LATEST = "latest_checkpointed_iteration.txt"

_MTP_LAYER = re.compile(r"mtp\.layers\.(\d+)\.")

# The two halves of a gated MLP have their own keys if Megatron-Core was told to write them so.
_HALVES = ("_w", "_v")


def find(path: str | Path) -> Path | None:
    """The directory of the sharded checkpoint: `path`, or the latest that a run saved in it.

    None if there is none; ConfigError if it looks like one but is incomplete.
    """
    root = expanded(path)
    if (root / METADATA).is_file() or b"sharded_backend" in _content(root / FORMAT):
        _check_format(root)
        return root
    if not (root / _LATEST).is_file():
        return inside(root, "release") if (root / "release" / FORMAT).is_file() else None
    latest = _content(inside(root, _LATEST)).decode(errors="replace").strip()
    if re.fullmatch(r"[0-9]{1,18}|release", latest) is None:
        raise ConfigError(f"{root / _LATEST} holds {latest[:40]!r}, not a checkpoint's name")
    name = latest if latest == "release" else f"iter_{int(latest):07d}"
    if not (root / name).is_dir():
        raise ConfigError(f"{root / _LATEST} names {latest!r}, but there is no {root / name}")
    _check_format(inside(root, name))
    return root / name


class DistReader:
    """The tensors of a sharded checkpoint by key.

    ConversionError when files are missing, truncated, damaged, or contradict each other.
    """

    def __init__(self, root: Path, files: RawFiles) -> None:
        self.root, self._files = root, files
        self.keys, self.objects = read_metadata(root)
        self._by_lead = cache(self._chunks_by_lead)

    @property
    def mtp_layers(self) -> int:
        """How many layers for multi-token prediction it has."""
        return len({found[1] for key in self.keys if (found := _MTP_LAYER.match(key))})

    def parameter(
        self, entry: Entry, arch: Architecture, prefix: str = ""
    ) -> tuple[str, Stored] | None:
        """The first key of the entry's parameter that the checkpoint has, and the parameter there.

        A vocabulary can have more rows in the file: padding, which is left out. None when the
        checkpoint has no such key, or nothing of that parameter there. `prefix` precedes the keys
        of an optimizer's state.
        """
        shape = unpadded_shape(entry.row, arch)
        padded = isinstance(entry.row, Vocab)
        for place in readable(entry, arch):
            place = replace(place, key=prefix + place.key)
            whole = {key: part for key, _, part in place.divide(shape)}
            halves = dict.fromkeys(place.key + half for half in _HALVES)
            keys = next((list(e) for e in (whole, halves) if e.keys() <= self.keys.keys()), None)
            if keys is None:
                continue
            chunks: list[Chunk] = []
            rows = 0
            for key in keys:
                held = self._shape_of(key, place)
                if place.sections and held != whole[key]:
                    raise self._misshapen(key, held, whole[key])
                own = self._by_lead(key, len(place.lead)).get(place.lead, ())
                chunks += [chunk.lower(rows) for chunk in own]
                rows += held[0] if held else 1
            found = (rows, *held[1:]) if held else held
            fits = found[:1] >= shape[:1] if padded else found[:1] == shape[:1]
            if found[1:] != shape[1:] or not fits:
                raise self._misshapen(keys[0], found, shape)
            if keys[0].startswith(OPTIMIZER_STATE):
                if not chunks and place.lead:
                    return None
                if not tiled(found, [(chunk.origin, chunk.sizes) for chunk in chunks]):
                    raise ConversionError(f"{self.root} has only a part of {keys[0]} {place.lead}")
            return keys[0], Stored(shape, self.keys[keys[0]].dtype, chunks)
        return None

    def object_bytes(self, name: str) -> bytes | None:
        """The record of an object, as stored in its file; None if there is none."""
        where = self.objects.get(name)
        return None if where is None else self._files.read_bytes(*where)

    def unused(self, entries: Iterable[Entry], arch: Architecture) -> list[str]:
        """The keys of weights that belong to none of the entries."""
        used = {
            key
            for entry in entries
            for place in readable(entry, arch)
            for key, *_ in place.divide(unpadded_shape(entry.row, arch))
        }
        used |= {key + half for key in used for half in _HALVES}
        return [key for key in self.weights() if key not in used]

    def weights(self) -> list[str]:
        """All keys of weights, without those of an optimizer or of counters."""
        return sorted(set(self.keys) - not_weights(self.keys))

    def _misshapen(self, key: str, found: Shape, shape: Shape) -> ConversionError:
        return ConversionError(
            f"misshapen: {key} in {self.root} is {list(found)} for each parameter, must be "
            f"{list(shape)}; is this the checkpoint of that config.json?"
        )

    def _shape_of(self, key: str, place: KeyedSlice) -> Shape:
        shape = self.keys[key].shape
        if shape[: len(place.axes)] != place.axes or len(shape) < len(place.axes):
            raise ConversionError(
                f"misshapen: {key} in {self.root} is {list(shape)}, must start with "
                f"{list(place.axes)}; is this the checkpoint of that config.json?"
            )
        return shape[len(place.axes) :]

    def _chunks_by_lead(self, key: str, depth: int) -> dict[Shape, list[Chunk]]:
        """The chunks of each parameter of a key, by its `depth` leading indices."""
        held = self.keys[key]
        made: dict[Shape, list[Chunk]] = {}
        for (origin, sizes), (path, offset, length) in zip(held.chunks, held.records, strict=True):
            start = data_offset(self._files, path, offset, length, held.dtype, sizes)
            inner = math.prod(sizes[depth:]) * held.dtype.itemsize
            for number in range(math.prod(sizes[:depth])):
                lead: list[int] = []
                rest = number
                for at, n in reversed(list(zip(origin[:depth], sizes[:depth], strict=True))):
                    rest, index = divmod(rest, n)
                    lead.insert(0, at + index)
                chunk = Chunk(path, start + number * inner, origin[depth:], sizes[depth:])
                made.setdefault(tuple(lead), []).append(chunk)
        return made


def _content(path: Path) -> bytes:
    """The file's content; empty if there is no such file or it is too large for what it is."""
    try:
        return read(path, _MAX_BYTES)
    except OSError:
        return b""


def _check_format(root: Path) -> None:
    for name in (FORMAT, METADATA):
        if not (root / name).is_file():
            raise ConfigError(f"{root} has no {name}: the checkpoint is incomplete")
        inside(root, name)
    try:
        backend = strict_json.parse(read(root / FORMAT, _MAX_BYTES))["sharded_backend"]
    except OSError as error:
        raise ConversionError(f"{root / FORMAT} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConversionError(f"{root / FORMAT} is unreadable: {error!r:.200}") from error
    if backend != "torch_dist":
        raise ConfigError(
            f"{root / FORMAT} says that this is a {backend!r:.100} checkpoint; only 'torch_dist' "
            "can be read"
        )
