"""Multi-token prediction trains as its plain torch form does, in every layout and batching."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_policy.batch import BatchedDataDict
from megatron_policy.config.layout import pads
from tests import oracle
from tests.checkpoints import make_checkpoint
from tests.dist.cases import (
    GLOBAL_BATCH,
    LOSSES,
    MICROBATCHES,
    open_policy,
    own_steps,
    policy_config,
)
from tests.dist.layouts import OVERLAPPED, layout
from tests.exact import ROOM
from tests.margins import check
from tests.mtp_checkpoints import COPIES, add_mtp_layers
from tests.mtp_oracle import learned

VOCAB, LENGTH = 200, 24
SMALL = {"hidden": 48, "heads": 4, "layers": 4, "ffn": 40, "vocab": VOCAB, "tokenizer": False}
FACTOR = 0.3
RECOMPUTED = {"activation_checkpointing": True, "recompute_granularity": "full"}
SP = {"sequence_parallel": True}
EP2 = {"expert_model_parallel_size": 2}
LAYOUTS = {
    "one process": layout(1),
    "TP2+SP": layout(2, tp=2, **SP),
    "PP2": layout(2, pp=2),
    "PP2xVPP2": layout(2, pp=2, vpp=2),
    "DP2, both overlaps": layout(2, **OVERLAPPED),
    "CP2": layout(2, context_parallel_size=2),
    "EP2": layout(2, **EP2),
    "TP2xPP2xDP2xEP2+SP": layout(8, tp=2, pp=2, **SP, **EP2, **OVERLAPPED),
}
BATCHINGS: dict[str, dict[str, Any]] = {
    "padded": {},
    "dynamic": {
        "dynamic_batching": {
            "enabled": True,
            "train_mb_tokens": 64,
            "logprob_mb_tokens": 64,
            "sequence_length_round": 4,
        }
    },
    "packed": {
        "sequence_packing": {"enabled": True, "train_mb_tokens": 64, "logprob_mb_tokens": 64}
    },
}


def train(config: dict[str, Any], data: BatchedDataDict) -> dict[str, Any]:
    """What this rank sees of two steps, and all weights afterwards under their HF names."""
    with open_policy(config, init_reference_model=False) as policy:
        padded = pads(policy.config)
        micro = GLOBAL_BATCH // policy.topology.dp // MICROBATCHES if padded else None
        steps = own_steps(policy, data)
        evaluated = policy.train(
            steps[0], LOSSES["token"](), eval_mode=True, gbs=GLOBAL_BATCH, mbs=micro
        )
        found = []
        for step in steps:
            found.append(policy.train(step, LOSSES["token"](), gbs=GLOBAL_BATCH, mbs=micro))
            # Reads that pass these layers by leave them fit for the next step.
            policy.logprobs(step)
        weights = {}
        if policy.topology.ep == 1:
            weights = {name: tensor.clone() for name, tensor in policy.export()}
        return {
            "dp": policy.coords.dp,
            "eval": evaluated,
            "steps": found,
            "weights": weights if policy.rank == 0 else {},
        }


def assert_learned_alike(
    results: list[dict[str, Any]], expected: tuple[oracle.Learned, list[list[float]]], name: str
) -> None:
    hf, losses = expected
    by_replica = {seen["dp"]: seen for seen in results}
    for number, (main, *further) in enumerate(losses):
        mtp = 0.0
        for k, exact in enumerate(further, start=1):
            found = sum(
                sum(seen["steps"][number]["microbatch_metrics"][f"mtp_{k}_loss"])
                for seen in by_replica.values()
            )
            check("mtp loss", abs(found / exact - 1), ROOM * hf.rounding.loss, name)
            mtp += found / len(further)
        for seen in results:
            step = seen["steps"][number]
            hf.assert_same_norm(step["grad_norm"], number, name)
            check("loss", abs(step["loss"].item() / main - 1), ROOM * hf.rounding.loss, name)
            hf.assert_same_loss(step["loss"] + FACTOR * mtp, number, name)
    for each, tensor in results[0]["weights"].items():
        if each not in hf.exact.weights:  # transformers stacks experts, and has no copies
            assert ".experts." in each or each.endswith((*COPIES, "correction_bias")), each
        else:
            hf.assert_same_weight(tensor, hf.exact.weights[each], f"{each} {name}")
    evaluated = sum(
        sum(seen["eval"]["microbatch_metrics"]["mtp_1_loss"]) for seen in by_replica.values()
    )
    check("mtp loss", abs(evaluated / losses[0][1] - 1), ROOM * hf.rounding.loss, name)


@pytest.fixture(scope="module", params=["deepseek_v3", "glm4_moe", "mimo"])
def made(request, tmp_path_factory) -> tuple[str, Path, BatchedDataDict, Any]:
    path = tmp_path_factory.mktemp(request.param)
    add_mtp_layers(make_checkpoint(path, request.param, **SMALL))
    return request.param, path, DATA, learned(path, DATA, GLOBAL_BATCH, factor=FACTOR)


DATA = oracle.make_batch(2 * GLOBAL_BATCH, LENGTH, VOCAB)
MTP = {"mtp_num_layers": 1, "mtp_loss_scaling_factor": FACTOR}
EACH_TIME = {
    "deepseek_v3": [("PP2xVPP2", "padded"), ("CP2", "packed"), ("TP2xPP2xDP2xEP2+SP", "dynamic")],
    "glm4_moe": [("one process", "dynamic"), ("EP2", "packed"), ("TP2xPP2xDP2xEP2+SP", "padded")],
    "mimo": [("PP2xVPP2", "packed"), ("TP2+SP", "padded"), ("CP2", "dynamic")],
}
"""Together every layout's kind of exchange and every batching; the sweep runs all of them."""


