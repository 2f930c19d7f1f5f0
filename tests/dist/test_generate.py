"""The policy's own generation against transformers' `generate`, and against what the policy reads
back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from operator import methodcaller
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from megatron_policy.batch import BatchedDataDict
from megatron_policy.errors import BatchError
from megatron_policy.lm_head.filters import Filters
from tests import oracle
from tests.dist.cases import open_policy, policy_config
from tests.dist.layouts import LAYOUTS, VOCAB
from tests.dist.shortcuts import UNUSED, refusal
from tests.exact import Exact, assert_equal
from tests.families import DENSE
from tests.families.deepseek_v3 import SCALED
from tests.unit.test_filters import plain_kept

NEW, PAD = 9, 0
PROMPT_LENGTHS = (4, 7, 2, 7, 5)


class Tokenizer:
    """All that generation asks of one."""

    pad_token_id = PAD

    def __init__(self, eos: int | None = None) -> None:
        self.eos_token_id = eos


def prompts() -> BatchedDataDict:
    random = torch.Generator().manual_seed(3)
    tokens = torch.randint(1, VOCAB, (len(PROMPT_LENGTHS), 7), generator=random)
    lengths = torch.tensor(PROMPT_LENGTHS)
    inside = torch.arange(7) < lengths.unsqueeze(1)
    return BatchedDataDict(
        {"input_ids": torch.where(inside, tokens, PAD), "input_lengths": lengths}
    )


def continue_prompts(
    config: dict[str, Any], eos: int | None, greedy: bool, draws: int = 1
) -> dict[str, Any]:
    """Continuations, and the log-probabilities that the policy gives to them afterwards."""
    with open_policy(config, tokenizer=Tokenizer(eos), **UNUSED) as policy:
        done = [policy.generate(prompts(), greedy=greedy) for _ in range(draws)]
        read = policy.logprobs(BatchedDataDict({"input_ids": done[0].tokens_BT}))
        return {"coords": policy.coords, "done": done, "read": read}


def generation(**settings: Any) -> dict[str, Any]:
    return {"generation": {"max_new_tokens": NEW} | settings, "generation_batch_size": 3}


@cache
def hf_greedy(path, row: int) -> list[int]:
    data, length = prompts(), PROMPT_LENGTHS[row]
    prompt = data["input_ids"][row : row + 1, :length]
    model = oracle.load_hf(path)
    out = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=NEW,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=PAD,
    )
    return out[0].tolist()


def assert_written_as_read(
    path: Path,
    seen: dict[str, Any],
    temperature: float = 1.0,
    lengths: Sequence[int] = PROMPT_LENGTHS,
    read: Callable[..., torch.Tensor] = oracle.hf_logprobs,
) -> None:
    """The log-probabilities of generated tokens, and those read back, are transformers' own, as
    `read` makes them. `lengths` are those of the prompts.
    """
    (done,) = seen["done"]
    exact = Exact.of(path, partial(read, tokens=done.tokens_BT, temperature=temperature))
    for row, length in enumerate(lengths):
        own = slice(length, int(done.lengths_B[row]))
        expected = exact[row, own.start - 1 : own.stop - 1]
        assert_equal("logprobs", done.logprobs_BT[row, own], expected)
        assert_equal("logprobs", seen["read"][row, own], expected)


def last_logprobs(model: Any, text: torch.Tensor) -> torch.Tensor:
    """Of every token to follow the text, `[V]`."""
    logprobs: torch.Tensor = model(text).logits[0, -1].float().log_softmax(-1)
    return logprobs


GENERATING = ("one process", "TP2+SP", "PP2 uneven", "PP2xVPP2", "TP2xPP2xDP2+SP")
GENERATING += ("TP4 over 2 groups", "TP2xCP2+SP")


def assert_continued_like_hf(path: Path, seen: dict[str, Any]) -> None:
    """Greedily, each row to its full length, with the log-probabilities of transformers."""
    (done,) = seen["done"]
    for row, length in enumerate(PROMPT_LENGTHS):
        assert done.tokens_BT[row, : length + NEW].tolist() == hf_greedy(path, row)
        assert (done.tokens_BT[row, length + NEW :] == PAD).all()
        assert (done.logprobs_BT[row, :length] == 0).all()
    assert_written_as_read(path, seen)
    assert done.generated_B.tolist() == [NEW] * len(PROMPT_LENGTHS)
    assert done.lengths_B.tolist() == [length + NEW for length in PROMPT_LENGTHS]


@pytest.mark.parametrize("name", GENERATING)
def test_greedy_continuations_are_those_of_transformers(ranks, checkpoints, name: str) -> None:
    path = checkpoints[False]
    config = policy_config(path, LAYOUTS[name].megatron, **generation())
    for seen in ranks.run(LAYOUTS[name].world, continue_prompts, config, None, True):
        assert_continued_like_hf(path, seen)


KINDS = {family: each.generating for family, each in DENSE.items() if each.generating}
SMALL = {"hidden": 48, "heads": 4, "layers": 4, "ffn": 40}
KINDS_AND_EXPERTS = KINDS | {
    "deepseek_v3": ("one process", SMALL | {"rope_scaling": SCALED}),
    "gpt_oss": ("one process", SMALL),
    "granitemoehybrid": ("TP2+SP", SMALL),  # ranks share the one group of Mamba2
    "nemotron_h": ("PP2xVPP2", SMALL | {"moe_latent_size": 20}),
    "qwen2_moe": ("one process", SMALL),
}
DAILY = ("gemma2", "deepseek_v3")


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=[pytest.mark.daily] * (f in DAILY)) for f in KINDS_AND_EXPERTS]
)
def test_every_kind_of_layer_works_with_a_cache(ranks, checkpoint, family: str) -> None:
    name, sizes = KINDS_AND_EXPERTS[family]
    path = checkpoint(family, vocab=VOCAB, **sizes)
    config = policy_config(path, LAYOUTS[name].megatron, **generation())
    for seen in ranks.run(LAYOUTS[name].world, continue_prompts, config, None, True):
        assert_continued_like_hf(path, seen)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_frequencies_follow_the_growth_of_the_text(ranks, checkpoint, kind: str) -> None:
    """Each token's log-probability is that of reading the text up to it, whatever was cached."""
    limit = max(PROMPT_LENGTHS) + 2
    sizes: dict[str, Any] = {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}
    sizes |= {"max_position": limit}
    if kind == "longrope":
        factors = {"short_factor": [1.0] * 8, "long_factor": [3.0 + n for n in range(8)]}
        sizes["rope_scaling"] = {"type": "longrope"} | factors
        sizes |= {"original_max_position_embeddings": limit, "max_position": 64}
    path = checkpoint("phi3" if kind == "longrope" else "llama", vocab=VOCAB, **sizes)
    (seen,) = ranks.run(1, continue_prompts, policy_config(path, {}, **generation()), None, True)
    (done,) = seen["done"]
    for row, length in enumerate(PROMPT_LENGTHS):
        text = done.tokens_BT[row : row + 1, : length + NEW]
        # Rows share a cache, whose text is as long as the longest row so far: here, the row itself.
        for end in range(length, length + NEW):
            # Of all tokens: how far rounding moves one of them can be next to nothing by luck.
            exact = Exact.of(path, partial(last_logprobs, text=text[:, :end]))
            assert_equal("logprobs", done.logprobs_BT[row, end], exact[text[0, end]])


