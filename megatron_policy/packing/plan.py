"""Which rows of a batch make which microbatch, as the batch itself carries it, and how the rows of
a global batch are planned over data-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_policy.errors import BatchError
from megatron_policy.packing.balance import levelled
from megatron_policy.packing.batching import Batching
from megatron_policy.packing.bins import BALANCED, Bins, checked_algorithm, pack
from megatron_policy.packing.cost import Cost
from megatron_policy.packing.dynamic import dynamic_bins


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
        if lengths is not None:
            self._check_lengths(lengths.tolist() if hasattr(lengths, "tolist") else lengths)

    def _check_lengths(self, lengths: Sequence[int]) -> None:
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


def plan_rows(
    lengths: Sequence[int],
    settings: Batching,
    ranks: int,
    multiple: int,
    cost: Cost,
    width: int | None = None,
) -> list[RankPlan]:
    """Every rank's part of the rows of one global batch, with the same number of microbatches each,
    a multiple of `multiple`, and costs as equal as the algorithm allows.

    `width` is that of the tensor whose rows have these `lengths`: padding does not exceed it. Each
    rank computes its costliest microbatch first. BatchError naming a row that is too long.
    """
    assert settings.kind != "padded", "microbatches of a number of rows need no plan"
    settings.check(lengths, width)
    sizes = [settings.size(length, width) for length in lengths]
    total = ranks * multiple
    if settings.kind == "packed":
        bins = pack(sizes, settings.capacity, settings.algorithm, multiple=total, cost=cost)
    else:
        bins = dynamic_bins(sizes, settings.capacity, total, cost)
    packed = settings.kind == "packed"
    costs = [_cost(bin_, sizes, cost, packed) for bin_ in bins]
    shares = [[bins[number] for number in numbers] for numbers in assign_to_ranks(costs, ranks)]
    if packed and checked_algorithm(settings.algorithm) == BALANCED:
        shares = _levelled(shares, sizes, settings.capacity, cost)
    return [_share(share, sizes, cost, packed) for share in shares]


def _cost(bin_: Sequence[int], sizes: Sequence[int], cost: Cost, packed: bool) -> float:
    if packed:
        return sum(cost(sizes[row]) for row in bin_)
    return len(bin_) * cost(max((sizes[row] for row in bin_), default=0))


def _levelled(shares: list[Bins], sizes: Sequence[int], capacity: int, cost: Cost) -> list[Bins]:
    """The same shares after exchanges between ranks, and then between the bins of each rank.

    A bin of one long sequence can cost more than the mean and another bin of its rank less: only
    the ranks' totals can be made equal.
    """
    costs = [cost(size) for size in sizes]
    owners = [rank for rank, share in enumerate(shares) for _ in share]
    bins = levelled([bin_ for share in shares for bin_ in share], owners, sizes, costs, capacity)
    found = []
    for rank in range(len(shares)):
        own = [bin_ for bin_, owner in zip(bins, owners, strict=True) if owner == rank]
        found.append(levelled(own, range(len(own)), sizes, costs, capacity))
    return found


def _share(bins: Bins, sizes: Sequence[int], cost: Cost, packed: bool) -> RankPlan:
    ordered = sorted(
        (sorted(bin_) for bin_ in bins), key=lambda b: (-_cost(b, sizes, cost, packed), b)
    )
    spans, start = [], 0
    for bin_ in ordered:
        taken = [sizes[row] for row in bin_]
        end = start + len(bin_)
        spans.append(MicrobatchSpan(start, end, sum(taken) if packed else max(taken, default=0)))
        start = end
    return RankPlan(tuple(row for bin_ in ordered for row in bin_), Plan((tuple(spans),), packed))


def assign_to_ranks(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Assign bins to `ranks`, the same number to each, with total costs as equal as possible.

    The costliest bin first goes to the rank with the lowest load that lacks bins; swaps follow.
    Each rank has its bins from the costliest to the cheapest, so that what the ranks compute at the
    same time costs about the same. `ranks` divides the number of bins.
    """
    share, left = divmod(len(costs), ranks)
    assert left == 0, f"{len(costs)} bins are not assigned evenly to {ranks} ranks"
    assigned: list[list[int]] = [[] for _ in range(ranks)]
    load = [0.0] * ranks
    for bin_ in sorted(range(len(costs)), key=lambda b: (-costs[b], b)):
        open_ = [rank for rank in range(ranks) if len(assigned[rank]) < share]
        rank = min(open_, key=lambda r: (load[r], r))
        assigned[rank].append(bin_)
        load[rank] += costs[bin_]
    # Each bin has size 1 and no rank has room for another: only swaps keep the counts.
    assigned = levelled(assigned, range(ranks), [1] * len(costs), costs, share)
    return [sorted(bins, key=lambda b: (-costs[b], b)) for bins in assigned]
