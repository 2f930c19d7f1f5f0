"""Experts that tokens took before are taken again, in every layout: recorded, replayed, and equal
to transformers when its routers are made to take them.

Shapes: B rows, S positions, L layers with experts, E experts, K experts of a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from megatron_policy.batch import BatchedDataDict
from megatron_policy.errors import BatchError
from megatron_policy.interfaces import LossInputType, LossType
from megatron_policy.policy import MegatronPolicy
from megatron_policy.workers.worker import MegatronPolicyWorkerImpl
from tests import oracle
from tests.checkpoints import make_checkpoint
from tests.dist.cases import GLOBAL_BATCH, open_policy, own_share, policy_config
from tests.dist.layouts import Layout, layout
from tests.dist.shortcuts import answer, dynamic, packed
from tests.exact import Exact, assert_equal, load_hf
from tests.families import EXPERTS
from tests.losses import TokenNLL, token_nll
from tests.router_oracle import forced, recording

VOCAB, LENGTH, MICRO = 199, 14, 2
SMALL = {"hidden": 48, "heads": 4, "layers": 4, "ffn": 40, "vocab": VOCAB}
RECOMPUTED = {"activation_checkpointing": True, "recompute_granularity": "full"}
EP2_TP2 = {
    "expert_model_parallel_size": 2,
    "expert_tensor_parallel_size": 1,
    "sequence_parallel": True,
}


REPLAY = {"router_replay": {"enabled": True}, "logprob_batch_size": MICRO}
Case = tuple[Layout, dict[str, Any]]
CASES: dict[str, Case] = {
    "PP2xVPP2, recomputed": (layout(2, pp=2, vpp=2, **RECOMPUTED), {}),
    "EP2xTP2+SP": (layout(2, tp=2, **EP2_TP2), {}),
    "CP2 packed": (layout(2, context_parallel_size=2), packed(32)),
    "DP2 dynamic": (layout(2), dynamic(32)),
    "all axes, packed": (
        layout(8, tp=2, pp=2, context_parallel_size=2, **EP2_TP2, **RECOMPUTED),
        packed(32),
    ),
}


class Remembering:
    """A token-level loss that keeps the log-probabilities it was given, and their tokens."""

    loss_type, input_type = LossType.TOKEN_LEVEL, LossInputType.LOGPROB

    def __init__(self) -> None:
        self.seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __call__(self, data, global_valid_seqs, global_valid_toks, next_token_logprobs) -> Any:
        self.seen.append((data["row"].clone(), next_token_logprobs.detach().clone()))
        return token_nll(next_token_logprobs, data, global_valid_toks), {}

    def rows(self) -> dict[int, torch.Tensor]:
        pairs = (pair for both in self.seen for pair in zip(*both, strict=True))
        return {int(number): scores for number, scores in pairs}


def forced_loss(model: PreTrainedModel, data: BatchedDataDict) -> torch.Tensor:
    with forced(model, data["routed_experts"]):
        return oracle.token_level(model, data)


def drawn(rows: int, layers: int, experts: int, chosen: int) -> torch.Tensor:
    """Random choices `[B, S, L, K]`, with tokens that have none in all layers or in one."""
    random = torch.Generator().manual_seed(1)
    shape = (rows, LENGTH, layers)
    picked = torch.rand(*shape, experts, generator=random).argsort(-1)[..., :chosen]
    picked[torch.rand(shape[:2], generator=random) < 0.1] = -1
    picked[torch.rand(shape, generator=random) < 0.1] = -1
    return picked


@dataclass(frozen=True)
class Model:
    path: Path
    data: BatchedDataDict
    own_BSLK: torch.Tensor
    """What the routers of transformers choose."""
    logprobs: Exact
    """With the experts that are in the data, those of tokens that count."""
    learned: oracle.Learned


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Model:
    path = make_checkpoint(tmp_path_factory.mktemp("m"), "qwen3_moe", **SMALL)
    data = oracle.make_batch(2 * GLOBAL_BATCH, LENGTH, VOCAB)
    data["row"] = torch.arange(data.size)
    data["routed_experts"] = drawn(data.size, 3, 4, 2)
    chosen: list[torch.Tensor] = []

    def choose(hf: PreTrainedModel) -> torch.Tensor:
        chosen.clear()
        with recording(hf, chosen):
            return hf(data["input_ids"]).logits

    Exact.of(path, choose)
    own_BSLK = torch.stack([each.view(data.size, LENGTH, -1) for each in chosen], dim=2)

    def score(hf: PreTrainedModel) -> torch.Tensor:
        with forced(hf, data["routed_experts"]):
            logits = hf(data["input_ids"]).logits[:, :-1]
        scores = logits.log_softmax(-1).gather(-1, data["input_ids"][:, 1:, None]).squeeze(-1)
        return scores.masked_fill(~inside(data)[:, 1:], 0)

    learned = oracle.Learned.of(path, data, GLOBAL_BATCH, forced_loss)
    return Model(path, data, own_BSLK, Exact.of(path, score), learned)


def inside(data: BatchedDataDict) -> torch.Tensor:
    return torch.arange(LENGTH) < data["input_lengths"].unsqueeze(1)


def with_experts(data: BatchedDataDict, experts: torch.Tensor | None) -> BatchedDataDict:
    rest = {key: value for key, value in data.items() if key != "routed_experts"}
    return BatchedDataDict(rest if experts is None else rest | {"routed_experts": experts})


def record_and_replay(config: dict[str, Any], data: BatchedDataDict) -> dict[str, Any]:
    """What this rank sees of its share: its own choices, the replay of these and of given ones, and
    two steps of training with the latter, the second in parts.
    """
    with open_policy(config) as policy:
        share = own_share(policy, data)
        first = share.get_batch(0, GLOBAL_BATCH // policy.topology.dp)
        plain = with_experts(first, None)
        scores, taken = policy.logprobs(plain, return_routed_experts=True)
        again, retaken = policy.logprobs(with_experts(first, taken), return_routed_experts=True)
        refuse_experts(policy, first)
        worker = object.__new__(MegatronPolicyWorkerImpl)
        worker.policy = policy
        loss = Remembering()
        # The same tokens as are scored: sums in matrix products depend on how many rows they have.
        everything = {"sample_mask": torch.ones(first.size), "token_mask": inside(first).long()}
        counted = with_experts(BatchedDataDict(first | everything), taken)
        policy.train(counted, loss, eval_mode=True, mbs=MICRO)
        seen = {
            "dp": policy.coords.dp,
            "rows": share["row"],
            "first": first["row"],
            "taken": taken,
            "replayed bit-equal": torch.equal(scores, again) and torch.equal(taken, retaken),
            "scores": scores,
            "trained": loss.rows(),
            "given": policy.logprobs(share),
            "reference": policy.reference_logprobs(first),
            "answer": worker.get_logprobs(plain, return_routed_experts=True),
        }
        one = policy.train(first, TokenNLL(), gbs=GLOBAL_BATCH, mbs=MICRO)
        policy.accumulator.begin(TokenNLL(), GLOBAL_BATCH, MICRO)
        policy.accumulator.microbatch(share.get_batch(1, first.size))
        seen["steps"] = [one, policy.accumulator.finish()]
        return seen


def refuse_experts(policy: MegatronPolicy, data: BatchedDataDict) -> None:
    """Refuse data without experts, and an expert that is none if the last replica has it."""
    wrong, last = data["routed_experts"].clone(), policy.coords.dp == policy.topology.dp - 1
    if last:
        wrong[1, 0, 2] = 4
    outside = "expert 4 in row 1, layer 3, at position 0" if last else "another data-parallel rank"
    lacking = "router_replay.enabled is true, but the data lack 'routed_experts'"
    for experts, message in ((None, lacking), (wrong, outside)):
        with pytest.raises(BatchError, match=message):
            policy.train(with_experts(data, experts), TokenNLL(), gbs=GLOBAL_BATCH, mbs=MICRO)


@pytest.mark.parametrize("name", CASES)
def test_experts_are_recorded_and_replayed_exactly(ranks, model, name: str) -> None:
    case, top = CASES[name]
    config = policy_config(model.path, case.megatron, **REPLAY, **top)
    trained: dict[int, torch.Tensor] = {}
    results = ranks.run(case.world, record_and_replay, config, model.data)
    for seen in results:
        first = seen["first"]
        expected = model.own_BSLK[first].masked_fill(
            ~inside(model.data)[first][..., None, None], -1
        )
        assert torch.equal(seen["taken"].long(), expected)
        assert seen["taken"].dtype is torch.int8
        assert seen["replayed bit-equal"]
        assert torch.equal(seen["answer"]["routed_experts"], seen["taken"])
        assert torch.equal(seen["answer"]["logprobs"], seen["scores"])
        assert_equal("logprobs", seen["given"][:, 1:], model.logprobs[seen["rows"]])
        torch.testing.assert_close(seen["reference"], seen["scores"], rtol=0, atol=1e-6)
        model.learned.assert_same_steps(seen["steps"])
        trained |= seen["trained"]
    for seen in results:
        for row, scores in zip(seen["first"].tolist(), seen["scores"], strict=True):
            real, own = inside(model.data)[row, 1:], trained[row]
            assert torch.equal(own[real[: len(own)]], scores[1:][real]), row


def replay_own_and_given(data: BatchedDataDict, policy: MegatronPolicy) -> tuple[Any, Any, Any]:
    """Scores and experts: the rank's own, the same replayed, and those of the data."""
    own = policy.logprobs(with_experts(data, None), return_routed_experts=True)
    again = policy.logprobs(with_experts(data, own[1]), return_routed_experts=True)
    return own, again, policy.logprobs(data, return_routed_experts=True)


