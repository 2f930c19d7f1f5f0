"""Bytes that a rank holds from step to step: parameters, gradients and the optimizer's state.

Source of the sizes of buffers: Megatron-Core's `param_and_grad_buffer`, `distrib_optimizer` and
`optimizer` modules (0.16 to 0.19).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from typing import NamedTuple

from megatron_policy.config import PolicyConfig
from megatron_policy.config.param_groups import ParamGroups
from megatron_policy.converters.architecture import Architecture
from megatron_policy.converters.architecture.part import FP32
from megatron_policy.converters.families.shared.pictures import PARAMETERS
from megatron_policy.converters.rows import TowerQkv
from megatron_policy.converters.rows.blocks import Row, of_expert
from megatron_policy.converters.rows.expert_rows import Stacked
from megatron_policy.converters.table import EMBEDDING, LAYER, Entry, Table
from megatron_policy.parallel.topology import LayerSplit, Topology

WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of an element, by the name of its dtype."""

_PARAMETER, _BUCKET = 64, 128
"""Elements to whose multiples the distributed optimizer aligns parameters and ends of buckets."""


@dataclass(frozen=True)
class States:
    """Bytes on one rank. With the distributed optimizer, its `main_parameters` and `moments` are
    those of an equal share of the gradient buffers, alignment included.
    """

    parameters: int = 0
    gradients: int = 0
    main_parameters: int = 0
    """fp32 copies that the optimizer updates."""
    moments: int = 0
    step: int = 0
    """Only during the optimizer's step: fp32 copies of gradients that are kept in fewer bits."""
    expert_parameters: int = 0
    """Of `parameters`, those of experts that other ranks hold copies of than of all else."""
    expert_gradients: int = 0
    expert_optimizer: int = 0
    """Of `main_parameters` and `moments`, those of the same experts."""
    frozen: int = 0
    """Of `parameters`, those that are not trained."""
    copied: int = 0
    """Of parameters and optimizer, on all ranks that share them, what other stages or other
    tensor-parallel ranks save.
    """
    expert_copied: int = 0
    """The same of experts that other ranks hold copies of than of all else."""

    @property
    def resident(self) -> int:
        """Bytes that are held all the time."""
        return self.parameters + self.gradients + self.main_parameters + self.moments

    def __add__(self, other: States) -> States:
        return States(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(States)))


@dataclass(frozen=True)
class Precisions:
    """What decides the bytes of states; `trained` is False for a policy without optimizer."""

    parameter: int
    gradient: int
    moments: int
    distributed: bool
    trained: bool = True
    groups: ParamGroups = field(default_factory=ParamGroups)

    @property
    def saved(self) -> int:
        """Bytes of a trained element in a checkpoint, with its optimizer's state."""
        main = FP32 if self.parameter != FP32 else 0
        return self.parameter + main + FP32 * self.moments

    @classmethod
    def of(cls, config: PolicyConfig, trained: bool = True) -> Precisions:
        megatron = config.megatron_cfg
        optimizer, ddp = megatron.optimizer, megatron.distributed_data_parallel_config
        width = WIDTHS[config.precision]
        moments = 2 if optimizer.optimizer == "adam" else int(optimizer.sgd_momentum > 0)
        return cls(
            parameter=width,
            gradient=FP32 if ddp.grad_reduce_in_fp32 else width,
            moments=moments,
            distributed=optimizer.use_distributed_optimizer,
            trained=trained,
            groups=ParamGroups.of(megatron),
        )


class _Sizes(NamedTuple):
    """Elements of parameters, and with each rounded up to its alignment."""

    exact: int = 0
    aligned: int = 0

    def plus(self, other: _Sizes, times: int = 1) -> _Sizes:
        return _Sizes(self.exact + times * other.exact, self.aligned + times * other.aligned)


class _Held(NamedTuple):
    """Sizes of what a rank holds of a part of the model, by who else holds it."""

    dense: _Sizes = _Sizes()
    expert: _Sizes = _Sizes()
    """Of one expert."""
    shared: _Sizes = _Sizes()
    """The embedding, if another stage has a copy of it."""
    wide: _Sizes = _Sizes()
    """Of dense parameters that are held in fp32 whatever the precision."""
    fixed: int = 0
    """Elements that are held in fp32 and not trained."""
    frozen: int = 0
    frozen_expert: int = 0
    """Of one expert."""
    copied: int = 0
    """Elements of trained parameters of which another stage holds the original, or which another
    tensor-parallel rank saves, since all hold them alike.
    """
    copied_expert: int = 0
    """Of one expert."""

    def plus(self, other: _Held) -> _Held:
        dense, expert = self.dense.plus(other.dense), self.expert.plus(other.expert)
        shared, wide = self.shared.plus(other.shared), self.wide.plus(other.wide)
        return _Held(dense, expert, shared, wide, *map(operator.add, self[4:], other[4:]))


