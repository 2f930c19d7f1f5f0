"""The host's own loss of preferences under every batching: what the host makes of the whole batch,
on the logits of one process.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from megatron_policy.batch import BatchedDataDict
from megatron_policy.config.model_table import bind_model
from megatron_policy.hosts.nemo_rl.losses import adapt_loss
from megatron_policy.training.sharding import BatchDispatcher
from tests.dist.cases import open_policy, policy_config
from tests.dist.layouts import layout
from tests.hosts.real import host
from tests.hosts.real.test_policy import ROWS, Reference, inputs_of

TOLERANCE = 1e-5
"""Of the loss, the gradient's norm and the metrics of one step in fp32, relative."""
BUDGET = {"enabled": True, "train_mb_tokens": 50, "logprob_mb_tokens": 50}
BATCHINGS: dict[str, dict[str, Any]] = {
    "padded": {},
    "dynamic": {"dynamic_batching": BUDGET | {"sequence_length_round": 4}},
    "packed": {"sequence_packing": BUDGET},
}
LAYOUTS = {
    "one process": layout(1),
    "TP2": layout(2, tp=2),
    "PP2": layout(2, pp=2),
    "CP2": layout(2, context_parallel_size=2),
    "DP2": layout(2),
}


@cache
def given(path: Path) -> BatchedDataDict:
    """What the host's algorithm passes to `train`, of four pairs."""
    return BatchedDataDict(dict(inputs_of("dpo", 2, Reference(path))))


def found(config: dict[str, Any], data: BatchedDataDict) -> dict[str, Any]:
    """A step, by the loss as the host's worker calls it."""
    loss = adapt_loss(host.losses()["dpo"])
    with open_policy(config, init_reference_model=False) as policy:
        architecture = bind_model(policy.config).architecture
        dispatcher = BatchDispatcher.of(policy.config, policy.topology, architecture)
        own = dispatcher.to_train(data, loss, ROWS, 2)[policy.coords.dp]
        return {"dp": policy.coords.dp, "step": policy.train(own, loss, gbs=ROWS, mbs=2)}


@pytest.mark.parametrize("batching", BATCHINGS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_hosts_dpo_loss_is_that_of_the_whole_batch(
    ranks: Any, checkpoint: Callable[..., Path], name: str, batching: str
) -> None:
    path = checkpoint("llama", vocab=256, tied=True)
    reference, data = Reference(path), given(path)
    loss_fn = host.losses()["dpo"]
    _, metrics = host.loss_on(loss_fn, reference.logits(data), host.batch(dict(data)))
    loss, norm = reference.step(host.batch(dict(data)), loss_fn)
    config = policy_config(path, LAYOUTS[name].megatron, **BATCHINGS[batching])
    seen = ranks.run(LAYOUTS[name].world, found, config, data)
    for each in seen:
        assert each["step"]["loss"].item() == pytest.approx(loss, rel=TOLERANCE)
        assert each["step"]["grad_norm"].item() == pytest.approx(norm, rel=TOLERANCE)
    replicas = {each["dp"]: each["step"]["microbatch_metrics"] for each in seen}
    assert metrics.keys() <= replicas[0].keys() and metrics["accuracy"] != 0.5
    for key, value in metrics.items():
        total = sum(sum(own[key]) for own in replicas.values())
        assert total == pytest.approx(float(value), rel=TOLERANCE, abs=TOLERANCE), key