def hf_experts(path: Path, data: BatchedDataDict) -> torch.Tensor:
    """The experts, in ascending order, with which transformers computes tokens: `[B, S, L, K]`."""
    model, found = load_hf(path), []
    for module in model.modules():
        if type(module).__name__.endswith("Experts"):
            module.register_forward_pre_hook(lambda _, args: found.append(args[1]))
    with torch.no_grad():
        model(data["input_ids"])
    layers = [each.view(*data["input_ids"].shape, -1) for each in found]
    return torch.stack(layers, dim=2).sort(-1).values


OTHERS: dict[str, Case] = {
    "deepseek_v3": (layout(2, pp=2, num_layers_in_first_pipeline_stage=1), packed(32)),
    "gpt_oss": (layout(2, context_parallel_size=2), {}),
}


@pytest.mark.parametrize("family", OTHERS)
def test_experts_are_those_of_transformers_in_families_with_other_routers_and_attention(
    ranks, tmp_path, family: str
) -> None:
    """In deepseek_v3 only a dense layer is on the first stage, which thus has no router."""
    path = make_checkpoint(tmp_path, family, **SMALL)
    case, top = OTHERS[family]
    data = oracle.make_batch(4, LENGTH, VOCAB)
    expected = hf_experts(path, data)
    layers, chosen = expected.shape[2:]
    data["routed_experts"] = drawn(
        4, layers, EXPERTS[family].tiny.get("n_routed_experts", 4), chosen
    )
    config = policy_config(path, case.megatron, **REPLAY, **top)
    real_BS = inside(data)
    for seen in ranks.run(case.world, answer, config, partial(replay_own_and_given, data)):
        (scores, own), (again, retaken), (other, taken) = seen
        assert torch.equal(own[real_BS].sort(-1).values.long(), expected[real_BS])
        assert (own[~real_BS] == -1).all() and (taken[~real_BS] == -1).all()
        assert torch.equal(scores, again) and torch.equal(own, retaken)
        asked = (data["routed_experts"] >= 0) & real_BS[..., None, None]
        assert torch.equal(taken[asked].long(), data["routed_experts"][asked])
        assert (taken[real_BS] >= 0).all()
        assert not torch.equal(other, scores)
