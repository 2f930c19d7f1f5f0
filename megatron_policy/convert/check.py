"""Checks a checkpoint of either format against the digests in its MANIFEST."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron_policy.convert.blockwise import BlockBuffer, check_memory
from megatron_policy.convert.open_checkpoint import damaged_tensor, digest_of, open_checkpoint
from megatron_policy.convert.plan import DEFAULT_MAX_MEMORY
from megatron_policy.converters.files.raw_files import RawFiles
from megatron_policy.converters.formats.dist_files import find
from megatron_policy.converters.formats.hf_names import MANIFEST
from megatron_policy.errors import ConversionError
from megatron_policy.formats.manifest import DirectoryManifest, read_manifest


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
    """Compare a checkpoint with its own digests; ConversionError if it has none.

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


def _without_digests(root: Path) -> ConversionError:
    return ConversionError(
        f"{root} has no digests, so it cannot be checked: give a second checkpoint to "
        "compare it with"
    )
