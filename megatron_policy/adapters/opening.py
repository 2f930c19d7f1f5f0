"""Opens the model that adapters adapt: the one that is given, or that they name."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_policy.adapters.base import base_digest, open_base
from megatron_policy.adapters.peft_files import (
    ADAPTER_CONFIG,
    BASE,
    PeftAdapters,
    read_description,
)
from megatron_policy.adapters.table import (
    PREFIX,
    AdapterSpec,
    bind_adapters,
    list_stacked_parameters,
    name_a,
)
from megatron_policy.converters.architecture import ScalarHead
from megatron_policy.converters.files.contained import expanded, inside
from megatron_policy.converters.formats.dist_files import DistReader
from megatron_policy.converters.formats.hf_files import HfReader, has_weights
from megatron_policy.converters.formats.hf_location import locate
from megatron_policy.converters.scalar_head import TENSORS as SCALAR
from megatron_policy.converters.table import Entry, Table
from megatron_policy.errors import ConfigError, ConversionError
from megatron_policy.formats.tensors import Info


@dataclass(frozen=True)
class Base:
    """The model that adapters adapt, as its files are."""

    model: str
    root: Path
    digest: str


def read_saved_adapters(
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
    found = read_description(side)
    modules, settings, stated = found.settings.targets, found.settings, found.stated
    if modules is None or stated is None:
        raise ConversionError(
            f"{side} does not say which modules of which base the adapters are of: restore its "
            f"{ADAPTER_CONFIG} and {BASE}"
        )

    def is_joined(entry: Entry) -> bool:
        key = reader.keys.get(name_a(entry.megatron))
        return key is not None and key.shape[:1] == (settings.rank,)

    scale = *settings.find_scale(""), settings.dropout
    spec = AdapterSpec(*scale, stated.model, stated.digest, stated.overrides)
    parameters = found.find_parameters(list_stacked_parameters(table), stated.model)
    return found, spec, bind_adapters(table, spec.rank, modules, is_joined, parameters)


def find_base(found: PeftAdapters, given: str | Path | None) -> Base:
    """The model that is `given`, or the one on this machine that the adapters name. ConfigError if
    there is none, or it is not theirs.
    """
    named = found.model
    if given is None and (named is None or not has_weights(expanded(named))):
        whose = f"; they name {named!r:.200}" if named else ""
        raise ConfigError(
            f"the adapters in {found.root} need the model that they were trained on: give it with "
            f"base={whose}"
        )
    model = str(given if given is not None else named)
    root = locate(model)
    with HfReader(root) as reader:
        architecture = open_base(root, found.overrides).architecture
        digest = base_digest(reader, architecture, found.overrides)
    found.check_base(model, digest, found.overrides)
    return Base(model, root, digest)


def bind_base(
    found: PeftAdapters, base: Base, infos: Mapping[str, Info], names: Collection[str] = ()
) -> tuple[Base, Table]:
    """The base, and its table, with the head that comes with the adapters, if one does, and those
    layers for multi-token prediction that are among the base's tensors `names`.

    ConversionError for adapters of a head that the base has not, or not of the head that it has.
    """
    overrides, head = found.overrides, None
    if found.settings.has_head:
        head = ScalarHead(per_token=PREFIX + SCALAR[1] in infos)
    model = open_base(base.root, overrides, head=head, tensors=names)
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
