"""Models with experts compute, learn, generate and export like transformers' own; with a capacity
they drop the tokens that plain torch drops.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from operator import methodcaller
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from megatron_policy.batch import BatchedDataDict
from megatron_policy.engines.megatron.layers import grouped_experts
from megatron_policy.policy import MegatronPolicy
from tests import oracle
from tests.checkpoints import make_checkpoint
from tests.dist.cases import (
    GLOBAL_BATCH,
    LOSSES,
    logits_of,
    open_policy,
    own_share,
    own_steps,
    policy_config,
    train_two_steps,
)
from tests.dist.layouts import EXPERT_LAYOUTS, LAYOUTS, layout
from tests.dist.shortcuts import UNUSED, answer, answer_trainable
from tests.dist.test_export import assert_same_tensors, export, tensors_of
from tests.dist.test_generate import (
    NEW,
    PROMPT_LENGTHS,
    Tokenizer,
    assert_written_as_read,
    generation,
    hf_greedy,
    prompts,
)
from tests.dist.test_mistakes import outcome
from tests.exact import Exact, assert_equal
from tests.families import EXPERTS, draw_experts
from tests.invariance.cases import MODELS
from tests.router_oracle import routers

DRAWS = 6
VOCAB, LENGTH = 200, 24
UNEVEN = "EP2xPP2, stages of 1 and 3 layers"
EVERY_LAYOUT = {
    **LAYOUTS,
    **EXPERT_LAYOUTS,
    UNEVEN: layout(4, pp=2, num_layers_in_first_pipeline_stage=1, expert_model_parallel_size=2),
}
SMALL = {"hidden": 48, "heads": 4, "layers": 4, "ffn": 40, "vocab": VOCAB}
SMALLER = SMALL | {"layers": 2}


@pytest.mark.daily
@pytest.mark.parametrize("family", EXPERTS)
def test_random_models_compute_the_logits_of_transformers(ranks, tmp_path, family: str) -> None:
    drawn = [draw_experts(family, seed) for seed in range(DRAWS)]
    paths = [
        make_checkpoint(tmp_path / str(number), family, tokenizer=False, **sizes)
        for number, sizes in enumerate(drawn)
    ]
    tokens = torch.randint(0, 128, (2, 20), generator=torch.Generator().manual_seed(0))
    models = [(path, sizes["vocab"]) for path, sizes in zip(paths, drawn, strict=True)]
    (results,) = ranks.run(1, logits_of, models, tokens)
    for sizes, path, logits in zip(drawn, paths, results, strict=True):
        assert_equal("logits", logits, Exact.of(path, lambda m: m(tokens).logits), sizes)


DATA = oracle.make_batch(2 * GLOBAL_BATCH, LENGTH, VOCAB)


@cache
def expected(path: Path) -> tuple[Exact, oracle.Learned]:
    """Transformers' logits of the data, and what it learns from them."""
    logits = Exact.of(path, lambda m: m(DATA["input_ids"]).logits)
    return logits, oracle.Learned.of(path, DATA, GLOBAL_BATCH, oracle.token_level)


def assert_like_hf(seen: dict[str, Any], path: Path, name: str) -> None:
    logits, hf = expected(path)
    assert_equal("logits", seen["before"]["logits"], logits, name)
    hf.assert_same_steps(seen["steps"], name)
    assert seen["unchanged"]
    before = seen["before"]["logprobs"]
    torch.testing.assert_close(seen["reference"], before, rtol=0, atol=1e-6)


@pytest.mark.nightly
@pytest.mark.parametrize("family", [f for f, each in EXPERTS.items() if each.trained])
def test_every_family_computes_and_learns_like_hf_under_its_layouts(
    ranks, checkpoint, family: str
) -> None:
    path = checkpoint(family, **SMALL)
    for name in EXPERTS[family].trained:
        case = EVERY_LAYOUT[name]
        config = policy_config(path, case.megatron, logprob_batch_size=GLOBAL_BATCH)
        for seen in ranks.run(case.world, train_two_steps, config, "token", DATA, VOCAB, True):
            assert_like_hf(seen, path, name)


