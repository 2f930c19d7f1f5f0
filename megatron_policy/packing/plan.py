"""Which rows of a batch make which microbatch, as the batch itself carries it, and how the rows of
a global batch are planned over data-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_policy.errors import BatchError
from megatron_policy.packing.batching import Batching
from megatron_policy.packing.bins import BALANCED, Bins, checked_algorithm, pack
from megatron_policy.packing.cost import Cost
from megatron_policy.packing.dynamic import dynamic_bins
from megatron_policy.packing.lockstep import assign_to_ranks, balanced_shares


@dataclass(frozen=True)
class MicrobatchSpan:
    """One microbatch: rows `[start, end)` of a data-parallel rank's share of a global batch.

    `length` is the number of positions: of each row if they are padded, of all together if they are
    packed. A rank without rows for a microbatch has an empty span of length 0.
    """

    start: int
    end: int
    length: int


@dataclass(frozen=True)
class Plan:
    """The microbatches of one data-parallel rank, of every global batch in its data in order."""

    batches: tuple[tuple[MicrobatchSpan, ...], ...]
    packed: bool

    @property
    def rows(self) -> tuple[int, ...]:
        """This rank's rows of each global batch."""
        return tuple(spans[-1].end if spans else 0 for spans in self.batches)

    @classmethod
    def of(cls, data: Any) -> Plan | None:
        """Read the plan that a batch carries under the host's names, made by us or by the host;
        None without one.

        `micro_batch_indices` is, per global batch, a list of [start, end], `micro_batch_lengths`
        the length of each. Packed batches also have `elem_counts_per_gb`, the rows per global batch
        (NeMo RL, `nemo_rl/distributed/batched_data_dict.py`). BatchError unless they name every row
        once, in order, and are long enough for their rows.
        """
        indices = getattr(data, "micro_batch_indices", None)
        if indices is None:
            return None
        lengths = getattr(data, "micro_batch_lengths", None)
        counts = getattr(data, "elem_counts_per_gb", None)
        try:
            batches = tuple(
                tuple(
                    MicrobatchSpan(int(start), int(end), int(length))
                    for (start, end), length in zip(pairs, each, strict=True)
                )
                for pairs, each in zip(indices, lengths, strict=True)  # type: ignore[arg-type]
            )
        except (TypeError, ValueError) as error:
            raise BatchError(
                f"micro_batch_lengths {lengths} do not match micro_batch_indices {indices}: each "
                "global batch has a list of [start, end] and of as many lengths"
            ) from error
        plan = cls(batches, packed=counts is not None)
        plan._check(data.size, counts, data.get("input_lengths"))
        return plan

    def attach(self, data: Any) -> None:
        """Store the plan in a batch, under the host's names."""
        data.micro_batch_indices = [[[s.start, s.end] for s in spans] for spans in self.batches]
        data.micro_batch_lengths = [[span.length for span in spans] for spans in self.batches]
        data.elem_counts_per_gb = list(self.rows) if self.packed else None

    def _check(self, size: int, counts: Sequence[int] | None, lengths: Any) -> None:
        for number, spans in enumerate(self.batches):
            at = 0
            for span in spans:
                if span.start != at or span.end < at:
                    raise BatchError(
                        f"microbatches of global batch {number} do not name every row once, in "
                        f"order: after {at} rows comes [{span.start}, {span.end})"
                    )
                at = span.end
        if sum(self.rows) != size or (counts is not None and tuple(counts) != self.rows):
            raise BatchError(
                f"the plan's global batches have {list(self.rows)} rows, elem_counts_per_gb are "
                f"{counts}, and the data have {size} rows: they must agree"
            )
        if lengths is None:
            return
        lengths = lengths.tolist() if hasattr(lengths, "tolist") else lengths
        first = 0
        for spans, rows in zip(self.batches, self.rows, strict=True):
            for span in spans:
                taken = lengths[first + span.start : first + span.end]
                needed = sum(taken) if self.packed else max(taken, default=0)
                if needed > span.length:
                    raise BatchError(
                        f"rows {first + span.start} to {first + span.end - 1} need {needed} "
                        f"positions, but their microbatch has {span.length} (micro_batch_lengths)"
                    )
            first += rows


