"""The reference policy: frozen, exchanged and given back whatever happens; and what a policy
without parts refuses.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_policy.errors import ConfigError
from tests import oracle
from tests.dist.cases import GLOBAL_BATCH, LOSSES, open_policy, own_share, policy_config
from tests.dist.layouts import FSDP2_LAYOUTS, LAYOUTS, LENGTH, OVERLAPPED, VOCAB

PLACES = {
    "DP2": LAYOUTS["DP2"].megatron,
    "DP2, overlapped": LAYOUTS["DP2"].megatron | OVERLAPPED,
    "FSDP2 x 2": FSDP2_LAYOUTS["FSDP2 x 2"].megatron,
}


def weights(policy: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in policy.named_parameters()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def interrupted(config: dict[str, Any]) -> dict[str, bool]:
    data = oracle.make_batch(GLOBAL_BATCH, LENGTH, VOCAB)
    with open_policy(config) as policy:
        start = weights(policy)
        policy.train(own_share(policy, data), LOSSES["token"](), mbs=1)
        trained = weights(policy)
        with pytest.raises(KeyError, match="stop here"), policy.reference():
            inside = weights(policy)
            raise KeyError("stop here")
        after = weights(policy)
        nested = pytest.raises(
            ConfigError, match="has to wait until the reference policy has ended"
        )
        with policy.reference(), nested, policy.reference():
            pass
        return {
            "reference inside": same(inside, start),
            "own weights after": same(after, trained),
            "trained at all": not same(start, trained),
            "own weights after nesting": same(weights(policy), trained),
        }


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["DP2", "DP2, overlapped", "FSDP2 x 2"])
def test_the_policys_weights_come_back_bit_equal_from_an_interrupted_reference(
    ranks, checkpoints, precision: str, name: str
) -> None:
    config = policy_config(checkpoints[True], PLACES[name], precision=precision)
    for seen in ranks.run(2, interrupted, config):
        assert all(seen.values()), seen


def train_around_reference(config: dict[str, Any], read_reference: bool) -> list[float]:
    data = oracle.make_batch(GLOBAL_BATCH, LENGTH, VOCAB)
    with open_policy(config) as policy:
        losses = []
        for _ in range(3):
            if read_reference:
                policy.reference_logprobs(own_share(policy, data))
            result = policy.train(own_share(policy, data), LOSSES["token"](), mbs=1)
            losses.append(result["loss"].item())
        return losses


@pytest.mark.parametrize("name", ["DP2, overlapped", "FSDP2 x 2"])
def test_reading_the_reference_between_steps_changes_no_step(ranks, checkpoints, name) -> None:
    config = policy_config(checkpoints[True], PLACES[name])
    quiet = ranks.run(2, train_around_reference, config, False)
    assert ranks.run(2, train_around_reference, config, True) == quiet


def refusals(config: dict[str, Any]) -> list[str]:
    data = oracle.make_batch(GLOBAL_BATCH, LENGTH, VOCAB)
    said = []
    with open_policy(config, init_optimizer=False, init_reference_model=False) as policy:
        for attempt in (
            lambda: policy.train(data, LOSSES["token"]()),
            lambda: policy.reference_logprobs(data),
            lambda: policy.generate(data),
            lambda: policy.topk_logits(data, VOCAB + 1),
            lambda: policy.train(data, LOSSES["token"](), eval_mode=True, gbs=3),
        ):
            with pytest.raises((RuntimeError, ValueError)) as error:
                attempt()
            said.append(str(error.value))
        policy.train(data, LOSSES["token"](), eval_mode=True)
    return said


@pytest.mark.parametrize("megatron", [{}, {"dtensor_cfg": {}}], ids=["Megatron-Core", "FSDP2"])
def test_what_a_policy_cannot_do_it_refuses_with_the_reason(ranks, checkpoints, megatron) -> None:
    (said,) = ranks.run(1, refusals, policy_config(checkpoints[True], megatron))
    reasons = (
        "init_optimizer=False",
        "init_reference_model=False",
        "policy.generation",
        "vocabulary",
        "multiple",
    )
    for reason, message in zip(reasons, said, strict=True):
        assert reason in message, message
