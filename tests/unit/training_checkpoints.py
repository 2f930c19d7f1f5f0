"""Training checkpoints of three small tensors, written here as a policy's save would write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megatron_policy.checkpoint import tracker
from megatron_policy.checkpoint.manifest import NAME, ByteRange, CheckpointManifest
from megatron_policy.converters.formats.dist_keys import KeyedSlice
from megatron_policy.converters.formats.dist_writing import (
    Parameter,
    framing_of,
    lay_out,
    small_files,
)
from megatron_policy.formats.digests import digest_bytes

SHAPES = {"one.weight": (5, 3), "two.weight": (7, 4), "three.bias": (6,)}


def make_save(root: Path, step: int, **fields: Any) -> CheckpointManifest:
    """A complete directory of that step in `root`, without a tracker; `fields` of its manifest."""
    place = tracker.directory(root, step)
    (place / "hf").mkdir(parents=True)
    (place / "hf" / "config.json").write_text('{"model_type": "qwen2"}')
    parameters = [Parameter(KeyedSlice(k, (), ()), torch.float32, s) for k, s in SHAPES.items()]
    layout = lay_out(parameters, (), 4000)
    contents = {path: bytearray(step % 251 for _ in range(n)) for path, n in layout.sizes.items()}
    for path, offset, around in framing_of(layout):
        contents[path][offset : offset + len(around)] = around
    for name, content in small_files(layout, {"step": step}).items():
        (place / name).write_bytes(content)
    files = [path for path in sorted(place.rglob("*")) if path.is_file()]
    for path, content in contents.items():
        (place / path).write_bytes(content)
    records: dict[str, list[ByteRange]] = {}
    for record in layout.records:
        held = contents[record.path][record.offset : record.offset + record.length]
        entry = ByteRange(record.offset, record.length, digest_bytes(bytes(held)))
        records.setdefault(record.path.name, []).append(entry)
    values: dict[str, Any] = {
        "id": f"{step:032x}",
        "step": step,
        "contains": ("weights", "optimizer"),
        "optimizer_elsewhere": False,
        "versions": {"megatron_policy": "0.1.0", "torch": "2.9"},
        "layout": {"tp": 2, "cp": 1, "ep": 1, "dp": 1, "pp": 1, "vpp": None},
        "family": "qwen2",
        "config": "0123456789abcdef",
        "tensors": {key: (torch.float32, shape) for key, shape in SHAPES.items()},
        "records": {name: tuple(entries) for name, entries in records.items()},
        "files": {str(path.relative_to(place)): digest_bytes(path.read_bytes()) for path in files},
    }
    manifest = CheckpointManifest(**values | fields)
    (place / NAME).write_bytes(manifest.encode())
    return manifest


def flip(path: Path, at: int) -> None:
    """Change one bit of the byte there."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
