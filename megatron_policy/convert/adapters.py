"""Checkpoints of adapters alone: directories of PEFT, and training checkpoints. Binds them to the
model that they adapt.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from megatron_policy.config.adapters import targets_of
from megatron_policy.convert.blockwise import LEAST_BYTES, BlockBuffer, cut
from megatron_policy.converters.adapters import (
    PREFIX,
    A,
    AdapterSpec,
    a_of,
    adapters_on,
    module_of,
    stacked_parameters,
)
from megatron_policy.converters.architecture import ScalarHead
from megatron_policy.converters.files.contained import expanded, inside
from megatron_policy.converters.formats.dist_files import DistReader
from megatron_policy.converters.formats.hf_files import HfReader, has_weights
from megatron_policy.converters.formats.hf_location import locate
from megatron_policy.converters.formats.peft_base import architecture_of, base_digest
from megatron_policy.converters.formats.peft_files import (
    ADAPTER_CONFIG,
    BASE,
    PeftAdapters,
    described,
    peft_contents,
)
from megatron_policy.converters.formats.side_files import SideFiles, side_files
from megatron_policy.converters.mismatch import either
from megatron_policy.converters.opening import open_model
from megatron_policy.converters.scalar_head import FIELDS as OF_HEAD
from megatron_policy.converters.scalar_head import TENSORS as SCALAR
from megatron_policy.converters.table import WEIGHT_DTYPES, Entry, Table
from megatron_policy.errors import ConfigError, ConversionError
from megatron_policy.formats.tensors import Info, Tensors


@dataclass(frozen=True)
class Base:
    """The model that adapters adapt, as its files are."""

    model: str
    root: Path
    digest: str


@dataclass(frozen=True)
class Bound:
    """What a training checkpoint has of adapters besides their tensors."""

    spec: AdapterSpec
    table: Table
    beside: SideFiles
    """The files beside the tensors, those that say what the adapters are among them."""
    targets: tuple[str, ...]
    """Names of `target_modules` with which a policy has these adapters."""


def saved_adapters(
    root: Path, side_name: str, reader: DistReader, table: Table
) -> tuple[PeftAdapters, AdapterSpec, Table]:
    """What the directory of that name in a training checkpoint says of its adapters, and their
    table; `table` is that of their model.
    """
    side = inside(root, side_name)
    if not (side / ADAPTER_CONFIG).is_file():
        raise ConversionError(
            f"{root} has adapters alone, but not the files that say of which modules: load it in a "
            "policy with its megatron_cfg.peft, and save it again or call export_peft"
        )
    found = described(side)
    modules, settings, stated = found.settings.targets, found.settings, found.stated
    if modules is None or stated is None:
        raise ConversionError(
            f"{side} does not say which modules of which base the adapters are of: restore its "
            f"{ADAPTER_CONFIG} and {BASE}"
        )

    def is_joined(entry: Entry) -> bool:
        key = reader.keys.get(a_of(entry.megatron))
        return key is not None and key.shape[:1] == (settings.rank,)

    scale = settings.rank, settings.alpha_of(""), settings.dropout
    spec = AdapterSpec(*scale, stated.model, stated.digest, stated.overrides)
    parameters = found.parameters(stacked_parameters(table), stated.model)
    return found, spec, adapters_on(table, spec.rank, modules, is_joined, parameters)


def find_base(found: PeftAdapters, given: str | Path | None) -> Base:
    """The model that is `given`, or the one on this machine that the adapters name. ConfigError if
    there is none, or it is not theirs.
    """
    named = found.stated.model if found.stated else found.settings.model
    if given is None and (named is None or not has_weights(expanded(named))):
        whose = f"; they name {named!r:.200}" if named else ""
        raise ConfigError(
            f"the adapters in {found.root} need the model that they were trained on: give it with "
            f"base={whose}"
        )
    model = str(given if given is not None else named)
    root, overrides = locate(model), found.stated.overrides if found.stated else {}
    with HfReader(root) as reader:
        digest = base_digest(reader, architecture_of(root, overrides), overrides)
    found.check_base(model, digest, overrides)
    return Base(model, root, digest)


def model_of(
    found: PeftAdapters, base: Base, infos: Mapping[str, Info], names: Collection[str] = ()
) -> tuple[Base, Table]:
    """The base, and its table, with the head that comes with the adapters, if one does, and those
    layers for multi-token prediction that are among the base's tensors `names`.

    ConversionError for adapters of a head that the base has not, or not of the head that it has.
    """
    overrides = found.stated.overrides if found.stated else {}
    own = {name: value for name, value in overrides.items() if name not in OF_HEAD}
    head = None
    if found.settings.has_head:
        head = ScalarHead(per_token=PREFIX + SCALAR[1] in infos)
    model = open_model(base.root, own, head=head, tensors=names).table
    if found.settings.of_head and model.architecture.head is None:
        raise ConversionError(
            f"{found.root} has adapters of a model with a scalar head (task_type), which "
            f"{base.root} has not, and no head (modules_to_save): give the model that they were "
            "trained on"
        )
    model = replace(model, overrides={**model.overrides, **overrides})
    if model.overrides != overrides:
        with HfReader(base.root) as reader:
            base = replace(base, digest=base_digest(reader, model.architecture, model.overrides))
    return base, model


def bound(found: PeftAdapters, base: Base, infos: Mapping[str, Info], tensors: Tensors) -> Bound:
    """Adapters in a directory of PEFT as those of their base. Modules of a fused layer that have
    the same A become one adapter.

    ConversionError unless they are adapters of the base, all of one rank and scale.
    """
    shapes = {name: info.shape for name, info in infos.items()}
    base, model = model_of(found, base, infos)
    if model.architecture.head is not None and not found.settings.has_head:
        raise ConversionError(
            f"{found.root} has no head (modules_to_save), which a policy's checkpoint has: start a "
            "policy from it with policy.megatron_cfg.peft.start_from, and save that"
        )
    parameters = found.parameters(stacked_parameters(model), base.root)
    rank, alpha = found.uniform(shapes, parameters)
    named = found.stated.model if found.stated else found.settings.model
    spec = AdapterSpec(
        rank, alpha, found.settings.dropout, named or base.model, base.digest, model.overrides
    )

    def is_joined(entry: Entry) -> bool:
        first, *others = (f"{PREFIX}{module_of(name)}{A}" for name in entry.hf)
        return all(_are_equal(tensors, infos, first, other) for other in others)

    modules = list(found.modules(shapes, parameters))
    table = adapters_on(model, rank, modules, is_joined, parameters)
    _check_forms(found.root, base, table, infos)
    own = side_files(base.root, spec.overrides)
    beside = replace(own, changed={**own.changed, **peft_contents(spec, table)})
    return Bound(spec, table, beside, targets_of(table, model))


def _check_forms(root: Path, base: Base, table: Table, infos: Mapping[str, Info]) -> None:
    """ConversionError, naming tensors, for shapes that do not fit the base, and other dtypes."""
    problems = [
        f"{name} is {str(infos[name].dtype).removeprefix('torch.')} {list(infos[name].shape)}, "
        f"must be {list(shape)} of {either(WEIGHT_DTYPES)}"
        for name, shape in table.hf_shapes().items()
        if infos[name].shape != shape or infos[name].dtype not in WEIGHT_DTYPES
    ]
    if problems:
        more = f"\n  and {len(problems) - 20} more" if len(problems) > 20 else ""
        raise ConversionError(
            f"the adapters in {root} do not fit {base.root}:\n  "
            + "\n  ".join(problems[:20])
            + f"{more}\nGive the model that they were trained on, or correct the file."
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
