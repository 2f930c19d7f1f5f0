"""Cuts one rank's data into microbatches, by the plan that came with them or by one made here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_policy.batch import BatchedDataDict
from megatron_policy.config import PolicyConfig
from megatron_policy.config.batching import batching_of, multiples_of
from megatron_policy.config.layout import equal_share, microbatch_round
from megatron_policy.config.layout import microbatches as count_microbatches
from megatron_policy.converters.architecture import Shell
from megatron_policy.converters.table import Table
from megatron_policy.errors import BatchError
from megatron_policy.estimate.adapters import ModelAdapters
from megatron_policy.interfaces import LossFunction
from megatron_policy.packing.batching import Batching
from megatron_policy.packing.bins import decreasing
from megatron_policy.packing.cost import Cost, sequence_cost
from megatron_policy.packing.microbatch import (
    Microbatch,
    count_patches,
    empty_microbatch,
    numbered,
    packed_microbatch,
    padded_microbatch,
)
from megatron_policy.packing.multiples import Multiples, round_up
from megatron_policy.packing.plan import MicrobatchSpan, Plan, plan_rows
from megatron_policy.parallel.topology import Topology
from megatron_policy.training.checks import (
    PADDED,
    check_lengths,
    check_loss_inputs,
    check_size,
    check_training_data,
    for_loss,
)
from megatron_policy.training.longest import Longest
from megatron_policy.training.replay import Replay, RouterReplay
from megatron_policy.training.speed import Estimator


@dataclass(frozen=True)
class GlobalBatch:
    """This data-parallel rank's rows of one global batch; its microbatches hold each row once."""

    data: BatchedDataDict
    microbatches: list[Microbatch]


@dataclass(frozen=True)
class ScoringBatches:
    """Microbatches, and for each that is not a dummy the caller's rows it holds."""

    microbatches: list[Microbatch]
    rows: list[Sequence[int]]


