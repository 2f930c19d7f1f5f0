"""What the headers of a checkpoint of either format say: names, shapes, dtypes and config.

Reads no weights, and does not check that these fit together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_policy.adapters.opening import read_saved_adapters
from megatron_policy.adapters.peft_files import (
    ADAPTER_CONFIG,
    ADAPTER_MODEL,
    read_object,
    read_peft,
)
from megatron_policy.adapters.table import (
    PREFIX,
    bind_adapters,
    drop_head,
    is_adaptable,
    list_stacked_parameters,
    name_module,
)
from megatron_policy.convert.open_checkpoint import SIDE, config_place
from megatron_policy.convert.training_checkpoint import is_saved, saved_state
from megatron_policy.converters.architecture import ScalarHead
from megatron_policy.converters.config_fields import Fields
from megatron_policy.converters.files.contained import expanded, inside
from megatron_policy.converters.files.raw_files import RawFiles
from megatron_policy.converters.formats import dist_files, hf_files, hf_names
from megatron_policy.converters.formats.hf_config import CONFIG, read_config, written_config
from megatron_policy.converters.formats.opening import open_model
from megatron_policy.converters.formats.quantised import as_read
from megatron_policy.converters.rows.blocks import Shape
from megatron_policy.converters.scalar_head import TENSORS as SCALAR
from megatron_policy.converters.table import WEIGHT_DTYPES, Table, bind, draft
from megatron_policy.errors import ConfigError, ConversionError
from megatron_policy.formats.manifest import read_manifest


@dataclass(frozen=True)
class Headers:
    """`config` has the defaults of its class, `written` is as in its file; tensors have their HF
    names, and those that feed none of these their keys.
    """

    config: Mapping[str, Any]
    written: Mapping[str, Any]
    shapes: Mapping[str, Shape]
    dtypes: Mapping[str, torch.dtype]
    problems: tuple[str, ...] = ()
    """What is wrong with keys that belong to a parameter."""
    config_only: bool = False
    """Whether there is only a config, and the tensors are those that its model would have."""

    def bind_table(self) -> Table:
        """Bind the table of the model, without its layers for multi-token prediction.

        ConversionError for a config that cannot be translated.
        """
        return bind(self.config, named=self.shapes)


def read_headers(source: str | Path, config: str | Path | None = None) -> Headers:
    """Read the headers of a local checkpoint, or of an HF one on the hub.

    `config` is for a Megatron-Core checkpoint without one. A config.json in place of a checkpoint
    stands for one with all tensors of its model, in the dtype that it names. ConfigError if the
    source is not a checkpoint, ConversionError if its headers are damaged.
    """
    path = expanded(source)
    if path.name == CONFIG and path.is_file():
        return _headers_of_config(path.parent)
    root = dist_files.find(source)
    if root is not None:
        read_manifest(root)  # a damaged one is refused here as by every other command
        return _dist_headers(root, config)
    root = hf_files.locate(source)
    read_manifest(root)
    fields, written = read_config(root), written_config(root)
    if not any(hf_names.holds_weights(file.name) for file in root.iterdir()):
        raise ConversionError(
            f"{root} has a config and no weights; give {root / CONFIG} for what its checkpoint "
            "would have, or fetch the weights as safetensors"
        )
    files = hf_files.inventory(root)
    tensors = as_read(files, hf_files.quantised_in(root, files))
    return Headers(
        fields,
        written,
        {name: shape for name, (_, shape) in tensors.items()},
        {name: dtype for name, (dtype, _) in tensors.items()},
    )


def open_headers(source: str | Path) -> tuple[Headers, Table]:
    """Read the headers of a checkpoint, and bind its table; ConversionError unless it has the
    tensors of its model.
    """
    seen = read_headers(source)
    table = seen.bind_table()
    if seen.problems:
        raise ConversionError("; ".join(seen.problems))
    table.check_hf(seen.shapes, seen.dtypes)
    return seen, table


@dataclass(frozen=True)
class AdapterHeaders:
    """As `Headers`, of adapters alone: their table, and the `fields` of their config."""

    table: Table
    fields: Mapping[str, Any]
    shapes: Mapping[str, Shape]
    dtypes: Mapping[str, torch.dtype]
    problems: tuple[str, ...]


def read_adapter_headers(
    source: str | Path, config: str | Path | None = None
) -> AdapterHeaders | None:
    """Read the headers of a local checkpoint of adapters; None if it is of a whole model. Of those
    in a directory of PEFT, `config` is the model's; None: that of the directory which they name.
    """
    root = dist_files.find(source)
    if root is not None and is_saved(root) and saved_state(root).of_adapters:
        with RawFiles() as files:
            reader = dist_files.DistReader(root, files)
            model = open_model(inside(root, SIDE)).table
            found, _, table = read_saved_adapters(root, SIDE, reader, model)
            seen = _as_hf(reader, table, {}, {})
            return AdapterHeaders(table, found.config, seen.shapes, seen.dtypes, seen.problems)
    folder = expanded(source)
    if root is not None or not hf_files.is_peft(folder):
        return None
    read_manifest(folder)
    tensors = as_read(hf_files.inventory(folder, ADAPTER_MODEL), {})
    shapes = {name: shape for name, (_, shape) in tensors.items()}
    dtypes = {name: dtype for name, (dtype, _) in tensors.items()}
    fields = read_object(folder, ADAPTER_CONFIG)
    weight, bias = (PREFIX + name for name in SCALAR)
    head = ScalarHead(per_token=bias in shapes) if weight in shapes else None
    model = open_model(_config_of(folder, fields, config), head=head).table
    problems: list[str] = []
    parameters: list[str] = []
    try:
        found = read_peft(folder)
        parameters = found.find_parameters(
            list_stacked_parameters(model), f"this {model.family} model"
        )
        found.find_modules(shapes, parameters)
    except ConversionError as error:
        problems.append(str(error))
    # Of the adapters of all modules that have any of these tensors.
    entries = filter(is_adaptable, model.entries)
    known = {name_module(name, model) for entry in entries for name in entry.hf}
    modules = {m for name in shapes if (m := name.removeprefix(PREFIX).rpartition(".lora_")[0])}
    rank = fields.get("r")
    rank = rank if type(rank) is int and rank > 0 else 1
    own = [m for m in modules if m in known]
    table = bind_adapters(model, rank, own, lambda entry: False, parameters)
    table = table if PREFIX + SCALAR[0] in shapes else drop_head(table)
    return AdapterHeaders(table, fields, shapes, dtypes, tuple(problems))


def _config_of(folder: Path, fields: Mapping[str, Any], config: str | Path | None) -> Path:
    """The config.json of the model that adapters are of, or its directory."""
    named = fields.get("base_model_name_or_path")
    if config is not None:
        return config_place(config, [CONFIG])
    place = named if isinstance(named, str) else None
    if place is None or not expanded(place).exists():
        raise ConfigError(
            f"{folder} has adapters of {named!r:.200}: give that model, its directory or its name "
            "on the hub, with --config"
        )
    return expanded(place)


def _headers_of_config(root: Path) -> Headers:
    fields, written = read_config(root), written_config(root)
    try:
        table = draft(Fields(fields))
    except ConversionError:  # whoever uses the config reports why
        return Headers(fields, written, {}, {}, config_only=True)
    # bfloat16 if the config names none.
    name = written.get("dtype") or written.get("torch_dtype") or "bfloat16"
    known = {str(each).removeprefix("torch."): each for each in WEIGHT_DTYPES}
    if name not in known:
        raise ConversionError(f"config.json has {name!r:.80} for dtype; use one of {list(known)}")
    shapes, dtype = table.hf_shapes(), known[name]
    kept = {name for entry in table.exported() if entry.row.keeps_dtype for name in entry.hf}
    dtypes = {name: torch.float32 if name in kept else dtype for name in shapes}
    return Headers(fields, written, shapes, dtypes, config_only=True)


def _dist_headers(root: Path, config: str | Path | None) -> Headers:
    place = config_place(config, [CONFIG]) if config else inside(root, SIDE)
    if not place.exists():
        raise ConfigError(
            f"{root} does not say which model it belongs to; give its config.json with --config"
        )
    fields, written = read_config(place), written_config(place)
    with RawFiles() as files:
        reader = dist_files.DistReader(root, files)
        try:
            table = draft(Fields(fields), mtp_layers=reader.mtp_layers)
        except ConversionError:  # whoever uses the config reports why
            keys = reader.weights()
            return Headers(
                fields,
                written,
                {key: reader.keys[key].shape for key in keys},
                {key: reader.keys[key].dtype for key in keys},
            )
        return _as_hf(reader, table, fields, written)


def _as_hf(
    reader: dist_files.DistReader,
    table: Table,
    config: Mapping[str, Any],
    written: Mapping[str, Any],
) -> Headers:
    arch = table.architecture
    shapes: dict[str, Shape] = {}
    dtypes: dict[str, torch.dtype] = {}
    problems: list[str] = []
    for entry in table.exported():
        try:
            found = reader.parameter(entry, arch)
        except ConversionError as error:
            problems.append(str(error))
            continue
        if found is not None:
            shapes |= zip(entry.hf, entry.row.hf_shapes(arch), strict=True)
            dtypes |= dict.fromkeys(entry.hf, found[1].dtype)
    for key in reader.unused(table.exported(), arch):
        shapes[key], dtypes[key] = reader.keys[key].shape, reader.keys[key].dtype
    return Headers(config, written, shapes, dtypes, tuple(problems))
