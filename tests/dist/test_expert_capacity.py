"""Experts with a capacity drop the tokens that plain torch drops, one row a microbatch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from megatron_policy.batch import BatchedDataDict
from tests import oracle
from tests.checkpoints import make_checkpoint
from tests.dist.cases import GLOBAL_BATCH, LOSSES, open_policy, own_steps, policy_config
from tests.dist.layouts import EXPERT_LAYOUTS, LAYOUTS
from tests.router_oracle import routers

VOCAB, LENGTH, FACTOR = 200, 24, 0.75
SMALL = {"hidden": 48, "heads": 4, "layers": 2, "ffn": 40, "vocab": VOCAB}
DATA = oracle.make_batch(2 * GLOBAL_BATCH, LENGTH, VOCAB)
DROPPED: list[int] = []


@contextmanager
def limited(model: PreTrainedModel) -> Iterator[None]:
    """Have experts take at most their capacity of the tokens of a forward pass, those with the
    largest weights.
    """

    def limit(router: Any, _: Any, out: Any) -> Any:
        logits_TE, weights_TK, chosen_TK = out
        tokens, experts = logits_TE.shape
        capacity = math.ceil(tokens * chosen_TK.size(1) / experts * FACTOR)
        kept_TK = torch.ones_like(chosen_TK, dtype=torch.bool)
        for expert in range(experts):
            own = (chosen_TK == expert).nonzero().tolist()
            own.sort(key=lambda at: float(weights_TK[at[0], at[1]].detach()), reverse=True)
            for token, place in own[capacity:]:
                kept_TK[token, place] = False
        DROPPED.append(int((~kept_TK).sum()))
        return logits_TE, weights_TK * kept_TK, chosen_TK

    with ExitStack() as stack:
        for router in routers(model):
            stack.callback(router.register_forward_hook(limit).remove)
        yield


def row_by_row(model: PreTrainedModel, data: BatchedDataDict) -> torch.Tensor:
    """The mean negative log-likelihood of the valid tokens, each row computed alone."""
    mask_BS = data["token_mask"][:, 1:] * data["sample_mask"].unsqueeze(-1)
    total = torch.zeros(())
    with limited(model):
        for tokens_S, mask_S in zip(data["input_ids"], mask_BS, strict=True):
            logits_SV = model(tokens_S[None]).logits[0, :-1].log_softmax(-1)
            picked_S = logits_SV.gather(-1, tokens_S[1:, None]).squeeze(-1)
            total = total - (picked_S * mask_S).sum()
    return total / mask_BS.sum()


def train(config: dict[str, Any]) -> list[dict[str, Any]]:
    with open_policy(config, init_reference_model=False) as policy:
        return [
            policy.train(step, LOSSES["token"](), gbs=GLOBAL_BATCH, mbs=1)
            for step in own_steps(policy, DATA)
        ]


@pytest.mark.parametrize("layout", ["one process", "EP2", "PP2"])
@pytest.mark.parametrize("pad", [False, True], ids=["as they come", "padded to capacity"])
def test_tokens_beyond_the_capacity_of_an_expert_are_dropped(ranks, tmp_path, layout, pad) -> None:
    path = make_checkpoint(tmp_path, "qwen3_moe", **SMALL, num_experts=4, norm_topk_prob=True)
    DROPPED.clear()
    hf = oracle.Learned.of(path, DATA, GLOBAL_BATCH, row_by_row)
    assert sum(DROPPED) > 100
    case = (LAYOUTS | EXPERT_LAYOUTS)[layout]
    keys = {"moe_expert_capacity_factor": FACTOR, "moe_pad_expert_input_to_capacity": pad}
    for seen in ranks.run(case.world, train, policy_config(path, case.megatron | keys)):
        hf.assert_same_steps(seen, layout)


def scores(config: dict[str, Any]) -> torch.Tensor:
    with open_policy(config, init_optimizer=False, init_reference_model=False) as policy:
        return policy.logprobs(BatchedDataDict({"input_ids": DATA["input_ids"]}))


def test_a_capacity_for_all_tokens_changes_nothing_and_the_order_of_tokens_can_decide(
    ranks, tmp_path
) -> None:
    path = make_checkpoint(tmp_path, "qwen3_moe", **SMALL)

    def found(**keys: Any) -> torch.Tensor:
        (logprobs,) = ranks.run(1, scores, policy_config(path, keys))
        return logprobs

    unlimited = found()
    assert torch.equal(found(moe_expert_capacity_factor=-1), unlimited)
    torch.testing.assert_close(found(moe_expert_capacity_factor=8.0), unlimited, rtol=0, atol=1e-6)
    by_weight = found(moe_expert_capacity_factor=0.5)
    by_place = found(moe_expert_capacity_factor=0.5, moe_token_drop_policy="position")
    assert (by_weight - unlimited).abs().max() > 1e-3
    assert (by_place - by_weight).abs().max() > 1e-3
