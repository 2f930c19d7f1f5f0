"""What a policy does with a model that also sees pictures beside training it: continue prompts."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megatron_policy.batch import BatchedDataDict
from megatron_policy.converters.registry import FAMILIES, PREPARED
from tests.dist.cases import open_policy, policy_config
from tests.dist.layouts import EXPERT_LAYOUTS, SP, layout
from tests.dist.resuming import TOKENIZER
from tests.dist.shortcuts import UNUSED
from tests.exact import Exact, InDouble, assert_equal
from tests.picture_models import (
    IMAGE,
    MEDIA,
    VIDEO,
    hf_logprobs,
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
    },
    "qwen2_5_vl": {"TP2": layout(2, tp=2)},
    "qwen3_vl_moe": {"EP2xTP2+SP": EXPERT_LAYOUTS["EP2xTP2+SP"]},
}


def continue_prompts(
    config: dict[str, Any], prompts: BatchedDataDict
) -> tuple[BatchedDataDict, torch.Tensor, torch.Tensor]:
    """Texts, and their log-probabilities as they were written and as they are read."""
    opened = open_policy(config, tokenizer=TOKENIZER, **UNUSED)
    with patch.dict(FAMILIES, PREPARED), opened as policy:
        done = policy.generate(prompts, greedy=True)
        grown = {"input_ids": done.tokens_BT, "input_lengths": done.lengths_B}
        texts = BatchedDataDict({**prompts, **grown})
        return texts, done.logprobs_BT, policy.logprobs(texts)


@cache
def make_prompts(family: str) -> BatchedDataDict:
    rows = make_rows(family)
    return BatchedDataDict({key: rows[key] for key in ("input_ids", "input_lengths", *MEDIA)})


def generate_greedily(model: Any, prompts: BatchedDataDict, row: int) -> list[int]:
    """The tokens of a prompt and, of transformers' own `generate`, of what follows."""
    own = prompts["input_ids"][row : row + 1, : prompts["input_lengths"][row]]
    media = {key: prompts[key][row] for key in MEDIA if prompts[key][row] is not None}
    types = (own == IMAGE).int() + 2 * (own == VIDEO).int()
    found = model.generate(
        own,
        attention_mask=torch.ones_like(own),
        max_new_tokens=NEW,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        **media,
        **({"mm_token_type_ids": types} if media else {}),
    )
    tokens: list[int] = found[0].tolist()
    return tokens


def exact_logprobs(path: Path, rows: BatchedDataDict) -> Exact:
    """Next-token log-probabilities `[B, S - 1]` of the checkpoint's model."""
    with torch.no_grad():
        rounded = hf_logprobs(load_model(path), rows)
        exact_model = load_model(path, torch.float64)
        with InDouble():
            return Exact.between(rounded, hf_logprobs(exact_model, rows))


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
        exact = exact_logprobs(path, texts)
        for row, tokens in enumerate(expected):
            assert texts["input_ids"][row, : len(tokens)].tolist() == tokens
            own = slice(len(tokens) - NEW, len(tokens))
            for found in (written, read):
                assert_equal("logprobs", found[row, own], exact[row, own.start - 1 : own.stop - 1])
