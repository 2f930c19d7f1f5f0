"""Splits a batch over data-parallel ranks and joins their results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from megatron_policy.batch import BatchedDataDict
from megatron_policy.config import PolicyConfig, RolloutMismatchConfig
from megatron_policy.config.batching import batching_of
from megatron_policy.config.layout import microbatch_round, microbatches
from megatron_policy.converters.architecture import Architecture, ScalarHead, Shell
from megatron_policy.dtypes import dtype_named
from megatron_policy.errors import BatchError, ConfigError
from megatron_policy.interfaces import LossFunction
from megatron_policy.packing.batching import Batching
from megatron_policy.packing.cost import Cost, sequence_cost
from megatron_policy.packing.microbatch import count_patches
from megatron_policy.packing.plan import RankPlan, consecutive, plan_rows
from megatron_policy.parallel.topology import Topology
from megatron_policy.training.checks import (
    check_batch,
    check_lengths,
    check_loss_inputs,
    check_prompts,
    check_sizes,
    check_training_data,
    for_loss,
)
from megatron_policy.training.dry_run import choose_rows
from megatron_policy.training.longest import Longest
from megatron_policy.training.loss_calls import check_loss
from megatron_policy.training.replay import Replay, RouterReplay
from megatron_policy.training.results import TrainResult
from megatron_policy.training.rollout_mismatch import check_rollouts
from megatron_policy.training.speed import merge_speeds
from megatron_policy.training.value_checks import narrow_pixels


@dataclass(frozen=True)
class ShardedBatch:
    """Each data-parallel rank's part of a caller's `size` rows.

    `rows` are their indices, rank after rank; None if they are in the caller's order, with filling
    rows at the end.
    """

    shards: list[BatchedDataDict]
    size: int
    rows: list[int] | None = None

    def restored(
        self, answers: Sequence[Mapping[str, Any]], pad: Mapping[str, float] | None = None
    ) -> BatchedDataDict:
        """The ranks' results as rows in the caller's order; see `joined`."""
        whole = joined(answers, self.size, pad)
        if self.rows is not None:
            whole.reorder_data(self.rows)
        return whole


@dataclass(frozen=True)
class BatchDispatcher:
    """Checks data and splits them over data-parallel ranks, for training and inference, by rows or,
    with `cost`, by tokens.
    """

    topology: Topology
    vocab_size: int
    training: Batching
    scoring: Batching
    cost: Cost
    longest: Longest
    replay: RouterReplay
    head: ScalarHead | None = None
    attachments: tuple[str, ...] = ()
    shell: Shell | None = None
    mismatch: RolloutMismatchConfig = field(default_factory=RolloutMismatchConfig)
    dtype: torch.dtype = torch.float32
    """In which towers compute."""

    @classmethod
    def of(
        cls, config: PolicyConfig, topology: Topology, architecture: Architecture
    ) -> BatchDispatcher:
        """The dispatcher that `config` requests, for this model."""
        training, scoring = (batching_of(config, training=each) for each in (True, False))
        return cls(
            topology,
            architecture.vocab_size,
            training,
            scoring,
            sequence_cost(architecture),
            Longest.of(config, architecture),
            RouterReplay.of(config, architecture),
            architecture.head,
            architecture.attachments,
            architecture.shell,
            config.rollout_mismatch,
            dtype_named(config.precision),
        )

    def to_train(
        self, data: BatchedDataDict, loss_fn: LossFunction, gbs: int, mbs: int
    ) -> list[BatchedDataDict]:
        """Each rank's rows of every global batch of `gbs`; BatchError naming invalid data."""
        check_sizes(gbs, mbs)
        data, training = self._check(data, loss_fn)
        check_loss(loss_fn, self.head)
        if training.kind == "padded":
            training.check_whole_groups(mbs, f"mbs={mbs}")
            microbatches(gbs, mbs, self.topology)
            return shard_for_training(data, self.topology.dp, gbs)
        lengths = check_lengths(data, training)
        return shard_by_plan(data, lengths, training, self.topology, self.cost, gbs).shards

    def to_dry_run(
        self, data: BatchedDataDict, loss_fn: LossFunction
    ) -> tuple[BatchedDataDict, list[int]]:
        """The rows on which every rank tries a loss, and their numbers; BatchError naming invalid
        data.
        """
        checked, _ = self._check(data, loss_fn)
        check_loss(loss_fn, self.head)
        rows = choose_rows(checked, loss_fn)
        return checked.select_indices(rows), rows

    def to_train_part(
        self, data: BatchedDataDict, loss_fn: LossFunction, mbs: int
    ) -> list[BatchedDataDict]:
        """Each rank's rows of a part of a global batch; ranks may get different numbers of rows.
        BatchError naming invalid data.
        """
        data, training = self._check(data, loss_fn)
        if training.kind == "padded":
            training.check_whole_groups(mbs, f"mbs={mbs}")
            return shard_part(data, self.topology.dp, mbs)
        lengths = check_lengths(data, training)
        return shard_by_plan(data, lengths, training, self.topology, self.cost).shards

    def _check(
        self, data: BatchedDataDict, loss_fn: LossFunction
    ) -> tuple[BatchedDataDict, Batching]:
        """The data as they can be trained on, and how microbatches are made for this loss."""
        _refuse_plan(data)
        training = for_loss(self.training, loss_fn)
        keys = self.attachments
        data = check_training_data(data, self.vocab_size, training, keys, self.shell)
        self._narrow(data)
        self.longest.check(data)
        data = self.replay.prepare(data)
        check_loss_inputs(loss_fn, data, self.vocab_size)
        check_rollouts(data, self.mismatch, self.head)
        return data, training

    def to_score(self, data: BatchedDataDict, replay: Replay = Replay.IF_GIVEN) -> ShardedBatch:
        """Each rank's rows of the whole batch; BatchError naming invalid data."""
        _refuse_plan(data)
        data = check_batch(data, self.vocab_size, self.attachments, self.shell)
        self._narrow(data)
        lengths = check_lengths(data, self.scoring)
        self.longest.check(data)
        data = self.replay.prepare(data, replay)
        if self.scoring.kind == "padded":
            return ShardedBatch(shard_evenly(data, self.topology.dp), data.size)
        return shard_by_plan(data, lengths, self.scoring, self.topology, self.cost)

    def _narrow(self, data: BatchedDataDict) -> None:
        if self.shell is not None:
            narrow_pixels(data, self.shell, self.dtype)

    def to_generate(self, prompts: BatchedDataDict) -> ShardedBatch:
        """Each rank's prompts; BatchError naming one that cannot be continued."""
        longest = self.longest.tokens
        prompts = check_prompts(prompts, self.vocab_size, longest, self.attachments, self.shell)
        return ShardedBatch(shard_evenly(prompts, self.topology.dp), prompts.size)


