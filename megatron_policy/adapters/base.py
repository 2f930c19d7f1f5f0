"""Which model adapters were trained on: by its digest in directories of ours, and in those of PEFT
by its name.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import torch

from megatron_policy.adapters.peft_config import PeftSettings
from megatron_policy.adapters.table import is_same_base
from megatron_policy.converters.architecture import Architecture, ScalarHead
from megatron_policy.converters.architecture.plain_values import plain
from megatron_policy.converters.files.contained import expanded
from megatron_policy.converters.formats.hf_files import HfReader, has_weights
from megatron_policy.converters.formats.hf_location import locate
from megatron_policy.converters.formats.opening import open_model
from megatron_policy.converters.scalar_head import FIELDS as OF_HEAD
from megatron_policy.converters.table import Table
from megatron_policy.errors import ConfigError, ConversionError

_SAMPLES, _SAMPLE, _SPREAD = 512, 1024, 8
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SET = "give the model that they were trained on (policy.model_name, --base)"


@dataclass(frozen=True)
class StatedBase:
    """The base that a directory of ours names."""

    model: str
    digest: str
    overrides: Mapping[str, Any] = field(default_factory=dict)

    def check(self, root: Path, model: str | Path, digest: str, own: Mapping[str, Any]) -> None:
        """ConfigError unless the adapters in `root` are of `model`, which has that digest with the
        overrides `own`.
        """
        if is_same_base(self.digest, digest):
            return
        if dict(self.overrides) != dict(own):
            raise ConfigError(
                f"the adapters in {root} were trained with hf_config_overrides "
                f"{dict(self.overrides)!r:.500}, not {dict(own)!r:.500}: set "
                "policy.hf_config_overrides to theirs"
            )
        raise ConfigError(
            f"the adapters in {root} were trained on {self.model!r:.200}, which has other "
            f"weights or config than {str(model)!r:.200} (digest {self.digest!r:.80}, not "
            f"{digest!r}): {_SET}"
        )


def check_named(
    root: Path, settings: PeftSettings, model: str | Path, overrides: Mapping[str, Any]
) -> None:
    """ConfigError unless the adapters in `root` can be of `model`, by the name and the revision
    that PEFT's settings have. A model of that name that is on this machine has to have the same
    weights, and the same config, or that of `model` with `overrides`; of others the last part of
    the name counts.
    """
    named, revision = settings.model, settings.revision
    if named is None:
        return
    own = locate(model)
    commit = own.name if own.parent.name == "snapshots" else ""
    if revision and commit and _COMMIT.fullmatch(revision) and revision != commit:
        _refuse(root, f"revision {revision} of {named!r}", f"revision {commit}", "revision")
    there = expanded(named)
    if os.path.realpath(there) == os.path.realpath(own) or _find_repository(own) == named:
        return
    if has_weights(there):
        with HfReader(there) as theirs, HfReader(own) as ours:
            try:
                of_theirs = base_digest(theirs, open_base(there).architecture, {})
            except (ConfigError, ConversionError):
                of_theirs = ""  # a model of no family here
            for given in (overrides, {}):
                if base_digest(ours, open_base(own, given).architecture, {}) == of_theirs:
                    return
    else:
        names = (_find_repository(there) or named, _find_repository(own) or str(model))
        if len({name.rstrip("/").rpartition("/")[2].casefold() for name in names}) == 1:
            return
    _refuse(root, repr(named), repr(str(model)), "base_model_name_or_path")


def open_base(
    model: str | Path,
    overrides: Mapping[str, Any] | None = None,
    *,
    head: ScalarHead | None = None,
    tensors: Collection[str] = (),
) -> Table:
    """The table of `model` with these overrides, without those of a new scalar head; see
    `open_model`.
    """
    own = {name: value for name, value in (overrides or {}).items() if name not in OF_HEAD}
    return open_model(model, own, head=head, tensors=tensors).table


def base_digest(reader: HfReader, architecture: Architecture, overrides: Mapping[str, Any]) -> str:
    """What tells a model of these files from others, in two parts; see `is_same_base`.

    The first has the names, shapes and dtypes of its tensors, the first bytes of up to 512 of them,
    in an order without a pattern, and the fields of its config that are overridden. The second has
    `architecture`, its config as far as it computes, and places all over these tensors.
    """
    first, second = hashlib.sha256(), hashlib.sha256()
    for name in sorted(reader.shapes):
        first.update(f"{name} {reader.shapes[name]} {reader.dtypes[name]}\n".encode())
    if overrides:
        first.update(json.dumps(dict(overrides), sort_keys=True, default=str).encode())
    # A head, and layers for multi-token prediction, come with the policy.
    base = replace(architecture, head=None, mtp_layers=0, tied=False)
    second.update(json.dumps(plain(base), sort_keys=True).encode())
    mixed = sorted(reader.shapes, key=lambda name: hashlib.sha256(name.encode()).digest())
    for name in mixed[:_SAMPLES]:
        shape = reader.shapes[name]
        rows = tuple(slice(0, min(size, 1 if dim else 4)) for dim, size in enumerate(shape[:-1]))
        taken = reader.part(name)[(*rows, slice(0, _SAMPLE))] if shape else reader.tensor(name)
        first.update(_view_bytes(taken))
        for index in _sample_places(shape):
            second.update(_view_bytes(reader.part(name)[index]))
    return f"{first.hexdigest()[:32]}.{second.hexdigest()[:32]}"


def _sample_places(shape: tuple[int, ...]) -> Iterator[tuple[slice, ...]]:
    """Short pieces of rows of a tensor, from its first element to its last."""
    for place in range(_SPREAD if shape and all(shape) else 0):
        lengths = [*(1 for _ in shape[:-1]), min(_SAMPLE, shape[-1])]
        starts = [
            (n - long) * place // (_SPREAD - 1) for n, long in zip(shape, lengths, strict=True)
        ]
        yield tuple(slice(at, at + long) for at, long in zip(starts, lengths, strict=True))


def _view_bytes(values: torch.Tensor) -> bytes:
    return values.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _refuse(root: Path, theirs: str, ours: str, what: str) -> NoReturn:
    raise ConfigError(
        f"the adapters in {root} were trained on {theirs:.300}, not on {ours:.300}: {_SET}; or, if "
        f"the weights are the same, write that into {what} of adapter_config.json"
    )


def _find_repository(root: Path) -> str:
    """The hub repository of a snapshot in its cache; "" for other directories."""
    folder = root.parent.parent.name
    is_snapshot = root.parent.name == "snapshots" and folder.startswith("models--")
    return folder.removeprefix("models--").replace("--", "/") if is_snapshot else ""