@pytest.mark.parametrize("number", range(3))
def test_losses_norms_and_updates_are_those_of_plain_torch(ranks, made, number: int) -> None:
    family, *_ = made
    compare(ranks, made, *EACH_TIME[family][number])


@pytest.mark.nightly
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("batching", BATCHINGS)
def test_they_are_in_every_layout_and_batching(ranks, made, name: str, batching: str) -> None:
    if "EP2" in name and made[0] == "mimo":
        pytest.skip("the model has no experts")
    if (name, batching) not in EACH_TIME[made[0]]:
        compare(ranks, made, name, batching)


def compare(ranks, made, name: str, batching: str) -> None:
    _, path, data, expected = made
    case = LAYOUTS[name]
    config = policy_config(path, case.megatron | MTP, **BATCHINGS[batching])
    assert_learned_alike(ranks.run(case.world, train, config, data), expected, f"{name} {batching}")


KINDS = {
    "two layers": ({"depths": 2}, 2, False, "TP2+SP", {}),
    "repeated": (
        {"depths": 3, "repeated": True},
        1,
        False,
        "PP2",
        {"mtp_use_repeated_layer": True},
    ),
    "detached": ({"detached": True}, 1, False, "PP2", {"mtp_detach_heads": True}),
    "detached, recomputed": (
        *({"detached": True}, 1, False, "one process"),
        RECOMPUTED | {"mtp_detach_heads": True},
    ),
    "tied": ({}, 1, True, "PP2", RECOMPUTED),
    "tied alone": ({}, 1, True, "one process", {}),
    "mimo, two layers, detached": (
        *({"depths": 2, "detached": True}, 2, False, "PP2"),
        RECOMPUTED | {"mtp_detach_heads": True},
    ),
}


@pytest.mark.parametrize("which", KINDS)
def test_every_kind_of_prediction_trains_as_its_plain_form(ranks, tmp_path, which: str) -> None:
    kind, layers, tied, name, megatron = KINDS[which]
    family = "mimo" if which.startswith("mimo") else "deepseek_v3"
    add_mtp_layers(make_checkpoint(tmp_path, family, tied=tied, **SMALL), layers)
    expected = learned(tmp_path, DATA, GLOBAL_BATCH, factor=FACTOR, **kind)
    case = LAYOUTS[name]
    section = case.megatron | MTP | megatron | {"mtp_num_layers": kind.get("depths", 1)}
    config = policy_config(tmp_path, section)
    assert_learned_alike(ranks.run(case.world, train, config, DATA), expected, str(kind))


def unsummed(config: dict[str, Any], data: BatchedDataDict) -> dict[str, Any]:
    """As `train`, without adding up the gradients of the embedding's copies."""
    from megatron_policy.engines.megatron import optimizer

    original = optimizer.sum_embedding_gradients
    optimizer.sum_embedding_gradients = lambda chunks: None
    try:
        return train(config, data)
    finally:
        optimizer.sum_embedding_gradients = original


def one_token_late(config: dict[str, Any], data: BatchedDataDict) -> dict[str, Any]:
    """As `train`, with the embedding of the token after the next."""
    from megatron_policy.engines.megatron import mtp

    original = mtp.shifted
    mtp.shifted = lambda values, places: original(values, places + 1)
    try:
        return train(config, data)
    finally:
        mtp.shifted = original


@pytest.mark.parametrize(
    ("mutated", "name"), [(unsummed, "PP2"), (one_token_late, "one process")], ids=["sum", "late"]
)
def test_a_planted_fault_is_noticed(ranks, made, mutated, name: str) -> None:
    _, path, data, expected = made
    case = LAYOUTS[name]
    seen = ranks.run(case.world, mutated, policy_config(path, case.megatron | MTP), data)
    hf, _ = expected
    apart = abs(seen[0]["steps"][0]["grad_norm"].item() / hf.exact.grad_norms[0] - 1)
    assert apart > 10 * ROOM * hf.rounding.grad_norm