def _refuse_plan(data: BatchedDataDict) -> None:
    if data.micro_batch_indices is not None:
        raise BatchError(
            "the data carry a plan of microbatches (micro_batch_indices), which applies to "
            "a single rank, but the driver plans for all: pass the data without it"
        )


def shard_by_plan(
    data: BatchedDataDict,
    lengths: Sequence[int],
    batching: Batching,
    topology: Topology,
    cost: Cost,
    global_batch_size: int | None = None,
) -> ShardedBatch:
    """Each rank's rows of every global batch (by default all rows are one), balanced by cost, in
    the order of the plan attached to them.

    A rank may have no row of a global batch, or none at all. ConfigError unless the data are whole
    global batches, BatchError naming a row or group of rows that does not fit into a microbatch.
    """
    size = global_batch_size or data.size
    _check_whole(data, size)
    batching.check_whole_groups(size, f"gbs={size}")
    width, patches = data["input_ids"].size(1), count_patches(data)
    batching.check(lengths, width, patches)
    shares: list[list[RankPlan]] = []
    for start in range(0, data.size, size):
        part = slice(start, start + size)
        multiple = microbatch_round(topology)
        shares.append(
            plan_rows(lengths[part], batching, topology.dp, multiple, cost, width, patches[part])
        )
    shards: list[BatchedDataDict] = []
    order: list[int] = []
    for rank in range(topology.dp):
        own = [each[rank] for each in shares]
        rows = [number * size + row for number, share in enumerate(own) for row in share.rows]
        shard = data.select_indices(rows)
        shard.caller_rows = rows
        consecutive([share.plan for share in own]).attach(shard)
        shards.append(shard)
        order.extend(rows)
    return ShardedBatch(shards, data.size, order)


