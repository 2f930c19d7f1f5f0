"""What a converted checkpoint says of itself: where it comes from, and a digest of each byte.

Knows nothing of how checkpoints are converted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_policy.conversion.digests import UNSEALED, is_sealed, sealed
from megatron_policy.conversion.tensors import Info
from megatron_policy.converters.hf_files import MANIFEST
from megatron_policy.errors import ConversionError

FORMAT = 1
MAPPING = 1
"""Counts changes after which the same HF tensors would lie elsewhere in Megatron-Core's."""


@dataclass(frozen=True)
class Manifest:
    """Digests of tensors under their HF names and of files, and the origin as plain values."""

    tensors: Mapping[str, tuple[Info, str]]
    files: Mapping[str, str]
    """Relative path -> digest of the bytes that are no tensor's own."""
    origin: Mapping[str, Any]
    """package, direction, source, family, config."""
    step: int | None = None
    """Optimizer steps behind the weights, where a policy wrote them."""

    def encoded(self) -> bytes:
        """The file; its first value is a digest of the rest of it."""
        content = {
            "digest": UNSEALED,
            "format": FORMAT,
            "mapping": MAPPING,
            **self.origin,
            **({} if self.step is None else {"step": self.step}),
            "files": dict(self.files),
            "tensors": {
                name: [str(info.dtype).removeprefix("torch."), list(info.shape), digest]
                for name, (info, digest) in self.tensors.items()
            },
        }
        return sealed(json.dumps(content, indent=1, ensure_ascii=False).encode())


def read_manifest(root: Path) -> Manifest | None:
    """The manifest of a checkpoint, None if it has none; ConversionError if it is damaged."""
    path = root / MANIFEST
    if not path.is_file():
        return None
    try:
        text = path.read_bytes()
        content = json.loads(text)
        if not is_sealed(text, content["digest"]):
            raise ValueError("its content contradicts its digest")
        if content["format"] != FORMAT:
            raise ValueError(f"it is of format {content['format']}, this version reads {FORMAT}")
        return Manifest(
            {name: _tensor(*entry) for name, entry in content["tensors"].items()},
            content["files"],
            {key: content[key] for key in ("package", "direction", "source", "family", "config")},
            int(content["step"]) if "step" in content else None,
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConversionError(
            f"{path} is damaged: {error}. Restore it, or remove it to do without digests."
        ) from error


def _tensor(dtype: str, shape: list[int], digest: str) -> tuple[Info, str]:
    return Info(getattr(torch, dtype), tuple(shape)), digest