_Rows = tuple[tuple[Row, bool], ...]


@dataclass(frozen=True)
class ModelRows:
    """The rows of a model by layer, each expert's once: what a rank holds follows from them."""

    architecture: Architecture
    layers: tuple[tuple[Entry, ...], ...]
    embedding: tuple[Entry, ...]
    head: tuple[Entry, ...]
    _sizes: dict[tuple[object, ...], _Held] = field(default_factory=dict, compare=False)
    _same: dict[_Rows, _Rows] = field(default_factory=dict, compare=False)
    _by_groups: dict[ParamGroups, tuple[list[_Rows], _Rows, _Rows, _Rows]] = field(
        default_factory=dict, compare=False
    )

    @classmethod
    def of(cls, table: Table) -> ModelRows:
        """The rows of a bound table; every expert of a layer has the same ones."""
        layers: list[list[Entry]] = [[] for _ in range(table.architecture.num_layers)]
        embedding: list[Entry] = []
        head: list[Entry] = []
        for entry in table.entries:
            if entry.expert:
                continue
            if entry.where == LAYER:
                assert entry.layer is not None
                layers[entry.layer].append(entry)
            else:
                (embedding if entry.where == EMBEDDING else head).append(entry)
        return cls(table.architecture, tuple(map(tuple, layers)), tuple(embedding), tuple(head))

    def held(
        self, layers: range, first: bool, last: bool, topology: Topology, groups: ParamGroups
    ) -> _Held:
        """What a rank holds of a model chunk; `first` has the embedding, `last` the head."""
        of_layers, embedding, owned_head, whole_head = self._parts(groups)
        parts = [of_layers[layer] for layer in layers]
        parts += [embedding] if first else []
        # A chunk that has the embedding itself needs no tied copy of it.
        parts += [owned_head if first else whole_head] if last else []
        total = _Held()
        for rows in parts:
            key = id(rows), topology.tp, topology.expert_tp, topology.pp > 1
            if key not in self._sizes:
                self._sizes[key] = self._measured(rows, topology)
            total = total.plus(self._sizes[key])
        return total

    def _parts(self, groups: ParamGroups) -> tuple[list[_Rows], _Rows, _Rows, _Rows]:
        """Of each layer, the embedding, the head's own and all of the head: rows, and whether each
        is frozen. Equal ones are one object, so that they are measured once.
        """
        if groups not in self._by_groups:

            def rows(entries: Iterable[Entry]) -> _Rows:
                found = tuple((entry.row, groups.frozen(entry)) for entry in entries)
                return self._same.setdefault(found, found)

            self._by_groups[groups] = (
                [rows(layer) for layer in self.layers],
                rows(self.embedding),
                rows(entry for entry in self.head if entry.row.owns),
                rows(self.head),
            )
        return self._by_groups[groups]

    def hf_elements(self) -> tuple[int, int]:
        """Elements of all HF tensors that a refit sends, and of the largest."""
        arch, total, largest = self.architecture, 0, 0
        experts = 1 if arch.moe is None else arch.moe.experts
        for entries in (self.embedding, *self.layers, self.head):
            for row in (e.row for e in entries if e.row.owns and not e.adapts):
                if isinstance(row, TowerQkv) and row.number:
                    continue  # its tensor is that of the first of them
                single = of_expert(row.megatron) and not isinstance(row, Stacked)
                for shape in row.hf_shapes(arch):
                    elements = math.prod(shape)
                    total += elements * (experts if single else 1)
                    largest = max(largest, elements)
        return total, largest

    def _measured(self, rows: Iterable[tuple[Row, bool]], topology: Topology) -> _Held:
        """Of rows and whether each is frozen."""
        arch, total = self.architecture, _Held()
        for row, frozen in rows:
            expert = of_expert(row.megatron)
            shards = topology.expert_tp if expert else topology.tp
            elements = math.prod(row.local_shape(arch, shards))
            size = _Sizes(elements, -(-elements // _PARAMETER) * _PARAMETER)
            if not (row.owns or frozen):
                total = total._replace(copied=total.copied + elements)
            elif not frozen and row.learnt and elements == math.prod(row.local_shape(arch, 1)):
                others = elements * (shards - 1) // shards
                kind = "copied_expert" if expert else "copied"
                total = total._replace(**{kind: getattr(total, kind) + others})
            if frozen or not row.learnt:
                kept = "frozen_expert" if expert else "frozen"
                kind = "fixed" if row.keeps_dtype else kept
                total = total._replace(**{kind: getattr(total, kind) + elements})
            elif row.keeps_dtype:
                total = total._replace(wide=total.wide.plus(size))
            elif expert:
                total = total._replace(expert=total.expert.plus(size))
            elif topology.pp > 1 and (arch.tied or arch.mtp_layers) and _is_embedding(row):
                total = total._replace(shared=total.shared.plus(size))
            else:
                total = total._replace(dense=total.dense.plus(size))
        return total


def _is_embedding(row: Row) -> bool:
    """Whether the parameter is the embedding, or the copy of it that the last stage holds."""
    own = row.megatron.startswith("embedding.") and not row.megatron.startswith(PARAMETERS)
    return own or not row.owns


def stage_states(
    rows: ModelRows, split: LayerSplit, topology: Topology, stage: int, precisions: Precisions
) -> States:
    """What each rank of a pipeline stage holds; ranks of a stage hold equally much.

    Overlapped reductions use several buckets in place of one, whose ends are aligned as well; that
    is less than one part in 10,000 and not counted.
    """
    moe = rows.architecture.moe
    experts = 0 if moe is None else moe.experts // topology.ep
    total = States()
    for chunk, layers in enumerate(split.stages[stage]):
        first = stage == 0 and chunk == 0
        last = stage == topology.pp - 1 and chunk == topology.vpp - 1
        held = rows.held(layers, first, last, topology, precisions.groups)
        total += _chunk_states(held, experts, topology, precisions)
    return total


def _chunk_states(held: _Held, experts: int, topology: Topology, precisions: Precisions) -> States:
    """Of one model chunk: what is not trained, and Megatron-Core's gradient buffers, which experts
    have for themselves if other ranks hold copies of them.
    """
    frozen = held.frozen + held.frozen_expert * experts
    fixed = held.fixed * FP32 + frozen * precisions.parameter
    own = _Sizes().plus(held.expert, experts)
    if not precisions.trained:
        elements = held.dense.exact + held.shared.exact + own.exact
        every = fixed + elements * precisions.parameter + held.wide.exact * FP32
        return States(parameters=every, frozen=every)
    replicas = topology.dp * topology.cp
    copied = held.copied * precisions.saved
    of_experts = held.copied_expert * experts * precisions.saved
    if not topology.experts_apart:
        copied, of_experts = copied + of_experts, 0
    total = States(parameters=fixed, frozen=fixed, copied=copied, expert_copied=of_experts)
    if topology.experts_apart:
        apart = _trained([own], topology.edp, precisions)
        total += replace(
            apart,
            expert_parameters=apart.parameters,
            expert_gradients=apart.gradients,
            expert_optimizer=apart.main_parameters + apart.moments,
        )
        own = _Sizes()
    dense, wide = held.dense.plus(own), held.wide
    if precisions.parameter == FP32:
        dense, wide = dense.plus(wide), _Sizes()
    # What is held in another dtype has a buffer of its own.
    total += _trained([wide], replicas, replace(precisions, parameter=FP32, gradient=FP32))
    return total + _trained([dense, held.shared], replicas, precisions)


def _trained(buckets: list[_Sizes], replicas: int, precisions: Precisions) -> States:
    """A buffer over parameters of these sizes, which `replicas` ranks hold."""
    elements, shares = sum(bucket.exact for bucket in buckets), 1
    if precisions.distributed:
        unit = math.lcm(replicas, _BUCKET)
        elements = sum(-(-bucket.aligned // unit) * unit for bucket in buckets)
        shares = replicas
    own = elements // shares
    separate = precisions.parameter != FP32
    return States(
        parameters=elements * precisions.parameter,
        gradients=elements * precisions.gradient,
        main_parameters=own * FP32 if separate else 0,
        moments=own * FP32 * precisions.moments,
        step=own * FP32 if precisions.gradient != FP32 else 0,
    )


def written_bytes(
    states: States, topology: Topology, distributed: bool, adapters: bool = False
) -> int:
    """What a rank writes to a checkpoint: ranks share what they hold copies of, which states of an
    optimizer that is not `distributed` are too. Beside `adapters` no frozen weights are written.
    """
    held, experts = states.parameters - states.frozen * adapters, states.expert_parameters
    own = states.main_parameters + states.moments
    if not distributed:
        held, experts, own = held + own, experts + states.expert_optimizer, 0
    shared = (held - experts - states.copied) // (topology.dp * topology.cp)
    return own + shared + (experts - states.expert_copied) // topology.edp
