"""Low-rank adapters beside Megatron-Core's linear layers: `W x + scale * B A x`.

Source: Hu et al. 2021, "LoRA". Between tensor-parallel ranks only vectors of the adapters' rank are
exchanged. Shapes: R rank of the adapters, N how many parts of a fused layer have one of their own;
I inputs and O outputs of this rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_policy.adapters.rows import Concatenated
from megatron_policy.adapters.stacks import is_of_tower
from megatron_policy.adapters.table import (
    PREFIX,
    AdapterSpec,
    B,
    drop_head,
    name_module,
    number_outputs,
)
from megatron_policy.config.trained import PeftConfig
from megatron_policy.converters.table import Entry, Table
from megatron_policy.device import current_device
from megatron_policy.engines.megatron.layers.norm import mark_replica
from megatron_policy.errors import ConfigError
from megatron_policy.memory.pinned_pool import HostCopies
from megatron_policy.parallel.topology import Placement
from megatron_policy.weights.load import Held, canonical_name

_PIECE = 2**24
"""Elements of a weight that are merged at a time: what fp32 copies of it take."""


class OutputParts(NamedTuple):
    """Which of Q rows of a B belong to which of its parts, bool `[Q, N]`, and which of the layer's
    `outputs` they are, `[Q]`; None: all, in order.
    """

    of_part_QN: torch.Tensor
    places_Q: torch.Tensor | None
    outputs: int


@dataclass
class Switch:
    """Whether adapters take part."""

    on: bool = True


class LowRank(torch.nn.Module):
    """The adapter of one linear layer: `a` `[N R, I]` and `b` `[Q, R]`, whose Q rows are of all
    outputs, or of the outputs of some `parts` of a fused layer.
    """

    def __init__(
        self,
        linear: torch.nn.Module,
        config: TransformerConfig,
        peft: PeftConfig,
        shapes: tuple[tuple[int, ...], tuple[int, ...]],
        parts: OutputParts | None,
        switch: Switch,
    ) -> None:
        super().__init__()
        assert peft.dim is not None and peft.alpha is not None
        options: dict[str, Any] = {"device": current_device(), "dtype": config.params_dtype}
        self.a, self.b = (torch.nn.Parameter(torch.empty(*each, **options)) for each in shapes)
        self.parts = parts
        self.scale = peft.alpha / peft.dim
        self.dropout, self.before = peft.dropout, peft.dropout_position == "pre"
        self.switch = switch
        self.splits_outputs = isinstance(linear, ColumnParallelLinear)
        self.splits_inputs = isinstance(linear, RowParallelLinear)
        self.group = getattr(linear, "tp_group", None)
        # Experts' inputs and outputs are exchanged by the dispatcher, outside the layer.
        self.exchanged_outside = bool(getattr(linear, "explicit_expert_comm", False))
        split_sequence = config.sequence_parallel and not self.exchanged_outside
        self.sequence_parallel = bool(split_sequence)
        if split_sequence:
            # Applied to this rank's positions, so that gradients are summed over ranks.
            applied = [] if self.splits_inputs else [self.a]
            applied += [] if self.splits_outputs else [self.b]
            for parameter in applied:
                parameter.sequence_parallel = True  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., O]` for `[..., I]`, at the positions of the layer's own inputs and outputs."""
        a_SI, b_QR = self.a, self.b
        if self.exchanged_outside and self.splits_outputs:
            a_SI = copy_to_tensor_model_parallel_region(a_SI, self.group)
        elif self.exchanged_outside:
            b_QR = copy_to_tensor_model_parallel_region(b_QR, self.group)
        if self.before:
            x = self._drop(x, self.sequence_parallel or self.splits_inputs)
        inner = self._exchange(F.linear(x, a_SI)) * self.scale
        y = F.linear(inner, self._spread(b_QR))
        if self.before:
            return y
        whole = self.splits_inputs and not self.sequence_parallel
        return self._drop(y, not whole)

    def merged(self, weight_OI: torch.Tensor) -> torch.Tensor:
        """A new tensor `weight + scale * B A`, computed in fp32; the weight is unchanged."""
        out = torch.empty_like(weight_OI)
        a_SI, b_OS = self.a.detach().float(), self._spread(self.b.detach()).float() * self.scale
        rows = max(_PIECE // max(weight_OI.size(1), 1), 1)
        for first in range(0, len(out), rows):
            piece = slice(first, first + rows)
            out[piece] = torch.addmm(weight_OI[piece].float(), b_OS[piece], a_SI).to(out.dtype)
        return out

    def _exchange(self, inner: torch.Tensor) -> torch.Tensor:
        """What B is applied to: of all positions if this rank has some outputs, else the sum over
        the ranks that have some inputs.
        """
        if self.exchanged_outside or not (self.splits_outputs or self.splits_inputs):
            return inner
        whole: torch.Tensor
        if self.splits_outputs and self.sequence_parallel:
            whole = gather_from_sequence_parallel_region(
                inner, tensor_parallel_output_grad=True, group=self.group
            )
        elif self.splits_outputs:
            whole = copy_to_tensor_model_parallel_region(inner, self.group)
        elif self.sequence_parallel:
            whole = reduce_scatter_to_sequence_parallel_region(inner, group=self.group)
        else:
            whole = reduce_from_tensor_model_parallel_region(inner, self.group)
        return whole

    def _spread(self, b_QR: torch.Tensor) -> torch.Tensor:
        """`[O, N R]`: each output's row of B in the columns of its own part, zeros in the rest."""
        if self.parts is None:
            return b_QR
        of_part_QN, places_Q, outputs = self.parts
        spread = (b_QR.unsqueeze(1) * of_part_QN.unsqueeze(-1).to(b_QR.dtype)).flatten(1)
        if places_Q is None:
            return spread
        return spread.new_zeros(outputs, spread.size(1)).index_copy(0, places_Q, spread)

    def _drop(self, values: torch.Tensor, differs: bool) -> torch.Tensor:
        """With elements dropped; tensor-parallel ranks whose values differ draw for themselves."""
        if not (self.training and self.dropout):
            return values
        with get_cuda_rng_tracker().fork() if differs else nullcontext():
            return F.dropout(values, self.dropout)


@dataclass(frozen=True)
class MegatronAdapters:
    """The adapters of a rank's model, as `interfaces.engine.Adapters`."""

    table: Table
    held: Held
    dtypes: Mapping[str, torch.dtype]
    spec: AdapterSpec
    head: HostCopies
    """The base's values of a scalar head, which is trained in full; of nothing without one."""
    modules: Mapping[str, LowRank]
    switch: Switch

    def merged(self, entry: Entry, weight: torch.Tensor) -> torch.Tensor | None:
        adapter = self.modules.get(entry.megatron)
        if adapter is None or not self.switch.on:
            return None if adapter is None else weight
        return adapter.merged(weight)

    @contextmanager
    def off(self) -> Iterator[None]:
        with self.head.exchanged():
            self.switch.on = False
            try:
                yield
            finally:
                self.switch.on = True


def held_adapters(everything: Held, adapters: Table) -> tuple[Held, HostCopies]:
    """The adapters among this rank's parameters, which have their values from the checkpoint, and
    its scalar head; then the values of the head.
    """
    entries = {entry.megatron: entry for entry in adapters.entries}
    held = [(entries[e.megatron], p) for e, p in everything if e.megatron in entries]
    head = [parameter for entry, parameter in held if not entry.adapts]
    return held, HostCopies(head, max(sum(p.nbytes for p in head), 1))


def install_adapters(
    chunks: Sequence[torch.nn.Module],
    table: Table,
    adapters: Table | None,
    place: Placement,
    config: TransformerConfig,
    peft: PeftConfig,
) -> tuple[dict[str, LowRank], Switch]:
    """Put `adapters`, if any, beside the linear layers of `chunks`, a model of `table`,
    uninitialised. Returns those of this rank by the names of the weights they adapt.
    """
    found: dict[str, LowRank] = {}
    switch = Switch()
    if adapters is None:
        return found, switch
    bases = {entry.megatron: entry for entry in table.entries}
    sides: dict[str, list[Entry]] = defaultdict(list)
    for entry in drop_head(adapters).entries:
        sides[entry.adapts].append(entry)
    moe = table.architecture.moe
    experts = range(0) if moe is None else place.experts(moe.experts)
    for index, chunk in enumerate(chunks):
        layers = place.layers(index)
        offsets = (layers.start if len(layers) else 0, experts.start)
        for path, module in list(chunk.named_modules()):
            name = canonical_name(f"{path}.weight", *offsets)
            if name in sides:
                into, out = sides[name]
                arch, shard = adapters.architecture, place.shard_of(into.row)
                shapes = (
                    into.row.local_shape(arch, shard.size),
                    out.row.local_shape(arch, shard.size),
                )
                own = isinstance(into.row, Concatenated)
                parts = _parts(table, bases[name], out, place) if own else None
                adapter = LowRank(module, config, peft, shapes, parts, switch)
                if is_of_tower(into):
                    _check_linear(module, bases[name])
                    for parameter in adapter.parameters():
                        mark_replica(config, parameter)
                module.add_module("adapter", adapter)
                module.register_forward_hook(_add_adapter)
                found[name] = adapter
    return found, switch


def _parts(table: Table, base: Entry, out: Entry, place: Placement) -> OutputParts:
    """Which outputs of this rank belong to which part of a fused layer."""
    shard = place.shard_of(out.row)
    own_Q2, all_O2 = (number_outputs(each.row, table.architecture, *shard) for each in (out, base))
    part_Q = own_Q2[:, 0]
    of_part_QN = part_Q.unsqueeze(1) == torch.arange(len(out.hf))
    if len(out.hf) == len(base.hf):
        return OutputParts(of_part_QN.to(current_device()), None, len(all_O2))
    modules = [PREFIX + name_module(name, table) + B for name in base.hf]
    own_Q2[:, 0] = torch.tensor([modules.index(name) for name in out.hf])[part_Q]
    at = {tuple(each): place for place, each in enumerate(all_O2.tolist())}
    places_Q = torch.tensor([at[tuple(each)] for each in own_Q2.tolist()])
    device = current_device()
    return OutputParts(of_part_QN.to(device), places_Q.to(device), len(all_O2))


def _check_linear(module: torch.nn.Module, base: Entry) -> None:
    """ConfigError unless a module of a tower is a plain linear layer."""
    if type(module) is not torch.nn.Linear:
        raise ConfigError(
            f"policy.megatron_cfg.peft names the module of {base.hf[0]}, which is a "
            f"{type(module).__name__}: adapters are on linear layers, so leave it out or put it "
            "into exclude_modules"
        )


def _add_adapter(linear: Any, given: tuple[torch.Tensor, ...], result: Any) -> Any:
    """The layer's result with that of its adapter. Megatron-Core returns a bias besides."""
    adapter = linear.adapter
    if not adapter.switch.on:
        return result
    if isinstance(result, torch.Tensor):  # of a tower
        return result + adapter(given[0])
    output, bias = result
    return output + adapter(given[0]), bias
