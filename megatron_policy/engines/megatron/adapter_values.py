"""The first values of adapters: drawn, or read from a directory that PEFT wrote."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from pathlib import Path

import torch

from megatron_policy.config import PolicyConfig
from megatron_policy.config.trained import PeftConfig
from megatron_policy.converters.adapters import A, AdapterSpec
from megatron_policy.converters.files.contained import expanded
from megatron_policy.converters.formats.hf_files import HfReader
from megatron_policy.converters.formats.peft_files import ADAPTER_MODEL, read_peft
from megatron_policy.converters.rows import fill_shard
from megatron_policy.converters.table import Table
from megatron_policy.errors import ConfigError, ConversionError
from megatron_policy.parallel.topology import Placement
from megatron_policy.weights.load import DTYPES, Held, load_parameters

_NORMAL_STD = 0.2
"""As Megatron-Bridge, from which the host takes its names of methods."""

Init = Callable[[torch.Tensor, torch.Generator], object]


def _xavier(tensor: torch.Tensor, generator: torch.Generator) -> object:
    """Glorot and Bengio 2010, the normal distribution."""
    return torch.nn.init.xavier_normal_(tensor, generator=generator)


def _kaiming(tensor: torch.Tensor, generator: torch.Generator) -> object:
    """He et al. 2015, uniform with PEFT's slope: within 1 / sqrt(inputs)."""
    return torch.nn.init.kaiming_uniform_(tensor, a=math.sqrt(5), generator=generator)


def _normal(tensor: torch.Tensor, generator: torch.Generator) -> object:
    return tensor.normal_(0.0, _NORMAL_STD, generator=generator)


def _zero(tensor: torch.Tensor, generator: torch.Generator) -> object:
    return tensor.zero_()


_METHODS: dict[str, Init] = {
    "xavier": _xavier,
    "kaiming": _kaiming,
    "normal": _normal,
    "zero": _zero,
}


def first_adapters(
    held: Held, table: Table, place: Placement, config: PolicyConfig, spec: AdapterSpec
) -> dict[str, torch.dtype]:
    """Fill adapters with the values that they start from. Returns the dtypes in which they are
    handed over.

    ConversionError unless a directory to start from holds exactly the adapters of the table, and
    ConfigError for adapters of another rank or scale, or of other weights.
    """
    peft = config.megatron_cfg.peft
    if peft.start_from is None:
        return _draw(held, table, place, peft, config.seed, DTYPES[config.precision])
    root = expanded(peft.start_from)
    found = read_peft(root)
    with HfReader(root, ADAPTER_MODEL) as reader:
        _check_scale(root, found.uniform(reader.shapes), spec)
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
        return dict(reader.dtypes)


def _check_scale(root: Path, found: tuple[int, float], spec: AdapterSpec) -> None:
    """ConfigError unless adapters of this rank and alpha are those of the configuration."""
    for key, there, own in zip(("dim", "alpha"), found, (spec.rank, spec.alpha), strict=True):
        if there != own:
            raise ConfigError(
                f"policy.megatron_cfg.peft.{key} is {own}, but the adapters in {root} have "
                f"{there}: set it to that"
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


@torch.no_grad()
def _draw(
    held: Held, table: Table, place: Placement, peft: PeftConfig, seed: int, dtype: torch.dtype
) -> dict[str, torch.dtype]:
    """Each Hugging Face tensor is drawn whole in fp32, from the seed and its name, and sliced: the
    values do not depend on the layout.
    """
    arch = table.architecture
    for entry, parameter in held:
        shapes = entry.row.hf_shapes(arch)
        parts = [
            _drawn(name, shape, peft, seed) for name, shape in zip(entry.hf, shapes, strict=True)
        ]
        fill_shard(entry.row, arch, parameter.data, parts, *place.shard_of(entry.row))
    return dict.fromkeys([*table.hf_shapes(), *table.copies()], dtype)


def _drawn(name: str, shape: tuple[int, ...], peft: PeftConfig, seed: int) -> torch.Tensor:
    method = peft.lora_A_init_method if name.endswith(A) else peft.lora_B_init_method
    own = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(own[:8], "big") >> 1)
    tensor = torch.empty(shape)
    _METHODS[method](tensor, generator)
    return tensor
