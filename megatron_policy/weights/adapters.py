"""Fills this rank's adapters from a directory that PEFT or `export_peft` wrote."""

from __future__ import annotations

from pathlib import Path

import torch

from megatron_policy.converters.adapters import target_parameters, without_head
from megatron_policy.converters.files.contained import expanded
from megatron_policy.converters.formats.hf_files import HfReader
from megatron_policy.converters.formats.peft_files import ADAPTER_MODEL, check_peft_config
from megatron_policy.converters.table import Table
from megatron_policy.errors import ConfigError, ConversionError
from megatron_policy.parallel.topology import Placement
from megatron_policy.weights.load import Held, load_parameters


def load_adapters(
    directory: str,
    held: Held,
    table: Table,
    place: Placement,
    *,
    rank: int | None,
    alpha: float | None,
    base: str,
) -> dict[str, torch.dtype]:
    """Copy this rank's slices from a directory of adapters into its own, which are of `rank` and
    `alpha`, on weights whose digest is `base`. A scalar head among them is left as it is if the
    directory has none. Returns the dtypes of what the directory has.

    ConfigError for adapters of another rank or scale, of other weights, or of other modules than
    those of the table; ConversionError for damaged files.
    """
    root = expanded(directory)
    scalar = table.architecture.head is not None
    parameters = target_parameters(table)
    has_head = check_peft_config(root, rank, alpha, base, scalar_head=scalar, parameters=parameters)
    if scalar and not has_head:
        table, held = without_head(table), [pair for pair in held if pair[0].adapts]
    with HfReader(root, ADAPTER_MODEL) as reader:
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
        return dict(reader.dtypes)


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
