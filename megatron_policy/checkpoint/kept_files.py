"""The files beside the weights that checkpoints get, as they were when the policy was created.

Their directory can change or go during a training: a hub's cache is cleaned, a node's disk emptied.
Copies are kept in a temporary file without a name, which takes no memory, which nobody who clears
out temporary files can remove, and which the system frees when the process ends, however it ends.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megatron_policy.converters.files.publishing import flush, naming
from megatron_policy.converters.formats.side_files import SideFiles, write_side_files
from megatron_policy.errors import ConfigError
from megatron_policy.formats.digests import STEP, Digest


class _Span(NamedTuple):
    first: int
    length: int


class KeptFiles:
    """Copies of `files`, with those of `tokenizer` in place of the model's own, see
    `write_side_files`. ConfigError where the temporary directory cannot take them.
    """

    def __init__(self, files: SideFiles, tokenizer: Any = None) -> None:
        try:
            handle, self._spans = _pack(files, tokenizer)
        except OSError as error:
            raise ConfigError(
                f"copies of the files beside the weights ({files.nbytes:,} bytes) cannot be kept "
                f"in {tempfile.gettempdir()}: {error.strerror or error}; set the environment "
                "variable TMPDIR to a directory with room for them"
            ) from error
        self._handle = handle
        self.close = weakref.finalize(self, os.close, handle)
        """Give the space back; nothing can be written afterwards."""

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return sum(span.length for span in self._spans.values())

    def write(self, directory: Path) -> dict[str, str]:
        """Write all of them, wait until they are on the disk, and return their digests by relative
        name.
        """
        digests: dict[str, str] = {}
        for name, (first, length) in self._spans.items():
            path, digest = directory / name, Digest()
            path.parent.mkdir(parents=True, exist_ok=True)
            with naming(path), path.open("wb") as file:
                for offset in range(0, length, STEP):
                    # Not by a position that threads would share.
                    part = os.pread(self._handle, min(STEP, length - offset), first + offset)
                    digest.update(part)
                    file.write(part)
                flush(file)
            digests[name] = digest.text()
        return digests


def _pack(files: SideFiles, tokenizer: Any) -> tuple[int, Mapping[str, _Span]]:
    """A descriptor of a file with the contents of all, one after another, and where each is."""
    spans: dict[str, _Span] = {}
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryFile() as kept:
        folder = Path(name)
        write_side_files(files, folder, tokenizer)
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            first = kept.tell()
            with path.open("rb") as content:
                shutil.copyfileobj(content, kept)
            spans[path.relative_to(folder).as_posix()] = _Span(first, kept.tell() - first)
        kept.flush()
        return os.dup(kept.fileno()), spans
