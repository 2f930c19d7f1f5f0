"""Compares the files of a training checkpoint with the digests in its manifest."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import groupby, pairwise
from pathlib import Path
from threading import Lock

from megatron_policy.checkpoint.manifest import NAME, REMEDY, CheckpointManifest, read
from megatron_policy.converters.files.locking import opened
from megatron_policy.converters.files.raw_files import RawFiles
from megatron_policy.converters.formats.dist_files import DistReader
from megatron_policy.errors import CheckpointError, ConfigError, ConversionError
from megatron_policy.formats.digests import Digest

Share = tuple[str, int, int, str]
"""(file, offset, length, digest) of a record."""

SHOWN = 5
"""Problems that are named; the search stops after this many."""

_STEP = 2**20
"""Bytes read at a time: few enough to be still in the CPU's cache when they are digested."""


def verify(root: Path, progress: Callable[[int, int], None] | None = None) -> CheckpointManifest:
    """The checkpoint's manifest if every byte matches it; otherwise CheckpointError."""
    manifest = read(root)
    check_files(root, manifest)
    verify_records(root, records_share(manifest, 0, 1), progress)
    return manifest


def check_files(root: Path, manifest: CheckpointManifest) -> None:
    """CheckpointError if a file is missing or too short, or a file without records is damaged."""
    problems = []
    for name, records in manifest.records.items():
        path = root / name
        end = max((record.offset + record.length for record in records), default=0)
        if not path.is_file():
            problems.append(f"{root} lacks {name}, which its {NAME} names")
        elif (size := path.stat().st_size) < end:
            problems.append(
                f"{path} is truncated: it has {size} bytes, but its records end at {end}"
            )
    buffer = memoryview(bytearray(_STEP))
    for name, stated in manifest.files.items():
        path = root / name
        if not path.is_file():
            problems.append(f"{root} lacks {name}, which its {NAME} names")
            continue
        try:
            with opened(path) as handle:
                if _digest(handle, 0, size := os.fstat(handle).st_size, buffer) != stated:
                    words = f"its {size} bytes contradict their digest in {NAME}"
                    problems.append(f"{path} is damaged: {words}")
        except OSError as error:
            problems.append(_unreadable(path, error))
    _raise(problems)


def records_share(manifest: CheckpointManifest, part: int, parts: int) -> list[Share]:
    """The records that `part` of `parts` checks: equally many bytes each, file after file.

    Each record is in exactly one part: the one that contains its middle.
    """
    total, at = manifest.nbytes, 0
    share = []
    for name, records in manifest.records.items():
        for offset, length, digest in records:
            middle = 2 * at + length
            if min(parts - 1, middle * parts // (2 * total) if total else 0) == part:
                share.append((name, offset, length, digest))
            at += length
    return share


def verify_records(
    root: Path,
    records: Sequence[Share],
    progress: Callable[[int, int], None] | None = None,
    threads: int = 1,
) -> None:
    """CheckpointError naming the records whose bytes are not those that were written.

    `progress` is called with bytes done and total bytes after each record.
    """
    count = _Count(sum(length for _, _, length, _ in records), progress)
    ends = [len(records) * number // threads for number in range(threads + 1)]
    shares = [records[first:end] for first, end in pairwise(ends)]
    with ThreadPoolExecutor(threads) as pool:
        found = pool.map(lambda share: _verify(root, share, count), shares)
        _raise([problem for problems in found for problem in problems])


class _Count:
    """Counts the bytes done by all threads, and reports them."""

    def __init__(self, total: int, progress: Callable[[int, int], None] | None) -> None:
        self._total, self._progress, self._done, self._lock = total, progress, 0, Lock()

    def add(self, length: int) -> None:
        if self._progress is not None:
            with self._lock:
                self._done += length
                self._progress(self._done, self._total)


def _verify(root: Path, records: Sequence[Share], count: _Count) -> list[str]:
    """Describe the first few of these records that are damaged."""
    buffer = memoryview(bytearray(_STEP))
    problems: list[str] = []
    for name, group in groupby(records, key=lambda record: record[0]):
        try:
            with opened(root / name) as handle:
                for _, offset, length, stated in group:
                    found = _digest(handle, offset, length, buffer)
                    if found != stated:
                        problems.append(_wrong(root, name, offset, length, found is None))
                        if len(problems) >= SHOWN:
                            return problems
                    count.add(length)
        except OSError as error:
            problems.append(_unreadable(root / name, error))
    return problems


def _digest(handle: int, offset: int, length: int, buffer: memoryview) -> str | None:
    """The digest of these bytes of an open file; None if the file is too short."""
    digest, end = Digest(), offset + length
    while offset < end:
        got = os.preadv(handle, [buffer[: end - offset]], offset)
        if not got:
            return None
        digest.update(buffer[:got])
        offset += got
    return digest.text()


def _unreadable(path: Path, error: OSError) -> str:
    return f"{path} cannot be read: {error.strerror}"


def _wrong(root: Path, name: str, offset: int, length: int, ended: bool) -> str:
    what = f"{length} bytes from {offset} on"
    # The key of the tensor there, if the checkpoint is still readable.
    with suppress(ConversionError, ConfigError), RawFiles() as files:
        for key, held in DistReader(root, files).keys.items():
            if any((path.name, first) == (name, offset) for path, first, _ in held.records):
                what = f"{length} bytes from {offset} on, which hold {key},"
    if ended:
        return f"{root / name} is truncated: it ends within the {what.rstrip(',')}"
    return f"{root / name} is damaged: the {what} contradict their digest in {NAME}"


def _raise(problems: Sequence[str]) -> None:
    if len(problems) > SHOWN:
        problems = [*problems[:SHOWN], f"and {len(problems) - SHOWN} more"]
    if problems:
        raise CheckpointError("\n".join(problems) + f". {REMEDY}")
