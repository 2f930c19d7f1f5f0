"""Brings adapters together with the model that they adapt, as a conversion asks for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from megatron_policy.convert.adapters import bound, find_base
from megatron_policy.convert.blockwise import LEAST_BYTES, BlockBuffer
from megatron_policy.convert.merging import merged
from megatron_policy.convert.open_checkpoint import (
    PEFT,
    OpenCheckpoint,
    damaged_tensor,
    digest_of,
    open_checkpoint,
)
from megatron_policy.converters.files.raw_files import RawFiles
from megatron_policy.errors import ConfigError

_SHOWN = 12


def with_base(
    checkpoint: OpenCheckpoint,
    base: str | Path | None,
    merge: bool,
    dtype: torch.dtype | None,
    files: RawFiles,
) -> OpenCheckpoint:
    """What is converted of a checkpoint: if it has adapters alone, these bound to their base or,
    with `merge`, the base with the adapters added, its weights in `dtype`.

    ConfigError for another base, or if the checkpoint is not of adapters; ConversionError for
    adapters that do not fit.
    """
    found = checkpoint.adapters
    if found is None:
        if merge or base is not None:
            raise ConfigError(
                f"{checkpoint.root} has a whole model: leave out base= and merge=True, which are "
                "for adapters"
            )
        return checkpoint
    if merge:
        of = find_base(found, base)
        opened = open_checkpoint(of.root, files)
        opened.check()
        _check_digests(checkpoint)
        return merged(checkpoint, of, opened, dtype)
    if checkpoint.kind == PEFT:
        of = find_base(found, base)
        made = bound(found, of, checkpoint.infos, checkpoint.tensors)
        return replace(
            checkpoint,
            spec=made.spec,
            table=made.table,
            side_files=made.beside.copied,
            contents=made.beside.changed,
            targets=made.targets,
            overrides=made.spec.overrides,
        )
    if base is not None:
        find_base(found, base)  # refuses another
    return checkpoint


def in_words(checkpoint: OpenCheckpoint) -> str:
    """What adapters are converted or merged, if any."""
    if checkpoint.merged is not None:
        return f"merged with the adapters in {checkpoint.merged}"
    if (spec := checkpoint.spec) is None:
        return ""
    return f"adapters of rank {spec.rank} and alpha {spec.alpha:g} on {spec.model}"


def resumed_with(checkpoint: OpenCheckpoint) -> str:
    """The keys of `megatron_cfg.peft` with which a policy has these adapters; "" of others."""
    spec, targets = checkpoint.spec, checkpoint.targets
    if spec is None or not targets:
        return ""
    more = f", and {len(targets) - _SHOWN} more" if len(targets) > _SHOWN else ""
    modules = f"target_modules: [{', '.join(targets[:_SHOWN])}{more}]"
    return f"{{enabled: true, dim: {spec.rank}, alpha: {spec.alpha!r}, {modules}}}"


def _check_digests(checkpoint: OpenCheckpoint) -> None:
    """ConversionError, naming a tensor whose bytes are not those that were written."""
    buffer, stated = BlockBuffer(LEAST_BYTES), checkpoint.manifest and checkpoint.manifest.tensors
    for name, (_, digest) in (stated or {}).items():
        if name in checkpoint.infos and digest_of(checkpoint, name, buffer, LEAST_BYTES) != digest:
            raise damaged_tensor(checkpoint.root, name)
