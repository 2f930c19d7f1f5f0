"""The manifest of a training checkpoint: its contents, its model, and its digests."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from platform import python_version
from typing import Any, NamedTuple, NoReturn

import torch

from megatron_policy.converters.architecture.plain_values import plain
from megatron_policy.converters.files import contained, strict_json
from megatron_policy.converters.files.contained import how_to_convert
from megatron_policy.converters.table import Table
from megatron_policy.dtypes import name_dtype
from megatron_policy.errors import CheckpointError, ConversionError
from megatron_policy.formats.digests import UNSEALED, digest_bytes, is_sealed, seal
from megatron_policy.formats.manifest import OVERRIDES, count, entries, form, inside
from megatron_policy.parallel.topology import Topology
from megatron_policy.version import VERSION

NAME = "checkpoint.json"
FORMAT = 1
"""Counts changes that older versions of this package cannot read."""

WEIGHTS, OPTIMIZER, RANDOM = "weights", "optimizer", "random"
"""What a checkpoint can contain."""

MAX_BYTES = 2**30
"""Size limit of the file: more than a manifest with a million records needs."""

REMEDY = "Restore it from a copy, or load another checkpoint."

Shape = tuple[int, ...]


class ByteRange(NamedTuple):
    """A run of bytes of a file, and their xxh3 digest."""

    offset: int
    length: int
    digest: str


@dataclass(frozen=True)
class CheckpointManifest:
    """One directory of one save; those of the weights and the optimizer have the same `id`."""

    id: str
    step: int
    """Optimizer steps taken before the save."""
    contains: tuple[str, ...]
    """Some of WEIGHTS, OPTIMIZER and RANDOM."""
    optimizer_elsewhere: bool
    """Whether the optimizer's state is in another directory."""
    versions: Mapping[str, str]
    """Versions of the software that wrote it."""
    layout: Mapping[str, int | None]
    """tp, cp, ep, dp, pp, vpp."""
    family: str
    config: str
    """`digest_of` of the model's architecture."""
    tensors: Mapping[str, tuple[torch.dtype, Shape]]
    """(dtype, unsharded shape) of each key."""
    records: Mapping[str, tuple[ByteRange, ...]]
    """Records of each file with tensors, in the order of their offsets."""
    files: Mapping[str, str]
    """Digests of all other files, by relative name."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the model's config.json that were given other values in training."""
    root: Path | None = field(default=None, compare=False)
    """Where it was read from; not written."""

    def encode(self) -> bytes:
        """The content of the file; its first value is a digest of the rest."""
        content = {
            "digest": UNSEALED,
            "format": FORMAT,
            "id": self.id,
            "step": self.step,
            "contains": self.contains,
            "optimizer_elsewhere": self.optimizer_elsewhere,
            "versions": dict(self.versions),
            "layout": dict(self.layout),
            "model": {
                "family": self.family,
                "config": self.config,
                **({OVERRIDES: dict(self.overrides)} if self.overrides else {}),
            },
            "tensors": {
                key: (name_dtype(dtype), shape) for key, (dtype, shape) in self.tensors.items()
            },
            "records": dict(self.records),
            "files": dict(self.files),
        }
        return seal(("{\n" + ",\n".join(_lines(content)) + "\n}\n").encode())

    @property
    def nbytes(self) -> int:
        """Total bytes of all records."""
        return sum(record.length for records in self.records.values() for record in records)


class NoOptimizer(CheckpointError):
    """There is no state for this policy's optimizer, which may start afresh. Damaged or unreadable
    state is a plain CheckpointError.
    """


def read(directory: str | Path) -> CheckpointManifest:
    """The manifest of a checkpoint's directory.

    CheckpointError if it is missing, unreadable, damaged, or of a newer version of this package.
    """
    root = Path(directory)
    path = root / NAME
    try:
        text = contained.read(contained.inside(root, NAME), MAX_BYTES)
    except ConversionError as error:
        raise CheckpointError(str(error)) from error
    except (FileNotFoundError, NotADirectoryError) as error:
        command = how_to_convert(root)
        made = f": a directory with {NAME} and .distcp files"
        if command:
            made = f", or start from what {command} makes of it: policy.model_name"
        raise CheckpointError(
            f"{path} is missing: is the checkpoint complete, and was it written by this package? "
            f"Load another checkpoint{made}"
        ) from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    content = _unseal(path, text)
    try:
        return _parse(content, root)
    except KeyError as error:
        _refuse(path, f"it lacks {error}", error)
    except (TypeError, ValueError, AttributeError) as error:
        _refuse(path, str(error), error)


