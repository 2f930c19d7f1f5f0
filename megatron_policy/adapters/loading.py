"""Fills this rank's adapters: draws their first values, or reads a directory that PEFT or
`export_peft` wrote.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from megatron_policy.adapters.peft_files import ADAPTER_MODEL, PeftAdapters, read_peft
from megatron_policy.adapters.stacks import stack_adapters
from megatron_policy.adapters.table import (
    A,
    AdapterSpec,
    drop_head,
    is_stacked,
    list_target_parameters,
)
from megatron_policy.config import PolicyConfig
from megatron_policy.config.trained import PeftConfig
from megatron_policy.converters.files.contained import expanded
from megatron_policy.converters.formats.hf_files import HfReader
from megatron_policy.converters.rows import fill_parts, fill_shard
from megatron_policy.converters.rows.expert_rows import StackedAdapterA, StackedAdapterB
from megatron_policy.converters.table import Table
from megatron_policy.errors import ConfigError, ConversionError
from megatron_policy.parallel.topology import Placement
from megatron_policy.weights.load import DTYPES, Held, load_parameters

_MERGE = (
    "merge them into their base, as PEFT's merge_and_unload() does, and set policy.model_name to "
    "that"
)

_METHODS: Mapping[str, Callable[[torch.Tensor, torch.Generator], object]] = {
    # Glorot and Bengio 2010, the normal distribution.
    "xavier": lambda t, drawn: torch.nn.init.xavier_normal_(t, generator=drawn),
    # He et al. 2015, uniform with PEFT's slope: within 1 / sqrt(inputs).
    "kaiming": lambda t, drawn: torch.nn.init.kaiming_uniform_(t, math.sqrt(5), generator=drawn),
    # As Megatron-Bridge, from which the host takes its names of methods.
    "normal": lambda t, drawn: t.normal_(0.0, 0.2, generator=drawn),
    "zero": lambda t, _: t.zero_(),
}
"""Fill a tensor from a generator."""


def fill_adapters(
    held: Held, table: Table, place: Placement, config: PolicyConfig, spec: AdapterSpec
) -> dict[str, torch.dtype]:
    """Fill adapters with the values that they start from. A scalar head keeps those of the base,
    unless a directory to start from has others. Returns the dtypes in which they are handed over.

    ConversionError unless a directory to start from holds exactly the adapters of the table, and
    ConfigError for adapters of another rank or scale, or of other weights.
    """
    peft = config.megatron_cfg.peft
    names = [*table.hf_shapes(), *table.copies()]
    drawn = dict.fromkeys(names, DTYPES[config.precision])
    if peft.start_from is None:
        _draw([pair for pair in held if pair[0].adapts], table, place, peft, config.seed)
        return drawn
    return drawn | load_adapters(peft.start_from, held, table, place, spec)


@torch.no_grad()
def _draw(held: Held, table: Table, place: Placement, peft: PeftConfig, seed: int) -> None:
    """Each Hugging Face tensor is drawn whole in fp32, from the seed and its name, and sliced: the
    values do not depend on the layout.
    """
    arch = table.architecture
    stacks: dict[tuple[str, ...], list[torch.Tensor]] = {}
    for entry, parameter in held:
        if is_stacked(entry):
            if entry.hf not in stacks:  # once for all its experts, which have four by turns
                stacks = dict([*stacks.items()][-3:])
                (shape,), (of_stack,) = entry.row.hf_shapes(arch), entry.hf
                whole, own = torch.empty(shape), entry.row.local_shape(arch, 1)
                assert isinstance(entry.row, StackedAdapterA | StackedAdapterB)
                for expert in range(0 if arch.moe is None else arch.moe.experts):
                    row = replace(entry.row, expert=expert)
                    drawn = _draw_tensor(f"{expert} {of_stack}", own, peft, seed)
                    fill_parts(row, arch, [whole], drawn, 0, 1)
                stacks[entry.hf] = [whole]
            parts = stacks[entry.hf]
        else:
            shapes = zip(entry.hf, entry.row.hf_shapes(arch), strict=True)
            parts = [_draw_tensor(name, shape, peft, seed) for name, shape in shapes]
        fill_shard(entry.row, arch, parameter.data, parts, *place.shard_of(entry.row))


def _draw_tensor(name: str, shape: tuple[int, ...], peft: PeftConfig, seed: int) -> torch.Tensor:
    method = peft.lora_A_init_method if name.endswith(A) else peft.lora_B_init_method
    own = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(own[:8], "big") >> 1)
    tensor = torch.empty(shape)
    _METHODS[method](tensor, generator)
    return tensor


def load_adapters(
    directory: str,
    held: Held,
    table: Table,
    place: Placement,
    spec: AdapterSpec,
) -> dict[str, torch.dtype]:
    """Copy this rank's slices from a directory of adapters into its own, which are of `spec`. A
    scalar head among them is left as it is if the directory has none. Returns the dtypes of what
    the directory has.

    ConfigError for adapters of another rank or scale, of other weights, or of other modules than
    those of the table; ConversionError for damaged files, and values that are not finite.
    """
    root = expanded(directory)
    found, parameters = read_peft(root), list_target_parameters(table)
    if found.settings.parameters and not parameters:  # PEFT stacked what has adapters apart here
        table = stack_adapters(table)
        entries = {entry.megatron: entry for entry in table.entries}
        held = [(entries[entry.megatron], parameter) for entry, parameter in held]
        parameters = list_target_parameters(table)
    _check_parts(found, table, parameters)
    if table.architecture.head is not None and not found.settings.has_head:
        table, held = drop_head(table), [pair for pair in held if pair[0].adapts]
    with HfReader(root, ADAPTER_MODEL) as reader:
        rank, alpha = found.find_common_scale(reader.shapes, parameters)
        for key, there, own in (("dim", rank, spec.rank), ("alpha", alpha, spec.alpha)):
            if there != own:
                raise ConfigError(
                    f"policy.megatron_cfg.peft.{key} is {own}, but the adapters in {root} have "
                    f"{there}: set it to that"
                )
        found.check_base(spec.model, spec.base, spec.overrides)
        try:
            table.check_hf(reader.shapes, reader.dtypes)
        except ConversionError as error:
            raise ConfigError(
                f"{root} does not have the adapters that policy.megatron_cfg.peft asks for: set "
                "target_modules to the modules that it adapts, or policy.model_name to the model "
                f"that they were trained on. {error}"
            ) from error
        _check_shared(root, reader, table)
        load_parameters(held, reader, table, place)
        _check_finite(root, reader, held)
        return dict(reader.dtypes)


def _check_parts(found: PeftAdapters, table: Table, parameters: list[str]) -> None:
    """ConfigError for a head that the policy has not, and unless the adapted parameters with
    stacked experts are just `parameters`.
    """
    root, settings = found.root, found.settings
    if settings.of_head and table.architecture.head is None:
        raise ConfigError(
            f"{root} has adapters of a model with a scalar head (task_type, modules_to_save), but "
            "this policy has none: set policy.reward_model_cfg to the head that they were trained "
            f"with, or {_MERGE}"
        )
    fitting = {name: settings.match_parameters(name, parameters) for name in settings.parameters}
    missing = sorted(set(parameters).difference(*fitting.values()))
    unknown = [name for name, names in fitting.items() if not names]
    if missing or unknown:
        what = f"no adapters of {missing[0]}" if missing else f"adapters of {unknown[0]!r:.200}"
        raise ConfigError(
            f"{root} has {what}, unlike policy.megatron_cfg.peft: set target_modules to the "
            f"modules that it adapts, or {_MERGE}"
        )


def _check_finite(root: Path, reader: HfReader, held: Held) -> None:
    """ConversionError, naming tensors, if a value that this rank has read is not finite."""
    for entry, parameter in held:
        if parameter.isfinite().all():
            continue
        wrong = [name for name in entry.hf if not reader.tensor(name).isfinite().all()]
        if not wrong:
            raise ConversionError(
                f"{', '.join(entry.hf)} in {root} has a value that {parameter.dtype} cannot hold: "
                "set policy.precision to float32"
            )
        raise ConversionError(
            f"{', '.join(wrong)} in {root} has values that are not finite: the run that wrote it "
            "had diverged; take adapters that an earlier step saved"
        )


def _check_shared(root: Path, reader: HfReader, table: Table) -> None:
    """ConfigError unless the modules of a fused layer, which has one A, have the same in a file."""
    for name, first in table.copies().items():
        there = name in reader.shapes
        if not there or not torch.equal(reader.tensor(name), reader.tensor(first)):
            what = f"differs from {first}" if there else "is missing"
            raise ConfigError(
                f"{name} {what} in {root}, but policy.megatron_cfg.peft names the fused layer, "
                "whose modules share one A: name the modules in target_modules instead, as in "
                "[q_proj, k_proj, v_proj]"
            )