def train_grouped(config: dict[str, Any], aligned: bool) -> tuple[dict[str, Any], int]:
    """As `train_two_steps`, and how many grouped matrix products there were. A GPU takes them by
    itself; here they are forced onto the CPU, for which torch has them, too.
    """
    products: list[int] = []
    product = torch.nn.functional.grouped_mm

    def counted(rows: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        products.append(len(rows))
        return product(rows, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grouped_experts, "has_grouped_products", lambda tokens: True)
        patch.setattr(torch.nn.functional, "grouped_mm", counted)
        if not aligned:
            patch.setattr(grouped_experts, "_ALIGNMENT", 7)
        return train_two_steps(config, "token", DATA, VOCAB, True), len(products)


# A gated MLP; one with biases, a clamp and an offset; latent attention and shared experts.
@pytest.mark.parametrize(
    ("family", "layout"),
    [("qwen3_moe", "EP2xETP2+TP2"), ("gpt_oss", "EP2"), ("deepseek_v3", "EP2xPP2")],
)
def test_grouped_products_learn_what_transformers_does(ranks, checkpoint, family, layout) -> None:
    path, case = checkpoint(family, **SMALLER), EXPERT_LAYOUTS[layout]
    config = policy_config(path, case.megatron, logprob_batch_size=GLOBAL_BATCH)
    results = ranks.run(case.world, train_grouped, config, True)
    assert any(products for _, products in results)
    for seen, _ in results:
        assert_like_hf(seen, path, layout)


def test_channels_that_kernels_cannot_take_are_computed_one_expert_at_a_time(
    ranks, checkpoint
) -> None:
    config = policy_config(checkpoint("mixtral", **SMALLER), {})
    ((_, products),) = ranks.run(1, train_grouped, config, False)
    assert products == 0


def test_every_token_has_a_row_of_its_expert_in_whole_units() -> None:
    for counts in ([3, 0, 8, 1], [0, 0, 0, 5], [16, 8, 0, 24]):
        places, padded = grouped_experts._pad_places(torch.tensor(counts))
        expected, start = [], 0
        for count, whole in zip(counts, padded.tolist(), strict=True):
            assert whole % 8 == 0 and 0 <= whole - count < 8
            expected += range(start, start + count)
            start += whole
        assert places.tolist() == expected


def train_and_compare(policy: MegatronPolicy) -> dict[str, bool]:
    """Which of the weights moved in training."""
    before = {name: p.detach().clone() for name, p in policy.named_parameters()}
    for step in own_steps(policy, DATA):
        policy.train(step, LOSSES["token"](), mbs=2)
    return {name: not torch.equal(before[name], p) for name, p in policy.named_parameters()}


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("family", [f for f, each in EXPERTS.items() if each.trained])
def test_routers_can_be_frozen_and_their_correction_biases_always_are(
    ranks, checkpoint, family: str, frozen: bool
) -> None:
    megatron = {"freeze_moe_router": frozen, "moe_router_dtype": "fp64"}
    config = policy_config(checkpoint(family, **SMALL), megatron)
    (moved,) = ranks.run(1, answer_trainable, config, train_and_compare)
    for name, has_moved in moved.items():
        router = ".mlp.router." in name
        stays = name.endswith("expert_bias") or (router and frozen)
        # No token may have taken an expert, and no row has a picture.
        if "local_experts" not in name and ".shell." not in name:
            assert has_moved is not stays, name
    assert any(".mlp.router.weight" in name for name in moved)
    assert any(moved[name] for name in moved if "local_experts" in name)


@pytest.mark.parametrize("family", [f for f, each in EXPERTS.items() if each.trained])
def test_recomputing_activations_changes_no_gradient(ranks, checkpoint, family: str) -> None:
    path = checkpoint(family, **SMALL)
    full = {"activation_checkpointing": True, "recompute_granularity": "full"}
    config = policy_config(path, full)
    (seen,) = ranks.run(1, train_two_steps, config, "token", DATA, VOCAB, False)
    expected(path)[1].assert_same_steps(seen["steps"])


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("deepseek_v3", "EP2xTP2+SP"),
        ("deepseek_v3", UNEVEN),
        ("deepseek_v3", "TP2+SP"),
        ("ernie4_5_moe", "EP2xTP2+SP"),
        ("glm4_moe", "DP2"),
        ("gpt_oss", "EP2xPP2"),
        ("gpt_oss", "PP2"),
        ("minimax_m2", "TP2+SP"),
        ("mixtral", "TP2+SP"),
        ("qwen2_moe", "TP2xPP2xDP2+SP"),
        ("qwen3_5_moe_text", "EP2xPP2"),
        ("qwen3_moe", "EP2xETP2+TP2"),
        ("qwen3_next", "EP2xTP2+SP"),
        ("qwen3_moe", "EP2xTP2xPP2xCP2+SP, distributed optimizer, overlaps"),
    ],
)
def test_mixed_dtypes_come_back_bit_equal(ranks, tmp_path, family: str, name: str) -> None:
    """Weights in bf16; in transformers as in Megatron-Core, correction biases stay in fp32."""
    source = make_checkpoint(tmp_path / "source", family, dtype="bfloat16", **SMALL)
    widen_correction_biases(source)
    case = EVERY_LAYOUT[name]
    config = policy_config(source, case.megatron, precision="bfloat16")
    ranks.run(case.world, export, config, tmp_path / "exported")
    assert_same_tensors(tmp_path / "exported", source)


