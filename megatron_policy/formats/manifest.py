"""The manifest of a converted checkpoint: its origin, and digests that cover every byte; and values
that all manifests have.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron_policy.converters.files import contained, strict_json
from megatron_policy.converters.formats.hf_names import MANIFEST
from megatron_policy.dtypes import dtype_named, name_dtype
from megatron_policy.errors import ConversionError
from megatron_policy.formats.digests import UNSEALED, is_sealed, seal
from megatron_policy.formats.tensors import Info
from megatron_policy.version import VERSION

FORMAT = 1
MAX_BYTES = 2**30
"""Size limit of the file: more than a manifest with a million tensors needs."""
OVERRIDES = "hf_config_overrides"
MAPPING = 1
"""Counts changes that map HF tensors to other places in Megatron-Core's parameters."""


@dataclass(frozen=True)
class DirectoryManifest:
    """Digests of tensors by HF name and of files, and the origin as plain values."""

    tensors: Mapping[str, tuple[Info, str]]
    files: Mapping[str, str]
    """Relative path -> digest of the bytes that belong to no tensor."""
    origin: Mapping[str, Any]
    """package, direction, source, family, config."""
    step: int | None = None
    """Optimizer steps taken so far, if a policy wrote the weights."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the model's config.json that were given other values in training."""

    def encode(self) -> bytes:
        """The content of the file; its first value is a digest of the rest."""
        content = {
            "digest": UNSEALED,
            "format": FORMAT,
            "mapping": MAPPING,
            **self.origin,
            **({} if self.step is None else {"step": self.step}),
            **({OVERRIDES: dict(self.overrides)} if self.overrides else {}),
            "files": dict(self.files),
            "tensors": {
                name: [name_dtype(info.dtype), list(info.shape), digest]
                for name, (info, digest) in self.tensors.items()
            },
        }
        return seal(strict_json.encoded(content, indent=1))


def describe_origin(
    direction: str,
    source: Mapping[str, Any],
    family: str,
    config: Any,
    adapters: str | None = None,
) -> dict[str, Any]:
    """The origin of a directory: this package has written it in that `direction` from `source`, of
    a model of that family and config, with `adapters` merged, if any were.
    """
    return {
        "package": f"megatron-policy {VERSION}",
        "direction": direction,
        "source": source,
        **({} if adapters is None else {"adapters": adapters}),
        "family": family,
        "config": config,
    }


def read_manifest(root: Path) -> DirectoryManifest | None:
    """The manifest of a checkpoint, None if it has none; ConversionError if it is damaged."""
    path = root / MANIFEST
    try:
        content_bytes = contained.read(contained.inside(root, MANIFEST), MAX_BYTES)
        # A model's config may have infinities.
        content = strict_json.parse(content_bytes, finite=False)
        if not isinstance(content, dict):
            raise ValueError("it is not a JSON object")
        if not is_sealed(content_bytes, text(content["digest"])):
            raise ValueError("its content contradicts its digest")
        if content["format"] != FORMAT:
            raise ValueError(
                f"it is of format {content['format']}, but this version reads {FORMAT}"
            )
        keys = ("package", "direction", "source", "family", "config")
        origin = {key: content[key] for key in keys}
        for stated in (content["package"], content["direction"], content["family"]):
            text(stated)
        text(origin["source"]["path"])
        return DirectoryManifest(
            {name: _tensor(*entry) for name, entry in entries(content, "tensors")},
            {inside(root, name): xxh3(stated) for name, stated in entries(content, "files")},
            origin,
            count(content["step"]) if "step" in content else None,
            dict(entries(content, OVERRIDES)) if OVERRIDES in content else {},
        )
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise _damaged(path, error.strerror) from error
    except KeyError as error:
        raise _damaged(path, f"it lacks {error}") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise _damaged(path, str(error)) from error


def _damaged(path: Path, what: object) -> ConversionError:
    return ConversionError(
        f"{path} is damaged: {what}. Restore it, or remove it to do without digests."
    )


def _tensor(dtype: str, shape: list[int], digest: str) -> tuple[Info, str]:
    return Info(*form(dtype, shape)), xxh3(digest)


_DIGEST = re.compile(r"[0-9a-f]{16}", re.ASCII)


def entries(content: Mapping[str, Any], name: str) -> Iterable[tuple[str, Any]]:
    """The entries of the JSON object of that name."""
    found = content[name]
    if not isinstance(found, dict):
        raise ValueError(f"its {name} are not a JSON object")
    return found.items()


def form(dtype: str, shape: list[int]) -> tuple[torch.dtype, tuple[int, ...]]:
    """Dtype and shape of a tensor."""
    return dtype_named(dtype), tuple(map(count, shape))


def count(value: Any) -> int:
    """A number from 0."""
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"expected a number, found {value!r:.40}")
    return value


def text(value: Any) -> str:
    """A text."""
    if not isinstance(value, str):
        raise ValueError(f"expected a text, found {value!r:.40}")
    return value


def xxh3(value: Any) -> str:
    """A digest as 16 hexadecimal digits."""
    if _DIGEST.fullmatch(text(value)) is None:
        raise ValueError(f"expected a digest, found {value!r:.40}")
    return str(value)


def inside(root: Path, name: str) -> str:
    """Return the name, if the file is in or below the directory, and no link leads out of it."""
    contained.inside(root, name)
    return name
