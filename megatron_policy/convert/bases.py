"""Brings adapters together with the model that they adapt, as a conversion asks for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from megatron_policy.adapters.opening import Base, bind_base, find_base
from megatron_policy.adapters.peft_files import (
    ADAPTER_CONFIG,
    ADAPTER_MODEL,
    PeftAdapters,
    peft_contents,
)
from megatron_policy.adapters.stacks import fit_to_peft
from megatron_policy.adapters.table import (
    PREFIX,
    A,
    AdapterSpec,
    bind_adapters,
    list_stacked_parameters,
    name_module,
)
from megatron_policy.adapters.targets import name_targets
from megatron_policy.convert.blockwise import LEAST_BYTES, BlockBuffer, cut
from megatron_policy.convert.merging import merge_adapters
from megatron_policy.convert.open_checkpoint import (
    PEFT,
    OpenCheckpoint,
    damaged_tensor,
    digest_of,
    open_checkpoint,
)
from megatron_policy.converters.files import strict_json
from megatron_policy.converters.files.raw_files import RawFiles
from megatron_policy.converters.formats.side_files import side_files
from megatron_policy.converters.mismatch import list_problems, name_dtypes
from megatron_policy.converters.table import WEIGHT_DTYPES, Entry, Table
from megatron_policy.errors import ConfigError, ConversionError
from megatron_policy.formats.tensors import Info, Tensors

_SHOWN = 12


def bring_base(
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
        stated = {} if checkpoint.manifest is None else checkpoint.manifest.tensors
        buffer = BlockBuffer(LEAST_BYTES)
        for name, (_, digest) in stated.items():
            there = name in checkpoint.infos
            if there and digest_of(checkpoint, name, buffer, LEAST_BYTES) != digest:
                raise damaged_tensor(checkpoint.root, name)
        return merge_adapters(checkpoint, of, opened, dtype)
    if checkpoint.kind == PEFT:
        return _bind_to_base(checkpoint, found, find_base(found, base))
    if base is not None:
        find_base(found, base)  # refuses another
    assert checkpoint.table is not None, "which is bound to the adapters"
    fields = fit_to_peft(found.config, checkpoint.table)
    return replace(
        checkpoint,
        side_files={n: at for n, at in checkpoint.side_files.items() if n != ADAPTER_CONFIG},
        contents={ADAPTER_CONFIG: strict_json.encoded(fields, indent=2)},
    )


def _bind_to_base(checkpoint: OpenCheckpoint, found: PeftAdapters, base: Base) -> OpenCheckpoint:
    """A directory of PEFT with the table of its adapters, and the side files of a checkpoint of
    them. Modules of a fused layer that have the same A become one adapter.

    ConversionError unless they are adapters of the base, all of one rank and scale.
    """
    infos = checkpoint.infos
    shapes = {name: info.shape for name, info in infos.items()}
    base, model = bind_base(found, base, infos)
    if model.architecture.head is not None and not found.settings.has_head:
        raise ConversionError(
            f"{found.root} has no head (modules_to_save), which a policy's checkpoint has: start a "
            "policy from it with policy.megatron_cfg.peft.start_from, and save that"
        )
    parameters = found.find_parameters(list_stacked_parameters(model), base.root)
    rank, alpha = found.find_common_scale(shapes, parameters)
    of_base = found.model or base.model, base.digest, model.overrides
    spec = AdapterSpec(rank, alpha, found.settings.dropout, *of_base)

    def is_joined(entry: Entry) -> bool:
        first, *others = (f"{PREFIX}{name_module(name, model)}{A}" for name in entry.hf)
        return all(_are_equal(checkpoint.tensors, infos, first, other) for other in others)

    modules = list(found.find_modules(shapes, parameters))
    table = bind_adapters(model, rank, modules, is_joined, parameters)
    _check_forms(found.root, base, table, infos)
    beside = side_files(base.root, spec.overrides)
    return replace(
        checkpoint,
        spec=spec,
        table=table,
        side_files=beside.copied,
        contents={**beside.changed, **peft_contents(spec, spec.peft_config(table))},
        targets=name_targets(table, model),
        overrides=spec.overrides,
    )


def _check_forms(root: Path, base: Base, table: Table, infos: Mapping[str, Info]) -> None:
    """ConversionError, naming tensors, for those that are missing, shapes that do not fit the base,
    and other dtypes.
    """
    if missing := [name for name in table.hf_shapes() if name not in infos]:
        shown = ", ".join(missing[:5]) + ", ..." * (len(missing) > 5)
        raise ConversionError(f"the adapters in {root} lack {shown}: restore {ADAPTER_MODEL}")
    problems = [
        f"{name} is {str(infos[name].dtype).removeprefix('torch.')} {list(infos[name].shape)}, "
        f"must be {list(shape)} of {name_dtypes(WEIGHT_DTYPES)}"
        for name, shape in table.hf_shapes().items()
        if infos[name].shape != shape or infos[name].dtype not in WEIGHT_DTYPES
    ]
    if problems:
        raise ConversionError(
            f"the adapters in {root} do not fit {base.root}:\n{list_problems(problems)}\n"
            "Give the model that they were trained on, or correct the file."
        )


def _are_equal(tensors: Tensors, infos: Mapping[str, Info], one: str, other: str) -> bool:
    """Whether two tensors have the same bits."""
    if infos[one] != infos[other]:
        return False
    info = infos[one]
    scratch = max(tensors.scratch(name, info.dtype) for name in (one, other))
    plan = cut(info, (info.dtype, info.dtype), scratch, LEAST_BYTES)
    for first, held, spare in BlockBuffer(LEAST_BYTES).blocks(plan):
        for name, values in zip((one, other), held, strict=True):
            tensors.read(name, first, values, spare)
        if not torch.equal(held[0].view(torch.uint8), held[1].view(torch.uint8)):
            return False
    return True


def describe_adapters(checkpoint: OpenCheckpoint) -> str:
    """What adapters are converted or merged, if any."""
    if checkpoint.merged is not None:
        return f"merged with the adapters in {checkpoint.merged}"
    if (spec := checkpoint.spec) is None:
        return ""
    return f"adapters of rank {spec.rank} and alpha {spec.alpha:g} on {spec.model}"


def name_keys(checkpoint: OpenCheckpoint) -> str:
    """The keys of `megatron_cfg.peft` with which a policy has these adapters; "" of others."""
    spec, targets = checkpoint.spec, checkpoint.targets
    if spec is None or not targets:
        return ""
    more = f", and {len(targets) - _SHOWN} more" if len(targets) > _SHOWN else ""
    modules = f"target_modules: [{', '.join(targets[:_SHOWN])}{more}]"
    return f"{{enabled: true, dim: {spec.rank}, alpha: {spec.alpha!r}, {modules}}}"
