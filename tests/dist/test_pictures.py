"""What a policy does with a model that also sees pictures beside training it: it continues prompts,
gives values, sends what was learnt, and keeps a reference.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megatron_policy.batch import BatchedDataDict
from megatron_policy.engines.shell import PictureEmbedder
from megatron_policy.errors import BatchError
from megatron_policy.refit.transports.disk import HfDirectory
from tests.dist.cases import GLOBAL_BATCH, LOSSES, open_policy, own_share, policy_config
from tests.dist.layouts import (
    EXPERT_LAYOUTS,
    FSDP2_LAYOUTS,
    FSDP2_TENSOR_LAYOUTS,
    SP,
    Layout,
    layout,
)
from tests.dist.resuming import TOKENIZER
from tests.dist.shortcuts import UNUSED
from tests.dist.test_export import tensors_of
from tests.exact import Exact, InDouble, assert_equal
from tests.picture_models import (
    KEYS,
    hf_inputs,
    hf_logprobs,
    hf_values,
    load_model,
    make_model,
    make_rows,
)

NEW = 5
GENERATING = {
    "qwen3_vl": {
        "TP2xCP2+SP": layout(4, tp=2, context_parallel_size=2, **SP),
        "PP2": layout(2, pp=2),
        "one process": layout(1),
        "FSDP2 CP2": FSDP2_LAYOUTS["FSDP2 CP2"],
        "FSDP2 TP2+SP x 2": FSDP2_TENSOR_LAYOUTS["FSDP2 TP2+SP x 2"],
    },
    "qwen2_5_omni_thinker": {"PP2": layout(2, pp=2), "FSDP2 CP2": FSDP2_LAYOUTS["FSDP2 CP2"]},
    "qwen2_5_vl": {"TP2": layout(2, tp=2)},
    "qwen3_5": {"TP2+SP": layout(2, tp=2, **SP), "PP2": layout(2, pp=2)},
    "qwen3_omni_moe_thinker": {"EP2xTP2+SP": EXPERT_LAYOUTS["EP2xTP2+SP"]},
    "qwen3_vl_moe": {"EP2xTP2+SP": EXPERT_LAYOUTS["EP2xTP2+SP"]},
    "glm4v": {"PP2": layout(2, pp=2)},
    "glm4v_moe": {"EP2xTP2+SP": EXPERT_LAYOUTS["EP2xTP2+SP"]},
    "gemma3": {
        "TP2+SP": layout(2, tp=2, **SP),
        "PP2": layout(2, pp=2),
        "FSDP2 x 2": FSDP2_LAYOUTS["FSDP2 x 2"],
    },
    "idefics3": {"PP2": layout(2, pp=2)},
    "internvl": {"TP2": layout(2, tp=2)},
    "kimi_k25": {"EP2xTP2+SP": EXPERT_LAYOUTS["EP2xTP2+SP"]},
    "llava": {"TP2": layout(2, tp=2)},
    "llava_next": {"TP2": layout(2, tp=2)},
    "llava_onevision": {"PP2": layout(2, pp=2)},
    "mistral3": {"PP2": layout(2, pp=2)},
    "nemotron_h_omni": {
        "EP2xTP2+SP": EXPERT_LAYOUTS["EP2xTP2+SP"],
        "PP2": layout(2, pp=2),
    },
    "smolvlm": {"TP2+SP": layout(2, tp=2, **SP)},
}


def continue_prompts(
    config: dict[str, Any], prompts: BatchedDataDict
) -> tuple[BatchedDataDict, torch.Tensor, torch.Tensor]:
    """Texts, and their log-probabilities as they were written and as they are read."""
    with open_policy(config, tokenizer=TOKENIZER, **UNUSED) as policy:
        done = policy.generate(prompts, greedy=True)
        drawn_BT = torch.arange(done.tokens_BT.shape[1]) >= prompts["input_lengths"][:, None]
        grown = {
            "input_ids": done.tokens_BT,
            "input_lengths": done.lengths_B,
            "token_mask": drawn_BT.long(),
        }
        texts = BatchedDataDict({**prompts, **grown})
        return texts, done.logprobs_BT, policy.logprobs(texts)


def texts_of(rows: BatchedDataDict) -> BatchedDataDict:
    keys = ("input_ids", "input_lengths", *KEYS)
    return BatchedDataDict({key: rows[key] for key in keys if key in rows})


@cache
def make_prompts(family: str) -> BatchedDataDict:
    return texts_of(make_rows(family))


def generate_greedily(model: Any, prompts: BatchedDataDict, row: int) -> list[int]:
    """The tokens of a prompt and, of transformers' own `generate`, of what follows."""
    given = hf_inputs(model, prompts, row)
    found = model.generate(
        **given | {"attention_mask": torch.ones_like(given["input_ids"])},
        max_new_tokens=NEW,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    tokens: list[int] = found[0].tolist()
    return tokens


def exact_of(path: Path, compute: Callable[[Any], torch.Tensor]) -> Exact:
    """What `compute` makes of the checkpoint's model."""
    with torch.no_grad():
        rounded, exact_model = compute(load_model(path)), load_model(path, torch.float64)
        with InDouble():
            return Exact.between(rounded, compute(exact_model))


@pytest.mark.parametrize(
    ("family", "name"), [(family, name) for family in GENERATING for name in GENERATING[family]]
)
def test_pictures_are_continued_as_by_transformers(
    ranks, tmp_path: Path, family: str, name: str
) -> None:
    """Rows of several lengths share a cache, so that the first tokens that enter end within
    pictures.
    """
    path, prompts = make_model(tmp_path / "hf", family), make_prompts(family)
    case = GENERATING[family][name]
    config = policy_config(path, case.megatron, max_total_sequence_length=64)
    config |= {"generation": {"max_new_tokens": NEW}, "generation_batch_size": 5}
    model = load_model(path)
    expected = [generate_greedily(model, prompts, row) for row in range(prompts.size)]
    for texts, written, read in ranks.run(case.world, continue_prompts, config, prompts):
        exact = exact_of(path, partial(hf_logprobs, rows=texts))
        for row, tokens in enumerate(expected):
            assert texts["input_ids"][row, : len(tokens)].tolist() == tokens
            own = slice(len(tokens) - NEW, len(tokens))
            for found in (written, read):
                assert_equal("logprobs", found[row, own], exact[row, own.start - 1 : own.stop - 1])


def read_pixels(
    config: dict[str, Any], texts: BatchedDataDict
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities with pixels as they are, and in the precision of the policy."""
    narrow = [None if each is None else each.bfloat16() for each in texts["pixel_values"]]
    with open_policy(config, **UNUSED) as policy:
        return policy.logprobs(texts), policy.logprobs(texts | {"pixel_values": narrow})


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["kimi_k25", "llava_onevision"])
def test_pixels_are_made_what_the_tower_computes_with(ranks, tmp_path: Path, family: str) -> None:
    path = make_model(tmp_path, family, torch.bfloat16)
    config = policy_config(path, {}) | {"precision": "bfloat16", "max_total_sequence_length": 64}
    ((found, narrow),) = ranks.run(1, read_pixels, config, make_prompts(family))
    assert found.isfinite().all() and torch.equal(found, narrow)


def read_values(
    config: dict[str, Any], rows: BatchedDataDict
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values, scores, and the head that gives them."""
    with open_policy(config, **UNUSED) as policy:
        (head,) = (tensor.clone() for name, tensor in policy.export() if name == "score.weight")
        return policy.values(rows), policy.score(rows), head


@pytest.mark.parametrize(
    ("family", "name"), [("qwen3_vl", "TP2xCP2+SP"), ("qwen3_vl", "PP2"), ("qwen2_5_vl", "TP2")]
)
def test_values_of_pictures_are_those_of_transformers_hidden_states(
    ranks, tmp_path: Path, family: str, name: str
) -> None:
    path, rows, case = make_model(tmp_path, family), make_prompts(family), GENERATING[family][name]
    head = {"enabled": True, "reward_model_type": "bradley_terry"}
    config = policy_config(path, case.megatron, reward_model_cfg=head)
    last = rows["input_lengths"].unsqueeze(1) - 1
    for values, scores, weight in ranks.run(
        case.world, read_values, config | {"max_total_sequence_length": 64}, rows
    ):
        exact = exact_of(path, partial(hf_values, rows=rows, weight_1D=weight))
        inside = torch.arange(values.size(1)) <= last
        assert_equal("values", values[inside], exact[inside])
        assert_equal("scores", scores, Exact(exact.value.gather(1, last)[:, 0], exact.rounding))


HEAD = {"reward_model_cfg": {"enabled": True, "reward_model_type": "bradley_terry"}}


def refuse_rows(config: dict[str, Any], rows: BatchedDataDict) -> dict[str, str]:
    """What each verb says of rows, of which nothing enters the model."""
    texts, said = texts_of(rows), dict[str, str]()
    with open_policy(config, tokenizer=TOKENIZER) as policy, patch.object(PictureEmbedder, "enter"):
        verbs: dict[str, Callable[[], Any]] = {
            "logprobs": lambda: policy.logprobs(texts),
            "reference": lambda: policy.reference_logprobs(texts),
            "entropy": lambda: policy.entropy(texts),
            "top-k": lambda: policy.topk_logits(texts, 2),
            "host's": lambda: policy.get_logprobs(texts),
            "generate": lambda: policy.generate(texts, greedy=True),
            "dry run": lambda: policy.dry_run(rows, LOSSES["token"]()),
            "part of a step": lambda: policy.train_microbatch(rows),
        }
        if "reward_model_cfg" in config:
            verbs = {"values": lambda: policy.values(texts), "score": lambda: policy.score(texts)}
        else:
            policy.begin_train_step(LOSSES["token"](), gbs=8, mbs=1)
        for verb, call in verbs.items():
            with pytest.raises(BatchError) as error:
                call()
            said[verb] = str(error.value)
        if "values" not in verbs:
            policy.abort_train_step()
            with pytest.raises(BatchError) as error:
                policy.train(rows, LOSSES["token"](), gbs=8, mbs=1)
            said["train"] = str(error.value)
        entered: Any = PictureEmbedder.enter
        assert not entered.called
    return said


@pytest.mark.parametrize(
    ("name", "further"), [("one process", {}), ("FSDP2", {}), ("one process", HEAD)]
)
@pytest.mark.daily
def test_rows_without_their_pictures_are_refused_by_every_verb(
    ranks, tmp_path: Path, name: str, further: dict[str, Any]
) -> None:
    """Row 4 has one of its two pictures, or none has any."""
    path, whole = make_model(tmp_path, "qwen3_vl"), make_rows("qwen3_vl")
    case = Layout(1, megatron={"dtensor_cfg": {}}) if name == "FSDP2" else layout(1)
    config = policy_config(path, case.megatron, max_total_sequence_length=64) | further
    config |= {"generation": {"max_new_tokens": NEW}}
    grids = whole["image_grid_thw"]
    half = {
        "image_grid_thw": [each if row != 4 else each[:1] for row, each in enumerate(grids)],
        "pixel_values": [
            each if row != 4 else each[: int(grids[4][0].prod())]
            for row, each in enumerate(whole["pixel_values"])
        ],
    }
    nothing = BatchedDataDict({key: each for key, each in whole.items() if key not in KEYS})
    makes = int(grids[4][0].prod()) // 4
    for rows, words in ((whole | half, f"row 4 .* make {makes}"), (nothing, "row 1 .* make 0")):
        (said,) = ranks.run(1, refuse_rows, config, rows)
        assert all(re.search(f"{words}: .* token_mask", each) for each in said.values()), said


def learn_and_send(
    config: dict[str, Any], rows: BatchedDataDict, folder: Path
) -> dict[str, torch.Tensor]:
    """Log-probabilities before and after a step, and of the reference; the weights are sent."""
    texts = texts_of(rows)
    with open_policy(config) as policy:
        seen = {"before": policy.logprobs(texts)}
        policy.train(own_share(policy, rows), LOSSES["token"](), gbs=GLOBAL_BATCH, mbs=2)
        policy.refit(HfDirectory(folder))
        return seen | {
            "after": policy.logprobs(texts),
            "reference": policy.reference_logprobs(texts),
        }


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("qwen2_5_vl", "TP2"),
        ("qwen2_5_omni_thinker", "PP2"),
        ("qwen3_5", "PP2"),
        ("qwen3_omni_moe_thinker", "EP2xTP2+SP"),
        ("qwen3_vl", "PP2"),
        ("qwen3_vl_moe", "EP2xTP2+SP"),
        ("gemma3", "TP2+SP"),
        ("glm4v_moe", "EP2xTP2+SP"),
        ("internvl", "TP2"),
        ("kimi_k25", "EP2xTP2+SP"),
        ("llava_onevision", "PP2"),
        ("mistral3", "PP2"),
        ("nemotron_h_omni", "EP2xTP2+SP"),
        ("smolvlm", "TP2+SP"),
        ("qwen3_vl", "FSDP2 TP2+SP x 2"),
    ],
)
def test_what_is_sent_has_the_names_on_file_and_computes_as_the_policy_does(
    ranks, tmp_path: Path, family: str, name: str
) -> None:
    path, rows, case = (
        make_model(tmp_path / "hf", family),
        make_rows(family),
        GENERATING[family][name],
    )
    config = policy_config(path, case.megatron, max_total_sequence_length=64)
    found = ranks.run(case.world, learn_and_send, config, rows, tmp_path / "sent")
    before, after = tensors_of(path), tensors_of(tmp_path / "sent")
    assert {n: (t.shape, t.dtype) for n, t in before.items()} == {
        n: (t.shape, t.dtype) for n, t in after.items()
    }
    kept = {name for name, tensor in before.items() if torch.equal(tensor, after[name])}
    # What all keys have in common changes no attention.
    unmoved = ("correction_bias", "post_layernorm", "self_attn.k_proj.bias", ".running_")
    assert all(any(part in name for part in unmoved) for name in kept)
    inside = torch.arange(1, rows["input_ids"].size(1)) < rows["input_lengths"].unsqueeze(1)
    learnt = exact_of(tmp_path / "sent", partial(hf_logprobs, rows=rows))[inside]
    for seen in found:
        assert torch.equal(seen["reference"], seen["before"])
        assert_equal("logprobs", seen["after"][:, 1:][inside], learnt)