def widen_correction_biases(path: Path) -> None:
    """Give the checkpoint's correction biases values that bf16 could not hold."""
    tensors = tensors_of(path)
    for name, tensor in tensors.items():
        if name.endswith("e_score_correction_bias"):
            tensors[name] = tensor.float() + 1e-5
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


OWN_ROWS = ((0, 1, 2, 3), (4,))
"""The prompts of each replica, as wide as its longest; those of the first need two caches."""


def continue_own_prompts(config: dict[str, Any], eos: int) -> dict[str, Any]:
    """What each replica makes of its own prompts; a single one has all of them."""
    with open_policy(config, tokenizer=Tokenizer(eos), **UNUSED) as policy:
        alone = policy.topology.dp == 1
        rows = [*range(len(PROMPT_LENGTHS))] if alone else [*OWN_ROWS[policy.coords.dp]]
        own = prompts().select_indices(rows)
        own["input_ids"] = own["input_ids"][:, : int(own["input_lengths"].max())]
        done = policy.generate(own, greedy=True)
        read = policy.logprobs(BatchedDataDict({"input_ids": done.tokens_BT}))
        return {"coords": policy.coords, "rows": rows, "done": [done], "read": read}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("deepseek_v3", "EP2"),
        ("gpt_oss", "EP2xTP2+SP"),
        ("mixtral", "EP2xPP2"),
        ("qwen3_moe", "EP2xETP2+TP2"),
    ],
)
def test_replicas_that_share_experts_continue_their_own_prompts_like_transformers(
    ranks, checkpoint, family: str, name: str
) -> None:
    path, case = checkpoint(family, **MODELS[family]), EXPERT_LAYOUTS[name]
    ends = [hf_greedy(path, row)[length:] for row, length in enumerate(PROMPT_LENGTHS)]
    eos = ends[4][2]  # which ends the second replica's only row, and what comes after it
    config = policy_config(path, case.megatron, **generation())
    found, replicas = {}, set()
    for seen in ranks.run(case.world, continue_own_prompts, config, eos):
        (done,), rows = seen["done"], seen["rows"]
        for index, row in enumerate(rows):
            count = ends[row].index(eos) + 1 if eos in ends[row] else NEW
            assert done.generated_B[index] == count
            text = done.tokens_BT[index, : PROMPT_LENGTHS[row] + count].tolist()
            assert text == hf_greedy(path, row)[: len(text)]
            found[row] = count
        lengths = [PROMPT_LENGTHS[row] for row in rows]
        assert_written_as_read(path, seen, lengths=lengths)
        replicas.add(seen["coords"].dp)
    assert found[4] <= 3 < max(found.values()) == NEW
    assert len(found) == len(PROMPT_LENGTHS)
    assert len(replicas) == case.world // (case.tp * case.megatron["pipeline_model_parallel_size"])


