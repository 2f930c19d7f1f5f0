"""What a stage hands to the schedule, which on a GPU frees it once it is sent: never a view, whose
base would stay in memory (Megatron-Core raises).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests import oracle
from tests.dist.cases import GLOBAL_BATCH, open_policy, own_share, policy_config
from tests.dist.layouts import LAYOUTS, LENGTH, SIZES, VOCAB
from tests.losses import Result, TokenNLL


class View(TokenNLL):
    """A loss whose value is a view."""

    def __call__(self, *args: Any, **kwargs: Any) -> Result:
        value, metrics = super().__call__(*args, **kwargs)
        return torch.stack([value, value])[0], metrics


def train_with_outputs_seen(config: dict[str, Any]) -> dict[str, Any]:
    from megatron.core.pipeline_parallel import schedules

    original, seen = schedules.deallocate_output_tensor, []

    def looked_at(out: Any, *args: Any, **kwargs: Any) -> None:
        for each in out if isinstance(out, list) else [out]:
            seen.append(each is not None and each._base is not None)
        original(out, *args, **kwargs)

    schedules.deallocate_output_tensor = looked_at
    try:
        with open_policy(config) as policy:
            data = own_share(policy, oracle.make_batch(GLOBAL_BATCH, LENGTH, VOCAB))
            loss = policy.train(data, View())["loss"].item()
            policy.logprobs(data)
    finally:
        schedules.deallocate_output_tensor = original
    return {"loss": loss, "views": sum(seen), "seen": len(seen)}


@pytest.mark.parametrize("family", ["qwen2", "deepseek_v3", "gpt_oss"])
def test_a_stage_sends_no_view_of_another_tensor(ranks, checkpoint, family: str) -> None:
    path = checkpoint(family, **SIZES)
    plain = policy_config(path, {})
    (whole,) = ranks.run(1, train_with_outputs_seen, plain)
    for name in ("PP2", "PP2xVPP2"):
        config = policy_config(path, LAYOUTS[name].megatron)
        for seen in ranks.run(2, train_with_outputs_seen, config):
            assert seen["seen"] and not seen["views"], (name, seen)
            assert seen["loss"] == pytest.approx(whole["loss"], rel=1e-5)