@dataclass(frozen=True)
class Batcher:
    """How this policy cuts batches for training and for scoring.

    With padded batches all microbatches have the same shape, as the pipeline then needs.
    """

    training: Batching
    scoring: Batching
    multiples: Multiples
    topology: Topology
    cost: Cost
    longest: Longest
    replay: RouterReplay
    estimator: Estimator
    attachments: tuple[str, ...] = ()
    shell: Shell | None = None

    @classmethod
    def of(cls, config: PolicyConfig, topology: Topology, table: Table) -> Batcher:
        """The batcher that the configuration asks for, for this model."""
        architecture, cost = table.architecture, sequence_cost(table.architecture)
        multiples, training = multiples_of(config), batching_of(config, training=True)
        return cls(
            training=training,
            scoring=batching_of(config, training=False),
            multiples=multiples,
            topology=topology,
            cost=cost,
            longest=Longest.of(config, architecture),
            replay=RouterReplay.of(config, architecture),
            estimator=Estimator(
                architecture,
                topology,
                cost,
                dummy=multiples.row,
                alike=training.kind == "padded",
                mtp_depth=config.megatron_cfg.mtp_num_layers,
                adapters=ModelAdapters.of_model(config, table),
            ),
            attachments=architecture.attachments,
            shell=architecture.shell,
        )

    def for_loss(self, loss_fn: LossFunction) -> Batcher:
        """The batcher of this loss's training data, which keeps rows together that it reads
        together.
        """
        return replace(self, training=for_loss(self.training, loss_fn))

    def check(
        self,
        data: Mapping[str, Any],
        vocab_size: int,
        loss_fn: LossFunction | None = None,
        replay: Replay = Replay.REQUIRED,
        batching: Batching | None = None,
    ) -> BatchedDataDict:
        """`data` as a step computes with them; BatchError naming what cannot be trained on, by any
        loss or by `loss_fn`, or not be cut by `batching`, by default the policy's for training.
        """
        cut_by = batching or self.training
        checked = check_training_data(data, vocab_size, cut_by, self.attachments, self.shell)
        self.longest.check(checked)
        checked = self.replay.prepare(checked, replay)
        if loss_fn is not None:
            check_loss_inputs(loss_fn, checked, vocab_size)
        return checked

    def for_training(
        self, data: BatchedDataDict, global_batch_size: int, micro_batch_size: int
    ) -> list[GlobalBatch]:
        """The global batches in `data`: those of the plan they carry, otherwise equal shares of
        `global_batch_size` rows each, cut into microbatches of `micro_batch_size` rows or by
        tokens.
        """
        plan = _plan_of(data, self.training)
        if plan is not None:
            batches = self._cut_planned(data, plan)
        else:
            if self.training.kind == "padded":
                self.training.check_whole_groups(micro_batch_size, f"mbs={micro_batch_size}")
                count_microbatches(global_batch_size, micro_batch_size, self.topology)
            ranks, share = self.topology.dp, equal_share(global_batch_size, self.topology)
            over = f"gbs={global_batch_size}" + (f" over {ranks} ranks" if ranks > 1 else "")
            self.training.check_whole_groups(share, over, ranks)
            if data.size % share or not data.size:
                raise BatchError(
                    f"{data.size} samples on a data-parallel rank are not a whole number of global "
                    f"batches, of which each rank has {share} samples: pass a multiple of "
                    f"{global_batch_size} samples"
                )
            batches = [
                self._cut_unplanned(data.get_batch(i, share), micro_batch_size, i * share)
                for i in range(data.size // share)
            ]
        return [_as_the_caller_counts(batch, data) for batch in batches]

    def for_part(self, data: BatchedDataDict, micro_batch_size: int) -> GlobalBatch:
        """All rows of `data` as one part of a global batch: cut by the plan they carry, or into
        microbatches of `micro_batch_size` rows or by tokens.
        """
        plan = _plan_of(data, self.training)
        if plan is not None:
            batch = _only(self._cut_planned(data, plan), "a part of a global batch")
            return _as_the_caller_counts(batch, data)
        if self.training.kind == "padded":
            self.training.check_whole_groups(micro_batch_size, f"mbs={micro_batch_size}")
            if data.size % micro_batch_size:
                raise BatchError(
                    f"{data.size} rows on a data-parallel rank cannot be cut into microbatches of "
                    f"mbs={micro_batch_size}: pass a multiple, filled up with rows whose "
                    "sample_mask is 0, or use dynamic_batching or sequence_packing"
                )
        return _as_the_caller_counts(self._cut_unplanned(data, micro_batch_size), data)

    def of_rows(self, data: BatchedDataDict, rows: Sequence[Sequence[int]]) -> list[Microbatch]:
        """The caller's own microbatches: the i-th has rows `rows[i]` of `data`, in that order.
        BatchError unless they are rows of it, and alike where all microbatches must be.
        """
        width, lengths = data["input_ids"].size(1), check_lengths(data, PADDED)
        kind = self.training.kind
        if kind == "padded" and len({len(each) for each in rows}) > 1:
            raise BatchError(
                f"the microbatches have {sorted({len(each) for each in rows})} rows, but without "
                "dynamic_batching and sequence_packing all have the same shape: cut equal ones, or "
                "turn one of both on"
            )
        found = []
        for number, own in enumerate(rows):
            if not own or not all(0 <= row < data.size for row in own):
                raise BatchError(
                    f"microbatch {number} has the rows {list(own)}: each needs one or more of the "
                    f"data's {data.size} rows, which are numbered from 0"
                )
            part, longest = data.select_indices(own), max(lengths[row] for row in own)
            self.training.check_patches(own, count_patches(part))
            if kind == "packed":
                cut = packed_microbatch(part, width, [lengths[row] for row in own], self.multiples)
            else:
                shape = longest if kind == "dynamic" else width
                cut = padded_microbatch(part, width, shape, self.multiples)
            found.append(replace(cut, rows=tuple(own)))
        return found

    def for_scoring(self, data: BatchedDataDict, at_once: int) -> ScoringBatches:
        """All rows of `data`, `at_once` rows or one microbatch's token budget at a time."""
        check_size("micro_batch_size, rows that are scored at once,", at_once)
        plan = _plan_of(data, self.scoring)
        order: Sequence[int] = range(data.size)
        if self.scoring.kind == "padded":
            size = min(at_once, data.size)
            rows = [order[start : start + size] for start in range(0, data.size, size)]
            # All microbatches must have the same shape: the last row is repeated to fill up.
            filled = data.select_indices([*order, *[data.size - 1] * (-data.size % size)])
            microbatches = self._cut_side_by_side(filled, size)
        else:
            if plan is None:
                data, plan, order = self._plan(data, self.scoring)
            batch = _only(self._cut_planned(data, plan), "what is only scored")
            microbatches = batch.microbatches
            rows = [[order[row] for row in own.rows] for own in microbatches if own.rows]
        return ScoringBatches(self.fill_up(microbatches, len(microbatches), data), rows)

    def fill_up(
        self, microbatches: Sequence[Microbatch], count: int, data: BatchedDataDict
    ) -> list[Microbatch]:
        """`count` microbatches, rounded up to whole rounds of the interleaved schedule; dummies
        make up the missing ones.
        """
        count = round_up(max(count, 1), microbatch_round(self.topology))
        missing = count - len(microbatches)
        if not missing:
            return list(microbatches)
        alike = self.training.kind == "padded" and microbatches
        dummy = replace(microbatches[-1], dummy=True) if alike else self._dummy(data)
        return [*microbatches, *[dummy] * missing]

    def _dummy(self, data: BatchedDataDict) -> Microbatch:
        return empty_microbatch(data["input_ids"].size(1), self.multiples)

    def _cut_unplanned(self, data: BatchedDataDict, rows: int, first: int = 0) -> GlobalBatch:
        """One global batch, whose row 0 is number `first`: `rows` rows in each microbatch, or by a
        plan made here.
        """
        if self.training.kind == "padded":
            return GlobalBatch(data, self._cut_side_by_side(data, rows, first))
        ordered, plan, order = self._plan(data, self.training)
        (batch,) = self._cut_planned(ordered, plan)
        return GlobalBatch(batch.data, numbered(batch.microbatches, [first + row for row in order]))

    def _cut_side_by_side(
        self, data: BatchedDataDict, rows: int, first: int = 0
    ) -> list[Microbatch]:
        """Cut into `rows` rows each; the first row of `data` is number `first`."""
        width, found = data["input_ids"].size(1), list[Microbatch]()
        for part in data.make_microbatch_iterator(rows):
            own = tuple(range(first + len(found) * rows, first + len(found) * rows + rows))
            self.training.check_patches(own, count_patches(part))
            found.append(replace(padded_microbatch(part, width, width, self.multiples), rows=own))
        return found

    def _plan(
        self, data: BatchedDataDict, settings: Batching
    ) -> tuple[BatchedDataDict, Plan, Sequence[int]]:
        """One global batch reordered by a plan, the plan, and each row's original index."""
        rows = check_lengths(data, settings), settings, 1, microbatch_round(self.topology)
        (share,) = plan_rows(*rows, self.cost, data["input_ids"].size(1), count_patches(data))
        return data.select_indices(share.rows), share.plan, share.rows

    def _cut_planned(self, data: BatchedDataDict, plan: Plan) -> list[GlobalBatch]:
        """The plan's global batches, each with its costliest microbatch first, whatever the order
        of the plan: ranks that wait for each other in every microbatch then wait the least.
        """
        width = data["input_ids"].size(1)

        def cost_of(batch: BatchedDataDict, span: MicrobatchSpan) -> float:
            rows = slice(span.start, span.end)
            pictures = self.cost(0, sum(count_patches(batch)[rows]))
            if not plan.packed:
                return (span.end - span.start) * self.cost(span.length) + pictures
            return sum(map(self.cost, batch["input_lengths"][rows].tolist())) + pictures

        def cut(batch: BatchedDataDict, span: MicrobatchSpan) -> Microbatch:
            if span.start == span.end:
                return self._dummy(batch)
            rows = batch.slice(span.start, span.end)
            self.training.check_patches(range(span.start, span.end), count_patches(rows))
            if not plan.packed:
                return padded_microbatch(rows, width, min(span.length, width), self.multiples)
            lengths = rows["input_lengths"].tolist()
            return packed_microbatch(rows, width, lengths, self.multiples)

        found, start = [], 0
        for spans, rows in zip(plan.batches, plan.rows, strict=True):
            batch = data.slice(start, start + rows)
            order = decreasing([cost_of(batch, span) for span in spans])
            parts = [
                replace(cut(batch, span), rows=tuple(range(start + span.start, start + span.end)))
                for span in (spans[number] for number in order)
            ]
            found.append(GlobalBatch(batch, parts))
            start += rows
        return found


def _only(batches: Sequence[GlobalBatch], what: str) -> GlobalBatch:
    if len(batches) != 1:
        raise BatchError(
            f"the data were planned for {len(batches)} global batches; {what} is planned as one"
        )
    return batches[0]


def _as_the_caller_counts(batch: GlobalBatch, data: BatchedDataDict) -> GlobalBatch:
    """Renumber the microbatches' rows as in the caller's batch, of which `data` are a part."""
    if data.caller_rows is None:
        return batch
    return GlobalBatch(batch.data, numbered(batch.microbatches, data.caller_rows))


def _plan_of(data: BatchedDataDict, settings: Batching) -> Plan | None:
    """The plan that came with the data; BatchError if the configuration wants another kind, or if a
    microbatch of it does not have whole groups of the caller's rows.
    """
    plan, group = Plan.of(data), settings.rows_per_group
    if plan is None:
        return None
    if settings.kind == "padded" or plan.packed != (settings.kind == "packed"):
        raise BatchError(
            f"the data were planned for {'packed' if plan.packed else 'dynamic'} microbatches, but "
            f"the configuration asks for {settings.kind} ones: make both agree"
        )
    if group == 1:
        return plan
    order = data.caller_rows
    if order is None:
        raise BatchError(
            "the data's plan of microbatches (micro_batch_indices) does not say which of the "
            f"caller's rows these are (caller_rows), so the {group} rows that the loss reads "
            "together (its rows_per_group) can be anywhere: pass the data without a plan, or turn "
            "off dynamic_batching and sequence_packing where another driver makes it"
        )
    sizes = [span.end - span.start for spans in plan.batches for span in spans]
    firsts = order[::group]
    whole = [row for first in firsts for row in range(first, first + group)]
    if whole != order or any(n % group for n in (*firsts, *sizes)):
        raise BatchError(
            "the data's plan of microbatches (micro_batch_indices) separates rows that the loss "
            f"reads together (its rows_per_group, {group}): plan whole groups, or pass the data "
            "without it"
        )
    return plan