def shard_for_training(
    data: BatchedDataDict, ranks: int, global_batch_size: int
) -> list[BatchedDataDict]:
    """Each rank's part of every global batch, one after another, of which it has equal shares;
    ConfigError unless the data are whole global batches.
    """
    share = global_batch_size // ranks
    _check_whole(data, global_batch_size)
    shards = data.shard_by_batch_size(ranks, global_batch_size)
    starts = range(0, data.size, global_batch_size)
    return [
        _compact(shard, [start + rank * share + row for start in starts for row in range(share)])
        for rank, shard in enumerate(shards)
    ]


def shard_part(data: BatchedDataDict, ranks: int, micro_batch_size: int) -> list[BatchedDataDict]:
    """Contiguous parts of whole microbatches in order, as equal as possible; there may be fewer
    microbatches than ranks. ConfigError for an incomplete microbatch.
    """
    number, left = divmod(data.size, micro_batch_size)
    if left:
        raise ConfigError(
            f"{data.size} rows cannot be cut into microbatches of mbs={micro_batch_size}: make "
            "them a multiple (padding rows have sample_mask 0), or pass another mbs"
        )
    borders = [number * rank // ranks * micro_batch_size for rank in range(ranks + 1)]
    return [_compact(data.slice(*ends), [*range(*ends)]) for ends in pairwise(borders)]


def shard_evenly(data: BatchedDataDict, ranks: int) -> list[BatchedDataDict]:
    """Contiguous parts of equal size in order; the last row is repeated to fill them up."""
    _check_whole(data, data.size)
    missing = -data.size % ranks
    if missing:
        data = data.select_indices([*range(data.size), *[data.size - 1] * missing])
    return [_compact(shard) for shard in data.shard_by_batch_size(ranks)]


def joined(
    parts: Sequence[Mapping[str, Any]], rows: int, pad: Mapping[str, float] | None = None
) -> BatchedDataDict:
    """The ranks' results in the caller's order, cut to the caller's `rows`.

    Different lengths in dimension 1 are padded with 0, or with `pad[key]`.
    """
    return BatchedDataDict.from_batches(parts, pad).slice(0, rows)


def merged_training(results: Sequence[Mapping[str, Any]]) -> TrainResult:
    """What `train` returns to the driver: the result of the first rank, with every data-parallel
    rank's microbatches in `microbatch_metrics`, one rank after another, and the `speed` of the
    slowest.
    """
    metrics: dict[str, list[Any]] = {}
    for result in results:
        for name, values in result["microbatch_metrics"].items():
            metrics.setdefault(name, []).extend(values)
    first = {key: value for key, value in results[0].items() if key != "rank"}
    speed = merge_speeds([result["speed"] for result in results])
    return TrainResult(first | {"microbatch_metrics": metrics, "speed": speed})


def _check_whole(data: BatchedDataDict, global_batch_size: int) -> None:
    if data.size == 0:
        raise ConfigError("the data have no rows; pass at least one")
    if data.size % global_batch_size:
        raise ConfigError(
            f"the data have {data.size} samples, which is not a multiple of "
            f"gbs={global_batch_size}: drop or pad the rest (padding rows have sample_mask 0), "
            "or pass another gbs"
        )


def _compact(shard: BatchedDataDict, rows: list[int] | None = None) -> BatchedDataDict:
    """The shard, which has these `rows`, without the rest of the batch: a pickled view carries the
    whole storage.
    """
    compact = BatchedDataDict(shard)
    for key, value in shard.items():
        if isinstance(value, torch.Tensor) and value.untyped_storage().nbytes() > value.nbytes:
            compact[key] = value.clone()
    compact.caller_rows = rows
    return compact