def check_model(manifest: CheckpointManifest, family: str, config: str) -> None:
    """CheckpointError unless it is of that family and its architecture has that digest."""
    where = manifest.root or "the checkpoint"
    if manifest.family != family:
        raise CheckpointError(
            f"{where} is of a {manifest.family} model, but this policy's is {family}: "
            "load a checkpoint of this model, or make the policy from its config"
        )
    if manifest.config != config:
        raise CheckpointError(
            f"{where} is of a different {family} model from this policy's: their config.json "
            "differ (with policy.hf_config_overrides), and the checkpoint's is in its directory "
            "hf/, or their megatron_cfg.mtp_num_layers or reward_model_cfg differ; load a "
            "checkpoint of this model"
        )


def _unseal(path: Path, text: bytes) -> dict[str, Any]:
    try:
        content = strict_json.parse(text, finite=False)  # overrides may have infinities
        kept = is_sealed(text, content["digest"])
        number, versions = content["format"], content.get("versions")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        _refuse(path, f"it is not a manifest ({error!r:.200})", error)
    if type(number) is int and number > FORMAT:
        newer = isinstance(versions, dict) and versions.get("megatron_policy")
        raise CheckpointError(
            f"{path} was written by megatron-policy {newer or 'of a newer version'}: install that "
            f"or a newer one (it is of format {number}, {VERSION} reads {FORMAT})"
            + ("" if kept else "; or it is damaged: its content contradicts its digest")
        )
    if not kept:
        _refuse(path, "its content contradicts its digest")
    if number != FORMAT:
        _refuse(path, f"its format is {number!r}, which no version writes")
    assert isinstance(content, dict)
    return content


def _refuse(path: Path, what: str, error: Exception | None = None) -> NoReturn:
    raise CheckpointError(f"{path} is damaged: {what}. {REMEDY}") from error


def _parse(content: Mapping[str, Any], root: Path) -> CheckpointManifest:
    model = content["model"]
    return CheckpointManifest(
        id=str(content["id"]),
        step=count(content["step"]),
        contains=tuple(map(str, content["contains"])),
        optimizer_elsewhere=bool(content["optimizer_elsewhere"]),
        versions={name: str(number) for name, number in entries(content, "versions")},
        layout={
            axis: None if size is None else count(size) for axis, size in entries(content, "layout")
        },
        family=str(model["family"]),
        config=str(model["config"]),
        tensors={key: form(*entry) for key, entry in entries(content, "tensors")},
        records={
            inside(root, name): tuple(_record(*each) for each in runs)
            for name, runs in entries(content, "records")
        },
        files={inside(root, name): str(digest) for name, digest in entries(content, "files")},
        overrides=dict(entries(model, OVERRIDES)) if OVERRIDES in model else {},
        root=root,
    )


def _record(offset: int, length: int, digest: str) -> ByteRange:
    if type(offset) is not int or type(length) is not int or not 0 <= offset + length < 2**63:
        raise ValueError(f"a record has {length!r:.40} bytes from {offset!r:.40} on")
    if offset < 0 or length < 0:
        raise ValueError(f"a record has {length} bytes from {offset} on")
    return ByteRange(offset, length, str(digest))


def _lines(content: Mapping[str, Any]) -> Iterator[str]:
    """One line for each value, and one for each entry of a value that is a mapping."""
    for key, value in content.items():
        if isinstance(value, dict) and value:
            entries = (f"  {_json(name)}: {_json(entry)}" for name, entry in value.items())
            yield f" {_json(key)}: {{\n" + ",\n".join(entries) + "\n }"
        else:
            yield f" {_json(key)}: {_json(value)}"


def _json(value: Any) -> str:
    return strict_json.encoded(value).decode()


def digest_of(architecture: Any) -> str:
    """A digest of a model's architecture, a (nested) dataclass, without fields at their default
    and those that do not count when two of them are compared.

    So a field that a later version adds with a default does not change the digest.
    """
    return digest_bytes(json.dumps(plain(architecture), sort_keys=True).encode())


def identify(table: Table, topology: Topology) -> dict[str, Any]:
    """The fields of a manifest that say what writes a checkpoint, on which ranks and of which
    model.
    """
    return {
        "versions": current_versions(),
        "layout": layout_of(topology),
        "family": table.family,
        "config": digest_of(table.architecture),
    }


def layout_of(topology: Topology) -> dict[str, int]:
    """The sizes of the topology's axes by name."""
    names = ("tp", "cp", "ep", "dp", "pp", "vpp")
    sizes = {name: getattr(topology, name) for name in names}
    return sizes if topology.expert_tp == topology.tp else sizes | {"etp": topology.expert_tp}


def current_versions() -> dict[str, str]:
    """Versions of this package and of what it writes checkpoints with."""
    return {
        "megatron_policy": VERSION,
        "megatron_core": version("megatron-core"),
        "torch": str(torch.__version__),
        "python": python_version(),
    }
