"""Carries a conversion out: blocks go from file to file through one buffer, with digests."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_policy.convert.blockwise import LEAST_BYTES, BlockBuffer, cut
from megatron_policy.convert.open_checkpoint import HF, PEFT, OpenCheckpoint, damaged_tensor
from megatron_policy.convert.plan import (
    DEFAULT_MAX_MEMORY,
    DEFAULT_MAX_SHARD_SIZE,
    Prepared,
    prepare,
    side_path,
)
from megatron_policy.convert.planned import ConversionPlan
from megatron_policy.convert.training_checkpoint import CHECKPOINT, check_bytes, encoded_manifest
from megatron_policy.converters.files import strict_json
from megatron_policy.converters.files.publishing import (
    check_replaceable,
    check_room,
    new_directory,
    not_written,
)
from megatron_policy.converters.formats.hf_config import (
    CONFIG,
)
from megatron_policy.converters.formats.hf_files import copy_differs
from megatron_policy.converters.formats.hf_names import MANIFEST
from megatron_policy.converters.formats.hf_overrides import (
    encoded_like,
    with_overrides,
    without_quantisation,
)
from megatron_policy.converters.table import Table
from megatron_policy.dtypes import name_dtype
from megatron_policy.errors import ConversionError
from megatron_policy.formats import digests
from megatron_policy.formats.digests import Digest
from megatron_policy.formats.manifest import DirectoryManifest, describe_origin

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Report:
    """What a conversion did."""

    plan: ConversionPlan
    digest: str
    """Of all tensors: equal for checkpoints with the same content."""

    @property
    def had_digests(self) -> bool:
        """Whether the source came with digests, with which its bytes were compared."""
        return self.plan.has_digests


def convert(
    source: str | Path,
    destination: str | Path,
    to: str,
    dtype: torch.dtype | str | None = None,
    max_memory: int = DEFAULT_MAX_MEMORY,
    max_shard_size: int = DEFAULT_MAX_SHARD_SIZE,
    overwrite: bool = False,
    progress: Progress | None = None,
    config: str | Path | None = None,
    base: str | Path | None = None,
    merge: bool = False,
    hf_config_overrides: Mapping[str, Any] | None = None,
) -> Report:
    """Convert an HF checkpoint to Megatron-Core's `torch_dist` (to="mcore"), or back (to="hf").
    Adapters alone are converted between a directory of PEFT and a training checkpoint; with
    `merge` they are added to their `base`, and the whole model is written.

    At most `max_memory` bytes of tensors are held. `dtype` casts all tensors except those that
    keep their own. `destination` appears when it is complete and on the disk, or not at all; an
    existing one is replaced only if `overwrite`, and only once the new one is complete. `config`
    is the config.json for a Megatron-Core checkpoint that does not have its own, its directory, or
    the model's name on the hub. `base` is the model that adapters were trained on, a directory or a
    name on the hub; None: the directory that they name. `hf_config_overrides` gives fields of an HF
    source's config.json other values, null to leave one out. `progress` gets bytes done and in
    total.
    ConfigError for a request that cannot be met, ConversionError for a source that is damaged or
    not a model as its config says, ExportError when the destination cannot be written.
    """
    given = (to, dtype, max_memory, max_shard_size, config, base, merge, hf_config_overrides)
    with prepare(source, destination, *given) as ready:
        final = check_destination(ready.plan, overwrite)
        for root in filter(None, (ready.source.root, ready.source.merged)):
            check_bytes(root)
        try:
            with new_directory(final, overwrite) as partial:
                ready.writer.root = partial
                manifest = _write(ready, progress or (lambda done, total: None))
                ready.writer.close()
        except OSError as error:
            raise not_written(final, error, ready.plan.bytes_written) from error
        return Report(ready.plan, content_digest(manifest))


def check_destination(plan: ConversionPlan, overwrite: bool) -> Path:
    """The absolute path that a conversion will make; ConfigError if something else is there that
    `overwrite` does not replace, ExportError if the disk is too full.
    """
    final = check_replaceable(plan.destination, overwrite)
    check_room(final, plan.bytes_written)
    return final


def content_digest(manifest: DirectoryManifest) -> str:
    """One digest for all tensors, independent of the format."""
    lines = (
        f"{name} {info.dtype} {list(info.shape)} {digest}\n"
        for name, (info, digest) in sorted(manifest.tensors.items())
    )
    return digests.digest_bytes("".join(lines).encode())


def _write(ready: Prepared, progress: Progress) -> DirectoryManifest:
    """Write all files into the writer's root, the manifest last, and flush them to the disk."""
    target, writer = ready.target, ready.writer
    check_copies(ready.source, ready.table)
    for path, offset, content in target.framing:
        writer.write(path, offset, [memoryview(content)])
    read, written = _write_tensors(ready, progress)
    files = {
        path.as_posix(): digests.digest_file(writer, path, size, target.extents.get(path, ()))
        for path, size in target.sizes.items()
    }
    files |= _copy_side_files(ready)
    others = {side_path(n, ready.plan.to): c for n, c in ready.source.contents.items()}
    for name, content in {**target.small, **others}.items():
        files[name] = _write_file(ready, name, content)
    tensors = {name: (ready.infos[name], digest) for name, digest in written.items()}
    source = {name: (ready.source.infos[name], digest) for name, digest in read.items()}
    origin = _origin(ready, content_digest(DirectoryManifest(source, {}, {})))
    manifest = DirectoryManifest(tensors, files, origin, ready.source.step, ready.source.overrides)
    name, content, spec = MANIFEST, manifest.encode(), ready.source.spec
    if spec is not None and target.layout is not None:
        step = ready.source.step or 0
        name = CHECKPOINT
        content = encoded_manifest(writer, target.layout, ready.table, spec, files, step)
    _write_file(ready, name, content)
    writer.sync([*target.sizes, *map(Path, files), Path(name)])
    return manifest