def refuse_on_one_replica(config: dict[str, Any]) -> list[str]:
    """What this rank hears if only the last replica's data have a token that does not exist."""
    with open_policy(config, tokenizer=Tokenizer(), init_reference_model=False) as policy:
        data = own_share(policy, oracle.make_batch(GLOBAL_BATCH, LENGTH, VOCAB))
        before, bad = policy.logprobs(data), BatchedDataDict(dict(data))
        if policy.coords.dp == policy.topology.dp - 1:
            bad["input_ids"] = bad["input_ids"].clone()
            bad["input_ids"][1, 2] = MODELS["mixtral"]["vocab"]
        train = partial(policy.train, loss_fn=LOSSES["token"](), mbs=1)
        most = partial(policy.topk_logits, k=2)
        said = []
        for call in (policy.logprobs, policy.entropy, most, policy.generate, train):
            said.append(outcome(call, bad))
            assert torch.equal(policy.logprobs(data), before)
        train(data)
        assert not torch.equal(policy.logprobs(data), before)
        return said


@pytest.mark.parametrize("name", ["EP2", "EP2xPP2"])
def test_data_that_one_replica_refuses_are_refused_by_all_that_share_its_experts(
    ranks, checkpoint, name: str
) -> None:
    path, case = checkpoint("mixtral", **MODELS["mixtral"]), EXPERT_LAYOUTS[name]
    config = policy_config(path, case.megatron, **generation())
    heard = ranks.run(case.world, refuse_on_one_replica, config)
    for said in heard:
        assert len(said) == 5 and all(each.startswith("refused: ") for each in said), said
        others = ["another data-parallel rank" in each for each in said]
        named = ["251 in row 1 at position 2" in each for each in said]
        assert all(others) or all(named), said
    assert sum("another" in said[0] for said in heard) == case.world // 2


FACTOR = 0.75
DROPPED: list[int] = []


@contextmanager
def limited(model: PreTrainedModel) -> Iterator[None]:
    """Within it experts take their capacity of a forward pass's tokens, the largest weights."""

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


def train(policy: MegatronPolicy) -> list[dict[str, Any]]:
    steps = own_steps(policy, DATA)
    return [policy.train(step, LOSSES["token"](), gbs=GLOBAL_BATCH, mbs=1) for step in steps]


@pytest.mark.parametrize("layout", ["one process", "EP2", "PP2"])
@pytest.mark.parametrize("pad", [False, True], ids=["as they come", "padded to capacity"])
def test_tokens_beyond_the_capacity_of_an_expert_are_dropped(ranks, tmp_path, layout, pad) -> None:
    path = make_checkpoint(tmp_path, "qwen3_moe", **SMALLER, num_experts=4, norm_topk_prob=True)
    DROPPED.clear()
    hf = oracle.Learned.of(path, DATA, GLOBAL_BATCH, row_by_row)
    assert sum(DROPPED) > 100
    case = (LAYOUTS | EXPERT_LAYOUTS)[layout]
    keys = {"moe_expert_capacity_factor": FACTOR, "moe_pad_expert_input_to_capacity": pad}
    config = policy_config(path, case.megatron | keys)
    for seen in ranks.run(case.world, answer_trainable, config, train):
        hf.assert_same_steps(seen, layout)


def test_a_capacity_for_all_tokens_changes_nothing_and_the_order_of_tokens_can_decide(
    ranks, tmp_path
) -> None:
    path = make_checkpoint(tmp_path, "qwen3_moe", **SMALLER)

    read = methodcaller("logprobs", BatchedDataDict({"input_ids": DATA["input_ids"]}))

    def found(**keys: Any) -> torch.Tensor:
        return ranks.run(1, answer, policy_config(path, keys), read)[0]

    unlimited = found()
    assert torch.equal(found(moe_expert_capacity_factor=-1), unlimited)
    torch.testing.assert_close(found(moe_expert_capacity_factor=8.0), unlimited, rtol=0, atol=1e-6)
    by_weight = found(moe_expert_capacity_factor=0.5)
    by_place = found(moe_expert_capacity_factor=0.5, moe_token_drop_policy="position")
    assert (by_weight - unlimited).abs().max() > 1e-3
    assert (by_place - by_weight).abs().max() > 1e-3
