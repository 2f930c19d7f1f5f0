"""Chosen experts in data: what is refused, in which form they are kept, and the weights of experts
that tokens are made to take.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_policy.batch import BatchedDataDict
from megatron_policy.config import PolicyConfig
from megatron_policy.config.layout import check_layout
from megatron_policy.converters.architecture import Moe, Scoring
from megatron_policy.engines.megatron.layers.replay import RouterParams
from megatron_policy.engines.megatron.layers.router import route
from megatron_policy.errors import BatchError, ConfigError
from megatron_policy.packing.batching import Batching
from megatron_policy.packing.cost import sequence_cost
from megatron_policy.parallel.topology import Topology
from megatron_policy.training.longest import Longest
from megatron_policy.training.replay import Replay, RouterReplay
from megatron_policy.training.sharding import BatchDispatcher
from tests.losses import TokenNLL
from tests.pure.test_config import minimal
from tests.pure.test_rows import model

ROWS, LENGTH, EXPERTS, CHOSEN = 3, 4, 5, 2
LAYERS, NUM_LAYERS = (1, 2, 4), 6
REPLAY = RouterReplay(True, EXPERTS, CHOSEN, LAYERS, NUM_LAYERS)
OFF = replace(REPLAY, enabled=False)


def batch(experts: Any = None, dtype: torch.dtype = torch.int64) -> BatchedDataDict:
    """Rows of 4, 3 and 4 tokens; without `experts` every token takes 0 and 3 in every layer."""
    if experts is None:
        experts = torch.tensor([0, 3]).expand(ROWS, LENGTH, len(LAYERS), CHOSEN).to(dtype).clone()
    return BatchedDataDict(
        {
            "input_ids": torch.zeros(ROWS, LENGTH, dtype=torch.long),
            "input_lengths": torch.tensor([4, 3, 4]),
            "sample_mask": torch.ones(ROWS),
            "routed_experts": experts,
        }
    )


def changed(row: int, position: int, place: int, experts: list[int]) -> BatchedDataDict:
    data = batch()
    data["routed_experts"][row, position, place] = torch.tensor(experts)
    return data


REFUSED = {
    "an expert above": (changed(2, 1, 1, [0, 5]), "expert 5 in row 2, layer 2, at position 1"),
    "an expert below": (changed(0, 0, 0, [0, -2]), "expert -2 in row 0, layer 1, at position 0"),
    "half a choice": (changed(1, 2, 2, [-1, 3]), "expert -1 in row 1, layer 4, at position 2"),
    "one twice": (changed(1, 0, 2, [3, 3]), r"\[3, 3\] in row 1, layer 4, at position 0"),
    "layers": (batch(torch.zeros(3, 4, 4, 2).long()), "wrong in row 0 from layer 3 on"),
    "k": (batch(torch.zeros(3, 4, 3, 1).long()), "wrong in row 0 from layer 0 on"),
    "positions": (batch(torch.zeros(3, 5, 3, 2).long()), r"integers \[3, 4, 3, 2\]"),
    "dimensions": (batch(torch.zeros(3, 4, 6).long()), r"integers \[3, 4, 3, 2\]"),
    "floats": (batch(torch.zeros(3, 4, 3, 2)), "is torch.float32 of shape"),
    "booleans": (batch(torch.zeros(3, 4, 3, 2).bool()), "is torch.bool of shape"),
    "a list": (batch([1, 2, 3]), "is a list, wrong from row 0 on"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_choices_that_do_not_fit_are_refused_by_row_and_layer(name: str) -> None:
    data, message = REFUSED[name]
    before = copy.deepcopy(data["routed_experts"])
    with pytest.raises(BatchError, match=message):
        REPLAY.prepare(data)
    torch.testing.assert_close(data["routed_experts"], before, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_choices_are_kept_in_the_smallest_dtype_and_within_the_rows(dtype: torch.dtype) -> None:
    data = batch(dtype=dtype)
    data["routed_experts"][1, 3] = 77  # beyond the row's length
    kept = REPLAY.prepare(data)["routed_experts"]
    expected = batch()["routed_experts"]
    expected[1, 3] = -1
    assert kept.dtype is torch.int8 and torch.equal(kept.long(), expected)
    assert (data["routed_experts"][1, 3] == 77).all(), "the caller's own data are not changed"
    assert torch.equal(REPLAY.prepare(REPLAY.prepare(data))["routed_experts"], kept)
    wide = replace(REPLAY, experts=129)
    assert wide.prepare(data)["routed_experts"].dtype is torch.int16
    assert replace(REPLAY, experts=128).dtype is torch.int8
    assert replace(REPLAY, experts=2**15 + 1).dtype is torch.int32


def test_choices_of_all_layers_are_reduced_to_those_with_experts() -> None:
    few = changed(0, 1, 2, [4, 1])
    wide = torch.full((ROWS, LENGTH, NUM_LAYERS, CHOSEN), 99)
    wide[:, :, list(LAYERS)] = few["routed_experts"]
    kept = REPLAY.prepare(batch(wide))["routed_experts"]
    assert torch.equal(kept, REPLAY.prepare(few)["routed_experts"])
    assert kept[0, 1, 2].tolist() == [4, 1]


def test_the_configuration_decides_whether_experts_are_replayed_and_plans_stay() -> None:
    data, bare = batch(), batch()
    del bare["routed_experts"]
    with pytest.raises(BatchError, match="enabled is true, but the data lack 'routed_experts'"):
        REPLAY.prepare(bare)
    with pytest.raises(BatchError, match="enabled is false: set it to true"):
        OFF.prepare(data, Replay.IF_GIVEN)
    for replay, given in ((REPLAY, Replay.IF_GIVEN), (OFF, Replay.REQUIRED), (OFF, Replay.NEVER)):
        assert replay.prepare(bare, given) is bare
    assert "routed_experts" in REPLAY.prepare(data, Replay.IF_GIVEN)
    for replay in (REPLAY, OFF):
        assert "routed_experts" not in replay.prepare(data, Replay.NEVER)
    assert "routed_experts" in data
    data.micro_batch_indices, data.caller_rows = [[[0, 3]]], [7, 8, 9]
    for given in (Replay.REQUIRED, Replay.NEVER):
        prepared = REPLAY.prepare(data, given)
        assert prepared.micro_batch_indices == [[[0, 3]]] and prepared.caller_rows == [7, 8, 9]
    with pytest.raises(BatchError, match="the model has none"):
        RouterReplay(False, 0, 0, (), 2).check_has_experts()


def test_only_a_model_with_experts_can_replay_and_only_what_is_in_the_data() -> None:
    raw = minimal() | {"router_replay": {"enabled": True}}
    config = PolicyConfig.parse(raw)
    with pytest.raises(ConfigError, match=r"router_replay\.enabled=true needs a model with expert"):
        check_layout(config, model(), Topology())
    raw["router_replay"] = {"enabled": True, "transport": "ray"}
    with pytest.raises(ConfigError, match=r"transport='ray' leaves .* use 'inline'"):
        PolicyConfig.parse(raw)
    raw["router_replay"]["enabled"] = False
    check_layout(PolicyConfig.parse(raw), model(), Topology())


def test_the_driver_refuses_before_it_sends_and_deals_choices_with_their_rows() -> None:
    dynamic, longest = Batching("dynamic", 8, 1), Longest(8, 8)
    cost = sequence_cost(model(hidden_size=8, ffn_hidden_size=24))
    dealer = BatchDispatcher(Topology(dp=2), 9, dynamic, dynamic, cost, longest, REPLAY)
    wrong = changed(2, 1, 1, [0, 5])
    for deal in (
        lambda: dealer.to_train(wrong, TokenNLL(), 3, 1),
        lambda: dealer.to_train_part(wrong, TokenNLL(), 1),
        lambda: dealer.to_score(wrong),
    ):
        with pytest.raises(BatchError, match="expert 5 in row 2, layer 2"):
            deal()
    data = changed(2, 1, 1, [4, 0])
    sharded = dealer.to_score(data)
    answers = [BatchedDataDict({"routed_experts": s["routed_experts"]}) for s in sharded.shards]
    whole = sharded.restored([each for each in answers if each.size])
    assert torch.equal(whole["routed_experts"], REPLAY.prepare(data)["routed_experts"])
    assert all("routed_experts" not in s for s in dealer.to_score(data, Replay.NEVER).shards)


@pytest.mark.parametrize("renormalized", [True, False])
@pytest.mark.parametrize("scoring", Scoring)
def test_experts_that_tokens_are_made_to_take_weigh_by_the_routers_scores(
    scoring: Scoring, renormalized: bool
) -> None:
    sizes = {"experts": 6, "chosen": 2, "ffn_hidden_size": 8, "groups": 3, "groups_chosen": 1}
    moe = Moe(scoring=scoring, renormalized=renormalized, scale=1.5, **sizes)
    logits = torch.randn(4, 6, generator=torch.Generator().manual_seed(0), requires_grad=True)
    own = route(logits, moe, torch.arange(6.0))[1]
    taken = torch.tensor([[5, 0], [1, 2], [-1, -1], [4, 3]])
    recorded: dict[int, torch.Tensor] = {}
    params = RouterParams({7: taken.to(torch.int8)}, recorded)
    weights, mask = route(logits, moe, torch.arange(6.0), lambda it: params.chosen(7, it))
    for token, experts in enumerate(taken.tolist()):
        if experts[0] < 0:
            experts = own[token].nonzero().flatten().tolist()
        assert mask[token].nonzero().flatten().tolist() == sorted(experts)
        assert sorted(recorded[7][token].tolist()) == sorted(experts)
        z = logits[token].detach().double()
        shares = z.exp() / z.exp().sum()
        scores = 1 / (1 + (-z).exp()) if scoring is Scoring.SIGMOID else shares
        parts = torch.stack([scores[expert] for expert in experts])
        if renormalized or scoring is Scoring.SOFTMAX_OF_CHOSEN:
            parts = parts / parts.sum()
        found = weights[token, experts].detach().double()
        # A few operations on numbers of the order of 1, each rounded to fp32.
        torch.testing.assert_close(found, 1.5 * parts, rtol=16 * 2**-24, atol=0)
        assert weights[token].count_nonzero() == 2
    (weights * torch.arange(1.0, 7.0)).sum().backward()
    assert logits.grad is not None and logits.grad.abs().sum(-1).min() > 0
    assert params.chosen(8, taken) is taken, "of another layer nothing is known"