def _write_tensors(ready: Prepared, progress: Progress) -> tuple[dict[str, str], dict[str, str]]:
    """Convert all tensors and return their digests, as read and as written."""
    buffer, done = BlockBuffer(ready.max_memory), 0
    total = sum(ready.source.infos[name].nbytes for name in ready.blocks)
    stated = ready.source.manifest.tensors if ready.source.manifest else {}
    read: dict[str, str] = {}
    written: dict[str, str] = {}
    for name, blocks in ready.blocks.items():
        before = Digest()
        after = Digest() if len(blocks.copies) > 1 else before
        for first, (values, *cast), scratch in buffer.blocks(blocks):
            ready.source.tensors.read(name, first, values, scratch)
            before.update(values)
            for copy in cast:
                copy.copy_(values)
                # Of these dtypes only float16 is narrow enough for weights to leave its range.
                lost = copy.dtype == torch.float16 and torch.isinf(copy).sum()
                if lost and lost > torch.isinf(values).sum():
                    raise ConversionError(
                        f"{name} has values beyond the range of float16; cast to bfloat16"
                    )
                after.update(copy)
            ready.target.tensors.write(name, first, cast[0] if cast else values, scratch)
            done += values.nbytes
            progress(done, total)
        read[name], written[name] = before.text(), after.text()
        if name in stated and stated[name][1] != read[name]:
            raise damaged_tensor(ready.source.root, name)
    return read, written


def _copy_side_files(ready: Prepared) -> dict[str, str]:
    """Copy the files that only Hugging Face has, byte for byte, and return their digests."""
    files = {}
    for name, path in ready.source.side_files.items():
        inside = side_path(name, ready.plan.to)
        # A config.json beside adapters is their base's, and stays what it is.
        if name == CONFIG and ready.source.adapters is None:
            config = _config(ready, path.read_bytes())
            if config is not None:
                files[inside] = _write_file(ready, inside, config)
                continue
        digest, size = Digest(), digests.find_size(path)
        (ready.writer.root / inside).parent.mkdir(parents=True, exist_ok=True)
        for offset in range(0, max(size, 1), digests.STEP):
            part = ready.reader.read_bytes(path, offset, min(digests.STEP, size - offset))
            ready.writer.write(Path(inside), offset, [memoryview(part)])
            digest.update(part)
        files[inside] = digest.text()
    return files


def _config(ready: Prepared, content: bytes) -> bytes | None:
    """The content of config.json as it describes what is written, if not as it is."""
    changed, fields = content, strict_json.parse(content, finite=False)
    if ready.source.quantised:
        changed = without_quantisation(changed)
    if any(fields.get(name) != value for name, value in ready.source.overrides.items()):
        changed = with_overrides(changed, ready.source.overrides)
    if any(tensor.dtype != tensor.source_dtype for tensor in ready.plan.tensors):
        sizes: Counter[torch.dtype] = Counter()
        for info in ready.infos.values():
            sizes[info.dtype] += info.nbytes
        # The dtype in which most bytes of weights are written, under the name config.json has.
        (main, _), *_ = sizes.most_common(1)
        fields = strict_json.parse(changed, finite=False)
        for name in {"dtype", "torch_dtype"} & fields.keys() or {"torch_dtype"}:
            fields[name] = name_dtype(main)
        changed = encoded_like(changed, fields)
    return None if changed is content else changed


def _write_file(ready: Prepared, name: str, content: bytes) -> str:
    (ready.writer.root / name).parent.mkdir(parents=True, exist_ok=True)
    ready.writer.write(Path(name), 0, [memoryview(content)])
    return digests.digest_bytes(content)


def _origin(ready: Prepared, content: str) -> dict[str, Any]:
    root = Path(os.path.realpath(ready.source.root))
    revision = root.name if root.parent.name == "snapshots" else None
    kind, merged, adapters = ready.source.kind, ready.source.merged, ready.source.adapters
    to = PEFT if adapters is not None and ready.plan.to == HF else ready.plan.to
    if adapters is None:
        written = ready.source.side_files[CONFIG].read_bytes()
        config = strict_json.parse(written, finite=False)
    else:
        config = dict(adapters.config)
    return describe_origin(
        f"{kind}{' + adapters' if merged else ''} -> {to}",
        {"path": str(root), "revision": revision, "content": content},
        ready.plan.family,
        config,
        adapters=None if merged is None else os.path.realpath(merged),
    )


def check_copies(checkpoint: OpenCheckpoint, table: Table) -> None:
    """Raise ConversionError naming a tied copy that differs from its original."""
    for name, original in table.copies().items():
        known = name in checkpoint.infos and original in checkpoint.infos
        if known and not _are_equal(checkpoint, name, original):
            raise ConversionError(f"{checkpoint.root}: {copy_differs(name, original)}")


def _are_equal(checkpoint: OpenCheckpoint, name: str, original: str) -> bool:
    one, other = checkpoint.infos[name], checkpoint.infos[original]
    if one.shape != other.shape:
        return False
    plan = cut(one, (one.dtype, other.dtype), 0, LEAST_BYTES)
    none = torch.empty(0, dtype=torch.uint8)
    for first, (left, right), _ in BlockBuffer(LEAST_BYTES).blocks(plan):
        checkpoint.tensors.read(name, first, left, none)
        checkpoint.tensors.read(original, first, right, none)
        if left.dtype != right.dtype:
            left, right = left.double(), right.double()
        if not torch.equal(left, right):
            return False
    return True
