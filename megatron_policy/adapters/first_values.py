"""The first values of adapters: drawn, or read from a directory that PEFT wrote."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import replace

import torch

from megatron_policy.adapters.loading import load_adapters
from megatron_policy.adapters.table import A, AdapterSpec, is_stacked
from megatron_policy.config import PolicyConfig
from megatron_policy.config.trained import PeftConfig
from megatron_policy.converters.architecture import Architecture
from megatron_policy.converters.rows import fill_parts, fill_shard
from megatron_policy.converters.rows.expert_rows import StackedAdapterA, StackedAdapterB
from megatron_policy.converters.table import Entry, Table
from megatron_policy.parallel.topology import Placement
from megatron_policy.weights.load import DTYPES, Held

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
    stack: tuple[tuple[str, ...], list[torch.Tensor]] = ((), [])
    for entry, parameter in held:
        if is_stacked(entry):
            if stack[0] != entry.hf:  # once for all its experts
                stack = entry.hf, [_drawn_stack(entry, arch, peft, seed)]
            parts = stack[1]
        else:
            shapes = zip(entry.hf, entry.row.hf_shapes(arch), strict=True)
            parts = [_drawn(name, shape, peft, seed) for name, shape in shapes]
        fill_shard(entry.row, arch, parameter.data, parts, *place.shard_of(entry.row))


def _drawn_stack(entry: Entry, arch: Architecture, peft: PeftConfig, seed: int) -> torch.Tensor:
    """The adapters of all experts of a stack, each drawn on its own."""
    (shape,), (name,) = entry.row.hf_shapes(arch), entry.hf
    whole, own = torch.empty(shape), entry.row.local_shape(arch, 1)
    assert arch.moe is not None and isinstance(entry.row, StackedAdapterA | StackedAdapterB)
    for expert in range(arch.moe.experts):
        row = replace(entry.row, expert=expert)
        drawn = _drawn(f"{expert} {name}", own, peft, seed)
        fill_parts(row, arch, [whole], drawn, 0, 1)
    return whole


def _drawn(name: str, shape: tuple[int, ...], peft: PeftConfig, seed: int) -> torch.Tensor:
    method = peft.lora_A_init_method if name.endswith(A) else peft.lora_B_init_method
    own = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(own[:8], "big") >> 1)
    tensor = torch.empty(shape)
    _METHODS[method](tensor, generator)
    return tensor