def consecutive(plans: Sequence[Plan]) -> Plan:
    """One rank's plans of several global batches, one after another."""
    return Plan(tuple(s for plan in plans for s in plan.batches), any(p.packed for p in plans))


@dataclass(frozen=True)
class RankPlan:
    """One data-parallel rank's part of a global batch: which rows, in the order of its plan."""

    rows: tuple[int, ...]
    plan: Plan


@dataclass(frozen=True)
class _Rows:
    """The rows of a global batch: positions of each with its padding, patches, and their cost."""

    sizes: Sequence[int]
    patches: Sequence[int]
    cost: Cost
    packed: bool

    def count_positions(self, rows: Sequence[int]) -> int:
        """Of a bin of these rows if they are packed, of each of them if not."""
        sizes = [self.sizes[row] for row in rows]
        return sum(sizes) if self.packed else max(sizes, default=0)

    def count_patches(self, rows: Sequence[int]) -> int:
        """Of a bin of these rows."""
        return sum(self.patches[row] for row in rows)

    def sum_costs(self, rows: Sequence[int]) -> float:
        """Of a bin of these rows."""
        if self.packed:
            return sum(self.cost(self.sizes[row], self.patches[row]) for row in rows)
        pictures = self.cost(0, self.count_patches(rows))
        return len(rows) * self.cost(self.count_positions(rows)) + pictures


def plan_rows(
    lengths: Sequence[int],
    settings: Batching,
    ranks: int,
    multiple: int,
    cost: Cost,
    width: int | None = None,
    patches: Sequence[int] | None = None,
) -> list[RankPlan]:
    """Every rank's part of the rows of one global batch, with the same number of microbatches each,
    a multiple of `multiple`. Total costs, and the costs of every rank's microbatch i, are as equal
    as the algorithm allows.

    `width` is that of the tensor whose rows have these `lengths`: padding does not exceed it; their
    pictures have these `patches`. Each rank computes its costliest microbatch first. Rows of a
    group share a microbatch. BatchError naming a row or a group that is too long.
    """
    assert settings.kind != "padded", "microbatches of a number of rows need no plan"
    patches = [0] * len(lengths) if patches is None else patches
    settings.check(lengths, width, patches)
    packed, group = settings.kind == "packed", settings.rows_per_group
    rows = _Rows([settings.size(each, width) for each in lengths], patches, cost, packed)
    groups = [range(first, first + group) for first in range(0, len(lengths), group)]
    taken = [rows.count_positions(own) for own in groups]
    seen = [rows.count_patches(own) for own in groups]
    costs = [rows.sum_costs(own) for own in groups]
    if packed:
        taken = [settings.room(*own) for own in zip(taken, seen, strict=True)]
    if packed and checked_algorithm(settings.algorithm) == BALANCED and ranks > 1:
        shares = balanced_shares(taken, costs, settings.capacity, ranks, multiple)
        return [_share(_rows_of(share, groups), rows) for share in shares]
    total = ranks * multiple
    if packed:
        bins = pack(taken, settings.capacity, settings.algorithm, multiple=total, costs=costs)
    else:
        tokens = settings.capacity // group
        bins = dynamic_bins(taken, tokens, total, cost, seen, settings.patches)
    bins = _rows_of(bins, groups)
    assigned = assign_to_ranks([rows.sum_costs(bin_) for bin_ in bins], ranks)
    return [_share([bins[b] for b in numbers], rows) for numbers in assigned]


def _rows_of(bins: Bins, groups: Sequence[Sequence[int]]) -> Bins:
    """The bins of groups as bins of their rows."""
    return [[row for number in bin_ for row in groups[number]] for bin_ in bins]


def _share(bins: Bins, rows: _Rows) -> RankPlan:
    ordered = sorted((sorted(bin_) for bin_ in bins), key=lambda b: (-rows.sum_costs(b), b))
    spans, start = [], 0
    for bin_ in ordered:
        end = start + len(bin_)
        spans.append(MicrobatchSpan(start, end, rows.count_positions(bin_)))
        start = end
    return RankPlan(
        tuple(row for bin_ in ordered for row in bin_), Plan((tuple(spans),), rows.packed)
    )
