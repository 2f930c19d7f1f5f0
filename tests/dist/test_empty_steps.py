"""A step for which nothing counts changes nothing, under every layout and engine and in every way
to take a step, and the result says why.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_policy.batch import BatchedDataDict
from megatron_policy.errors import LossError
from megatron_policy.policy import MegatronPolicy
from megatron_policy.training.callbacks import TokenScores
from megatron_policy.training.empty_steps import NO_SEQUENCES, NO_TOKENS
from tests import oracle
from tests.dist.cases import GLOBAL_BATCH, LOSSES, open_policy, own_share, policy_config
from tests.dist.layouts import (
    FSDP1_LAYOUTS,
    FSDP2_LAYOUTS,
    LAYOUTS,
    LENGTH,
    OVERLAPPED,
    SIZES,
    VOCAB,
    layout,
)
from tests.dist.resuming import NEVER_CONSTANT, merged, paths, resumed
from tests.dist.shortcuts import dynamic, packed
from tests.dist.test_loss_mistakes import unchanged
from tests.losses import loss_mask, token_nll
from tests.mistaken import Mistaken

PACKED, DYNAMIC = packed(), dynamic()
ROUTED = {
    "moe_router_bias_update_rate": 1e-2,
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_aux_loss_coeff": 1e-2,
}
SCALED = {"optimizer": {"initial_loss_scale": 1024.0}}
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any], str]] = {
    "one process": (1, {}, {}, "qwen2"),
    "float16": (1, SCALED, {"precision": "float16"}, "qwen2"),
    "TP2+SP": (2, LAYOUTS["TP2+SP"].megatron, {}, "qwen2"),
    "PP2, dynamic": (2, LAYOUTS["PP2"].megatron, DYNAMIC, "qwen2"),
    "CP2, packed": (2, layout(2, context_parallel_size=2).megatron, PACKED, "qwen3"),
    "CP2, delta nets": (2, layout(2, context_parallel_size=2).megatron, PACKED, "qwen3_next"),
    "DP2": (2, LAYOUTS["DP2 distributed optimizer, both overlaps"].megatron, {}, "qwen2"),
    "EP2, routers": (2, {"expert_model_parallel_size": 2} | ROUTED, PACKED, "deepseek_v3"),
    "DP2, routers": (2, OVERLAPPED | ROUTED, {}, "deepseek_v3"),
    "FSDP2 x 2, packed": (2, FSDP2_LAYOUTS["FSDP2 x 2"].megatron, PACKED, "qwen2"),
    "FSDP1 x 2": (2, FSDP1_LAYOUTS["FSDP1 x 2"].megatron, {}, "qwen2"),
}


def batch(*, tokens: bool = True, sequences: bool = True) -> BatchedDataDict:
    data = oracle.make_batch(GLOBAL_BATCH, LENGTH, VOCAB)
    data["sample_mask"] = torch.full((GLOBAL_BATCH,), float(sequences))
    data["token_mask"] = data["token_mask"] * tokens
    return data


WITHOUT_TOKENS, WITHOUT_SEQUENCES = batch(tokens=False), batch(sequences=False)


def train(policy: MegatronPolicy, data: BatchedDataDict, loss: str = "token") -> dict[str, Any]:
    mbs = GLOBAL_BATCH // policy.topology.dp // 4
    return policy.train(own_share(policy, data), LOSSES[loss](), gbs=GLOBAL_BATCH, mbs=mbs)


def in_parts(policy: MegatronPolicy, data: BatchedDataDict, loss: str) -> dict[str, Any]:
    policy.accumulator.begin(LOSSES[loss](), gbs=GLOBAL_BATCH, mbs=1)
    policy.accumulator.microbatch(own_share(policy, data))
    policy.accumulator.microbatch({})
    result = policy.accumulator.finish()
    policy.pieces.zero_gradients()  # as the next step does: routers forget what they have counted
    return result


def nll(scores: TokenScores) -> tuple[torch.Tensor, None]:
    assert scores.logprobs is not None
    return token_nll(scores.logprobs, scores.data, torch.tensor(1.0)), None


def in_pieces(policy: MegatronPolicy, *calls: BatchedDataDict) -> tuple[str, ...]:
    for data in calls:
        microbatches = policy.pieces.cut(own_share(policy, data), 1)
        policy.pieces.forward_backward(microbatches, nll, reduce=len(calls) == 1)
    return policy.pieces.step().skipped


def take_no_step(config: dict[str, Any]) -> None:
    """Each way to take a step on nothing, after a step that leaves moments behind."""
    with open_policy(config, init_reference_model=False) as policy:
        train(policy, batch())
        policy.pieces.zero_gradients()
        for data, loss, why in (
            (WITHOUT_TOKENS, "token", NO_TOKENS),
            (WITHOUT_TOKENS, "sequence", NO_TOKENS),
            (WITHOUT_SEQUENCES, "sequence", NO_SEQUENCES),
        ):
            for way in (train, in_parts):
                with unchanged(policy):
                    result = way(policy, data, loss)
                assert (result["skipped"], result["skipped_steps"]) == (why, 1), way
                assert float(result["grad_norm"]) == float(result["loss"]) == 0.0
                assert result["step"] == policy.steps == 1
                assert "moe_metrics" not in result
        for calls in ([WITHOUT_TOKENS], [WITHOUT_TOKENS, WITHOUT_SEQUENCES]):
            with unchanged(policy):
                assert in_pieces(policy, *calls) == (NO_TOKENS,)
        # What counts on one replica counts for all, and so does one part of several.
        half = batch()
        half["token_mask"][1:] = 0
        for number, step in enumerate((train, in_parts), start=2):
            taken = step(policy, half, "token")
            assert (taken["step"], taken["skipped_steps"]) == (number, 0)
            assert "skipped" not in taken
        assert in_pieces(policy, WITHOUT_TOKENS, half) == () and policy.steps == 4


@pytest.mark.parametrize("name", CASES)
def test_a_step_on_nothing_changes_nothing_and_says_why(ranks, checkpoint, name: str) -> None:
    world, megatron, top, family = CASES[name]
    config = policy_config(checkpoint(family, **SIZES), megatron, **top)
    ranks.run(world, take_no_step, config)


def go_on_after_nothing(config: dict[str, Any], folder: Path) -> None:
    """Calls with and without nothing, saved and loaded in between, are those without it."""

    def state(policy: MegatronPolicy) -> dict[str, Any]:
        weights = {name: p.detach().clone() for name, p in policy.named_parameters()}
        return weights | {"schedule": policy._session.trainable.schedule_state()}

    with open_policy(config, init_reference_model=False) as policy:
        for _ in range(3):
            train(policy, batch())
        wanted = state(policy)
    with open_policy(config, init_reference_model=False) as policy:
        train(policy, batch())
        train(policy, WITHOUT_TOKENS)
        # One of two global batches: the schedule advances once for a call.
        both = BatchedDataDict.from_batches([WITHOUT_TOKENS, batch()])
        result = train(policy, both)
        assert (result["skipped"], result["skipped_steps"], result["step"]) == (NO_TOKENS, 1, 2)
        assert result["valid_tokens"] == [0.0, loss_mask(batch()).sum()]
        train(policy, WITHOUT_TOKENS)
        policy.save_checkpoint(**paths(folder))
    with resumed(config, folder, init_reference_model=False) as policy:
        assert policy.steps == 2
        train(policy, WITHOUT_TOKENS)
        train(policy, batch())
        found = state(policy)
    for name, value in wanted.items():
        same = torch.equal if isinstance(value, torch.Tensor) else lambda a, b: a == b
        assert same(value, found[name]), name


@pytest.mark.nightly
def test_a_run_that_is_resumed_after_steps_on_nothing_goes_on_as_one_without_them(
    ranks, checkpoint, tmp_path
) -> None:
    config = policy_config(checkpoint("qwen2", **SIZES), merged(NEVER_CONSTANT))
    ranks.run(1, go_on_after_nothing, config, tmp_path)


def take_the_step(config: dict[str, Any]) -> None:
    with open_policy(config, init_reference_model=False) as policy:
        before = {name: p.detach().clone() for name, p in policy.named_parameters()}
        rates = policy._session.trainable.lr
        result = train(policy, WITHOUT_TOKENS)
        assert (result["skipped_steps"], result["step"]) == (0, 1) and "skipped" not in result
        assert policy._session.trainable.lr != rates
        assert any(not torch.equal(before[name], p) for name, p in policy.named_parameters())
        assert in_parts(policy, WITHOUT_SEQUENCES, "sequence")["step"] == 2
        assert in_pieces(policy, WITHOUT_TOKENS) == ()


def test_a_key_has_steps_on_nothing_taken(ranks, checkpoint) -> None:
    megatron = merged(NEVER_CONSTANT, {"scheduler": {"start_weight_decay": 0.5}})
    config = policy_config(checkpoint("qwen2", **SIZES), megatron, skip_empty_steps=False)
    ranks.run(1, take_the_step, config)


def fail_on_nothing(config: dict[str, Any]) -> str:
    with open_policy(config, init_reference_model=False) as policy:
        share = own_share(policy, WITHOUT_TOKENS)
        with unchanged(policy), pytest.raises(LossError) as error:
            policy.train(share, Mistaken("sequence", "raises", rank=1), mbs=1)
        return str(error.value)


def test_a_loss_that_fails_on_nothing_is_an_error_on_every_rank(ranks, checkpoint) -> None:
    config = policy_config(checkpoint("qwen2", **SIZES), {})
    one, other = ranks.run(2, fail_on_nothing, config)
    assert one == other and "raised ArithmeticError" in one
