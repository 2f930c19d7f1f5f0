"""Plans what a refit moves: which rank sends what, and in which order.

Pure: the plan depends on the table, the layout and dtypes only, and is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

import torch

from megatron_policy.config.layout import check_bucket
from megatron_policy.config.numbers import DEFAULT_BUCKET_BYTES
from megatron_policy.converters.rows.blocks import of_expert
from megatron_policy.converters.rows.expert_rows import Stacked
from megatron_policy.converters.table import EMBEDDING, HEAD, WEIGHT_DTYPES, Entry, Table
from megatron_policy.dtypes import name_dtype
from megatron_policy.errors import ConfigError, RefitError
from megatron_policy.parallel.topology import LayerSplit, Topology
from megatron_policy.refit.buffers import align
from megatron_policy.refit.plan import STREAM_ALIGNMENT, Exchange, Item, RefitPlan, RefitTensor
from megatron_policy.weights.geometry import largest_share


class _Chosen(NamedTuple):
    """One of the HF tensors of an entry, by its number: the stage that holds the entry's parameter,
    and the entry, or one of each of the ranks that share the tensor.
    """

    stage: int
    entries: tuple[Entry, ...]
    part: int

    @property
    def name(self) -> str:
        return self.entries[0].hf[self.part]


@dataclass(frozen=True)
class RefitModel:
    """The input of a plan.

    `dtypes` are those of the HF tensors in the checkpoint, `precision` is the dtype of the
    parameters in training.
    """

    table: Table
    split: LayerSplit
    dtypes: Mapping[str, torch.dtype]
    precision: torch.dtype
    topology: Topology

    @cached_property
    def hf_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of every HF tensor that the table has itself."""
        return self.table.hf_shapes()

    @property
    def apart(self) -> bool:
        """Whether other groups of ranks hold experts than hold all else."""
        return self.table.architecture.moe is not None and self.topology.experts_apart

    def find_owner(self, entry: Entry) -> int:
        """The expert-parallel rank that holds the entry's parameter; 0 if all do."""
        moe = self.table.architecture.moe
        if moe is None or entry.expert is None:
            return 0
        return self.topology.expert_owner(entry.expert, moe.experts)


def plan_refit(
    model: RefitModel,
    *,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    dtype: torch.dtype | None = None,
    stage: int | None = None,
    names: Collection[str] | None = None,
) -> RefitPlan:
    """The plan for all HF tensors, or those of one pipeline `stage`, or those of `names`.

    Tensors keep the checkpoint's dtype unless `dtype` names another; those that keep their own
    dtype in training keep it here too. ConfigError if the bucket is too small, RefitError for a
    name that the model does not have.
    """
    if dtype is not None and dtype not in WEIGHT_DTYPES:
        legal = ", ".join(map(name_dtype, WEIGHT_DTYPES))
        raise ConfigError(f"weights cannot be handed over as {dtype}; legal: torch's {legal}")
    check_bucket(bucket_bytes, model.topology)
    owned = sorted(
        ((find_stage(entry, model.split), entry) for entry in model.table.sent(model.dtypes)),
        key=lambda pair: pair[0],
    )
    wanted = None if names is None else frozenset(names)
    if wanted is not None:
        known = {name for entry in model.table.sent(model.dtypes) for name in entry.hf}
        if unknown := sorted(wanted - known):
            raise RefitError(
                f"this {model.table.family} model has no HF tensor {', '.join(unknown[:8])}; "
                "ask for names that prepare_refit_info lists"
            )
    chosen = [
        _Chosen(at, (entry,), part)
        for at, entry in owned
        if stage is None or at == stage
        for part, name in enumerate(entry.hf)
        if wanted is None or name in wanted
    ]
    stages = tuple(range(len(model.split.stages))) if stage is None else (stage,)
    exchanges = tuple(_exchanges(chosen, model, dtype, stages, bucket_bytes))
    return RefitPlan(exchanges, stages, bucket_bytes)


def _exchanges(
    chosen: Sequence[_Chosen],
    model: RefitModel,
    dtype: torch.dtype | None,
    stages: tuple[int, ...],
    bucket_bytes: int,
) -> Iterator[Exchange]:
    """What tensor-parallel ranks hold between them; and what other groups do: tensors with all
    experts of a layer, then those of one expert, owner after owner, so that a round has few.
    """
    together: list[_Chosen] = []
    stacked: list[_Chosen] = []
    single: list[_Chosen] = []
    for each in chosen:
        row, kind = each.entries[0].row, together
        if model.apart and of_expert(row.megatron):
            kind = stacked if isinstance(row, Stacked) else single
        kind.append(each)
    tp, ep, etp = model.topology.tp, model.topology.ep, model.topology.expert_tp

    def items(chosen: Sequence[_Chosen], shards: int) -> tuple[Item, ...]:
        return tuple(_items(chosen, model, dtype, shards))

    yield Exchange(items(together, tp), tp, stages, bucket_bytes)
    if stacked:
        in_turn: list[_Chosen] = []  # the experts of each tensor, in rounds of one of each owner
        for _, same in groupby(stacked, key=lambda each: each.name):
            experts = list(same)
            share = len(experts) // ep
            entries = [tuple(e.entries[0] for e in experts[n::share]) for n in range(share)]
            in_turn += [experts[0]._replace(entries=of_round) for of_round in entries]
        shared = items(in_turn, etp)
        yield Exchange(shared, ep * etp, stages, bucket_bytes, sharing=ep, of_experts=True)
    if single:
        single.sort(key=lambda each: (each.stage, model.find_owner(each.entries[0])))
        owned = items(single, etp)
        yield Exchange(owned, etp, stages, bucket_bytes, owners=ep, of_experts=True)


def find_stage(entry: Entry, split: LayerSplit) -> int:
    """The pipeline stage that holds the entry's parameter."""
    if entry.where == EMBEDDING:
        return 0
    if entry.where == HEAD:
        return len(split.stages) - 1
    assert entry.layer is not None
    return split.owner(entry.layer)[0]


def _items(
    chosen: Sequence[_Chosen], model: RefitModel, dtype: torch.dtype | None, shards: int
) -> Iterator[Item]:
    architecture = model.table.architecture
    start, tensor = 0, RefitTensor("", (), model.precision, 0)
    for index, each in enumerate(chosen):
        (stage, entries, part), name, row = each, each.name, each.entries[0].row
        first = tensor.name != name
        if first:
            target = model.dtypes[name] if dtype is None or row.keeps_dtype else dtype
            shape = model.hf_shapes.get(name) or row.hf_shapes(architecture)[part]
            tensor = RefitTensor(name, shape, target, stage)
        held = torch.float32 if row.keeps_dtype else model.precision
        item = Item(
            tensor=tensor,
            entries=entries,
            part=part,
            # The narrower of the two: casting gives the same on either side of the exchange.
            sent_dtype=tensor.dtype if tensor.dtype.itemsize < held.itemsize else held,
            start=start,
            elements=largest_share(row, architecture, part, shards),
            first=first,
            last=index + 1 == len(chosen) or chosen[index + 1].name != name,
            owner=model.find_owner(entries[0]) if len(entries) == 1 else 0,
        )
        start = align(item.end, STREAM_ALIGNMENT)
        yield item
