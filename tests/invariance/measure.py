"""What every rank of a cell runs: reads, trains for two steps, reads again; without the oracle.

Shapes: B rows of this data-parallel rank, S positions, K candidates.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megatron_policy.batch import BatchedDataDict
from megatron_policy.config.batching import batching_of
from megatron_policy.packing.cost import sequence_cost
from megatron_policy.policy import MegatronPolicy
from megatron_policy.training.sharding import shard_by_plan
from tests.dist.cases import learned_weights, open_policy
from tests.invariance import cases, losses

LOSSES = {
    "token": losses.TokenNLLOfLogprobs,
    "sequence": losses.SequenceNLLOfLogits,
    "policy gradient": losses.ClippedPolicyGradient,
    "entropy of logits": losses.EntropyOfLogits,
}


def run_cell(cell: cases.Cell, config: Mapping[str, Any], data: BatchedDataDict) -> dict[str, Any]:
    """All that this rank sees; `data` are the rows of all ranks. Rows are named by their `row`."""
    with open_policy(dict(config)) as policy:
        loss, readable = LOSSES[cell.loss](), own_rows(policy, cell, data, data.size, False)
        values, indices = policy.topk_logits(readable, cases.CANDIDATES)
        seen: dict[str, Any] = {
            "coords": policy.coords,
            "row": readable["row"],
            "before": policy.logprobs(readable),
            "entropy": policy.entropy(readable),
            "values": values,
            "indices": indices,
        }
        share = own_rows(policy, cell, data, cell.rows, True)
        sizes = {"gbs": cell.rows, "mbs": micro_batch_size(policy, cell)}
        seen["evaluated"] = policy.train(share, loss, eval_mode=True, **sizes)
        seen["steps"] = []
        for index in range(data.size // cell.rows):
            batch = data.get_batch(index, cell.rows)
            step = own_rows(policy, cell, batch, cell.rows, True)
            seen["steps"].append(policy.train(step, loss, **sizes))
        seen["weights"] = learned_weights(policy)
        seen["reference"] = policy.reference_logprobs(readable)
        again = learned_weights(policy)
        seen["unchanged"] = all(torch.equal(seen["weights"][name], again[name]) for name in again)
        seen["after"] = policy.logprobs(readable)
        return seen


def micro_batch_size(policy: MegatronPolicy, cell: cases.Cell) -> int:
    """Rows of a padded microbatch: two microbatches on every data-parallel rank."""
    return max(1, cell.rows // policy.topology.dp // 2)


def own_rows(
    policy: MegatronPolicy, cell: cases.Cell, data: BatchedDataDict, size: int, training: bool
) -> BatchedDataDict:
    """This data-parallel rank's part of each batch of `size` rows, one after another, dealt as the
    driver deals it: in order where batches are padded, else by a plan, which they carry. A single
    replica is given all rows without a plan: it makes its own.
    """
    ranks, rank = policy.topology.dp, policy.coords.dp
    if cell.batching == "padded" or ranks == 1:
        return data.shard_by_batch_size(ranks, batch_size=size)[rank]
    return shard_by_plan(
        data,
        data["input_lengths"].tolist(),
        batching_of(policy.config, training),
        policy.topology,
        sequence_cost(policy._engine.table.architecture),
        size,
    ).shards[rank]