def test_a_stop_token_ends_its_row_and_no_other(ranks, checkpoints) -> None:
    path = checkpoints[False]
    ends = [hf_greedy(path, row)[length:] for row, length in enumerate(PROMPT_LENGTHS)]
    eos = ends[0][3]
    (seen,) = ranks.run(1, continue_prompts, policy_config(path, {}, **generation()), eos, True)
    (done,) = seen["done"]
    for row, (length, end) in enumerate(zip(PROMPT_LENGTHS, ends, strict=True)):
        count = end.index(eos) + 1 if eos in end else NEW
        assert done.generated_B[row] == count
        assert done.tokens_BT[row, length : length + count].tolist() == end[:count]


def test_nothing_grows_beyond_the_longest_allowed_sequence(ranks, checkpoints) -> None:
    config = policy_config(checkpoints[True], {}, max_total_sequence_length=10, **generation())
    (seen,) = ranks.run(1, continue_prompts, config, None, True)
    assert seen["done"][0].lengths_B.tolist() == [min(n + NEW, 10) for n in PROMPT_LENGTHS]


@pytest.mark.nightly
def test_samples_agree_within_a_replica_and_differ_between_replicas_and_draws(
    ranks, checkpoints
) -> None:
    case = LAYOUTS["TP2xPP2xDP2+SP"]
    config = policy_config(checkpoints[True], case.megatron, **generation(temperature=1.3))
    results = ranks.run(case.world, continue_prompts, config, None, False, 2)
    by_replica: dict[int, list[list[list[int]]]] = {}
    for seen in results:
        drawn = [done.tokens_BT.tolist() for done in seen["done"]]
        assert by_replica.setdefault(seen["coords"].dp, drawn) == drawn
    assert by_replica[0] != by_replica[1]
    assert by_replica[0][0] != by_replica[0][1]


def kept_logprobs(
    model: PreTrainedModel, tokens: torch.Tensor, temperature: float, filters: Filters
) -> torch.Tensor:
    """Next-token log-probabilities `[B, S - 1]` of what the filters keep, from whole logits."""
    logits = model(tokens).logits[:, :-1].float() / temperature
    kept = plain_kept(logits.flatten(0, 1), filters).view(logits.shape)
    scores = logits.masked_fill(~kept, -1e30).log_softmax(-1).masked_fill(~kept, 0.0)
    return scores.gather(-1, tokens[:, 1:].unsqueeze(-1)).squeeze(-1)


@pytest.mark.parametrize("filtered", [True, False])
def test_sampled_logprobs_are_those_read_back_at_the_same_temperature(
    ranks, checkpoints, filtered: bool
) -> None:
    settings = {"top_k": 5, "top_p": 0.8, "min_p": 0.01}
    config = policy_config(
        checkpoints[False],
        LAYOUTS["TP2"].megatron,
        **generation(temperature=0.7, filter_logprobs=filtered, **settings),
    )
    seen = ranks.run(2, continue_prompts, config, None, False)[0]
    kept = partial(kept_logprobs, filters=Filters(**settings))
    read = kept if filtered else oracle.hf_logprobs
    assert_written_as_read(checkpoints[False], seen, temperature=0.7, read=read)


def test_a_prompt_that_cannot_be_continued_is_named(ranks, checkpoints) -> None:
    config = policy_config(checkpoints[True], {}, **generation())
    refuse, data = partial(refusal, tokenizer=Tokenizer(), **UNUSED), prompts()
    for lengths, said in (([4, 7, 0, 7, 5], "0 in row 2"), ([4, 7, 2, 7, 8], "8 in row 4")):
        data["input_lengths"] = torch.tensor(lengths)
        assert said in ranks.run(1, refuse, config, BatchError, methodcaller("generate", data))[0]
