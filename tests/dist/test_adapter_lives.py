"""Adapters through what a run does with them: dropout, refits and generation between steps, and
resuming bit by bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_policy.batch import BatchedDataDict
from megatron_policy.converters.rows.shards import is_split
from megatron_policy.memory.states import IDLE, LOGPROB, REFIT, TRAIN
from tests import oracle
from tests.dist.cases import GLOBAL_BATCH, LOSSES, open_policy, own_steps
from tests.dist.layouts import EXPERT_LAYOUTS, LAYOUTS, LENGTH, OVERLAPPED, SIZES, VOCAB, layout
from tests.dist.resuming import weights_of
from tests.dist.test_adapter_handover import ANEW
from tests.dist.test_adapters import FULL, adapted
from tests.dist.test_generate import NEW, PROMPT_LENGTHS, Tokenizer, generation, hf_greedy, prompts
from tests.dist.test_memory_states import memory_of
from tests.dist.test_refit_faults import KeepingTransport
from tests.dist.test_resume import Case, assert_went_on, from_checkpoint, straight

DROPPED: dict[str, Any] = {"dropout": 0.3, **ANEW}


def batches(steps: int) -> BatchedDataDict:
    return oracle.make_batch(steps * GLOBAL_BATCH, LENGTH, VOCAB)


def trained(config: dict[str, Any], data: BatchedDataDict) -> dict[str, Any]:
    """What this rank sees of steps without pause, and of its adapters afterwards."""
    with open_policy(config, init_reference_model=False) as policy:
        first = own_steps(policy, data)[0]
        evaluated = policy.train(first, LOSSES["token"](), mbs=1, eval_mode=True)
        steps = [policy.train(b, LOSSES["token"](), mbs=1) for b in own_steps(policy, data)]
        arch, place = policy._engine.table.architecture, policy._engine.place
        held = policy._engine.adapters.held
        shards = {e.megatron: place.shard_of(e.row) for e, _ in held}
        whole = {e.megatron for e, _ in held if not is_split(e.row, arch, shards[e.megatron].size)}
        return {
            "evaluated": evaluated["loss"],
            "losses": [step["loss"] for step in steps],
            "norms": [torch.as_tensor(step["grad_norm"]) for step in steps],
            "adapters": {e.megatron: p.detach().clone() for e, p in held},
            "whole": whole,
        }


def same(one: Any, other: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


WITH_DROPOUT = [
    ("one process", "qwen2", "pre"),
    ("one process", "qwen2", "post"),
    ("TP2", "qwen2", "pre"),
    ("TP2", "qwen2", "post"),
    ("TP2+SP", "qwen2", "post"),
    ("TP2+SP", "qwen2", "pre"),
    ("TP2xCP2+SP", "qwen2", "pre"),
    ("EP2xTP2+SP", "qwen3_moe", "pre"),
    ("EP2xETP2+TP2", "qwen3_moe", "post"),
    ("EP2xETP2+TP2", "qwen3_moe", "pre"),
]


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "family", "position"), WITH_DROPOUT)
def test_dropout_follows_from_the_seed_and_leaves_ranks_with_the_same_adapters(
    ranks, checkpoint, name: str, family: str, position: str
) -> None:
    """Ranks that hold the same adapter have drawn alike, or the gradients were not the sum."""
    path, case = checkpoint(family, tied=False, **SIZES), (LAYOUTS | EXPERT_LAYOUTS)[name]
    data = batches(3)

    def run(**peft: Any) -> list[dict[str, Any]]:
        own = {"dropout_position": position, **DROPPED, **peft}
        return list(ranks.run(case.world, trained, adapted(path, case.megatron, None, **own), data))

    seen, again, without = run(), run(), run(dropout=0.0)
    for one, other, plain in zip(seen, again, without, strict=True):
        assert same(one["losses"], other["losses"]) and same(one["norms"], other["norms"])
        assert same(one["adapters"].values(), other["adapters"].values())
        assert torch.equal(one["evaluated"], plain["evaluated"]), (
            "there is no dropout in evaluation"
        )
        assert not same(one["losses"], plain["losses"])
    for one in seen[1:]:
        for weight in one["whole"] & seen[0]["whole"]:
            assert torch.equal(one["adapters"][weight], seen[0]["adapters"][weight]), weight


def test_dropout_is_of_adapters_alone(ranks, checkpoint) -> None:
    """With B of zeros adapters add nothing, regardless of what is dropped."""
    path, data = checkpoint("qwen2", tied=False, **SIZES), batches(1)
    (dropped,) = ranks.run(1, trained, adapted(path, {}, None, dropout=0.5), data)
    (plain,) = ranks.run(1, trained, adapted(path, {}, None), data)
    assert same(dropped["losses"], plain["losses"])
    assert not same(dropped["norms"], plain["norms"])


@pytest.mark.parametrize("name", ["one process", "PP2", "TP2+SP"])
def test_what_is_recomputed_is_dropped_again(ranks, checkpoint, name: str) -> None:
    path, case, data = checkpoint("qwen2", tied=False, **SIZES), LAYOUTS[name], batches(1)
    plain, recomputed = (
        ranks.run(case.world, trained, adapted(path, case.megatron | more, None, **DROPPED), data)
        for more in ({}, FULL)
    )
    for one, other in zip(plain, recomputed, strict=True):
        assert same(one["losses"], other["losses"])
        torch.testing.assert_close(one["norms"], other["norms"], rtol=1e-6, atol=0.0)


SAME = {
    "TP2+SP": Case(LAYOUTS["TP2+SP"], tied=False),
    "PP2xVPP2, recomputed": Case(LAYOUTS["PP2xVPP2"], FULL),
    "DP2, distributed, overlapped, bf16": Case(
        layout(2, **OVERLAPPED), top={"precision": "bfloat16"}
    ),
    "EP2": Case(EXPERT_LAYOUTS["EP2"], family="qwen3_moe", tied=False),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", SAME)
def test_four_steps_with_dropout_equal_two_a_save_a_load_and_two(
    ranks, checkpoint, tmp_path: Path, name: str
) -> None:
    case = SAME[name]
    peft = {"peft": {"enabled": True, "dim": 4, "alpha": 8.0, **DROPPED}}
    config = Case(case.layout, case.megatron | peft, case.top).config(
        checkpoint(case.family, tied=case.tied, **SIZES)
    )
    before = ranks.run(case.layout.world, straight, config, tmp_path)
    after = ranks.run(case.layout.world, from_checkpoint, config, tmp_path, True)
    assert_went_on(before, after, tmp_path)


def run_of_a_life(
    config: dict[str, Any], data: BatchedDataDict, busy: bool, root: Path
) -> dict[str, Any]:
    """Three steps; if `busy` with refits, exports, generation and all memory states between."""
    with open_policy(config, tokenizer=Tokenizer()) as policy:
        memory_of(policy, settle=policy._session.settle)
        seen: dict[str, Any] = {"losses": []}
        for number, batch in enumerate(own_steps(policy, data)):
            seen["losses"].append(policy.train(batch, LOSSES["token"](), mbs=1)["loss"])
            if busy:
                seen |= between(policy, root / str(number))
        return seen | {"weights": weights_of(policy)}


def between(policy: Any, root: Path) -> dict[str, Any]:
    policy.memory.enter(REFIT)
    transport = KeepingTransport()
    policy.refit(transport)
    alone = KeepingTransport()
    policy.refit(alone, adapters=True)
    policy.memory.enter(IDLE)
    policy.memory.enter(LOGPROB)
    policy.reference_logprobs(prompts())
    exported = {name: tensor.clone() for name, tensor in policy.export()}
    policy.export_hf(root)
    done = policy.generate(prompts(), greedy=True)
    policy.memory.enter(TRAIN)
    sent = [transport.session.found, alone.session.found]
    return {"exported": exported, "sent": sent, "done": done}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("one process", "qwen2"),
        ("TP2+SP", "qwen2"),
        ("PP2xVPP2", "qwen3"),
        ("DP2 distributed optimizer, both overlaps", "qwen2"),
        ("TP2xPP2xDP2+SP", "qwen2"),
        ("EP2xTP2+SP", "qwen3_moe"),
    ],
)
def test_training_is_the_same_with_refits_exports_and_generation_between_steps(
    ranks, checkpoint, tmp_path: Path, name: str, family: str
) -> None:
    path, case, data = (
        checkpoint(family, tied=False, **SIZES),
        (LAYOUTS | EXPERT_LAYOUTS)[name],
        batches(3),
    )
    config = adapted(path, case.megatron, None, **DROPPED) | generation()
    quiet = ranks.run(case.world, run_of_a_life, config, data, False, tmp_path)
    busy = ranks.run(case.world, run_of_a_life, config, data, True, tmp_path)
    for one, other in zip(busy, quiet, strict=True):
        assert same(one["losses"], other["losses"])
        assert one["weights"].keys() == other["weights"].keys()
        for weight, tensor in one["weights"].items():
            assert torch.equal(tensor, other["weights"][weight]), weight
        for row, length in enumerate(PROMPT_LENGTHS):
            done = one["done"].tokens_BT[row, : length + NEW].tolist()
            assert done == hf_greedy(tmp_path / "2", row)
    found = [one["sent"] for one in busy]
    for kind in range(2):
        sent = {name: tensor for each in found for name, tensor in each[kind].items()}
        assert sent
        for weight, tensor in sent.items():
            assert kind or torch.equal(tensor, busy[0]["exported"][weight]), weight
