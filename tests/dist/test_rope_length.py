"""Rotary frequencies that depend on the length of the text: each choice of `rope_length` gives what
transformers gives for texts of that length, however rows are cut into microbatches and split.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from megatron_policy.batch import BatchedDataDict
from tests.dist.cases import open_policy, policy_config
from tests.dist.fsdp_cases import BATCHINGS
from tests.dist.layouts import LAYOUTS, VOCAB
from tests.dist.shortcuts import UNUSED
from tests.exact import Exact, assert_equal
from tests.losses import TokenNLL

LENGTHS = (9, 18, 5, 12)
ORIGINAL, MAXIMUM = 10, 20
"""Texts that are longer have other frequencies, and the longest text by the configuration."""
FACTOR = 4
FACTORS = {"short_factor": [1.0 + n / 8 for n in range(8)]}
FACTORS |= {"long_factor": [3.0 + n for n in range(8)]}
KINDS: dict[str, dict[str, Any]] = {
    "longrope": {
        "family": "phi3",
        "max_position": 64,
        "original_max_position_embeddings": ORIGINAL,
        "rope_scaling": {"type": "longrope"} | FACTORS,
    },
    "dynamic": {
        "family": "llama",
        "max_position": ORIGINAL,
        "rope_scaling": {"rope_type": "dynamic", "factor": float(FACTOR)},
    },
}
PLACES: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "TP2+SP": (2, LAYOUTS["TP2+SP"].megatron),
    "PP2xVPP2": (2, LAYOUTS["PP2xVPP2"].megatron),
    "CP2": (2, {"context_parallel_size": 2}),
    "FSDP2": (1, {"dtensor_cfg": {}}),
    "FSDP2 CP2": (2, {"dtensor_cfg": {"context_parallel_size": 2}}),
    "FSDP1": (1, {"fsdp_cfg": {}}),
}
CASES = [
    (kind, *case)
    for kind in KINDS
    for case in (
        ("one process", "padded", "row"),
        ("one process", "packed", "row"),
        ("one process", "dynamic", "maximum"),
        ("CP2", "padded", "row"),
        ("CP2", "packed", "row"),
        ("PP2xVPP2", "packed", "row"),
        ("TP2+SP", "padded", "row"),
        ("CP2", "packed", "maximum"),
        ("FSDP2", "packed", "maximum"),
        ("FSDP2 CP2", "padded", "maximum"),
        ("FSDP2 CP2", "packed", "batch"),
        ("FSDP1", "dynamic", "batch"),
    )
]


def rows() -> BatchedDataDict:
    """Right-padded rows of very different lengths."""
    random = torch.Generator().manual_seed(5)
    ids = torch.randint(1, VOCAB, (len(LENGTHS), max(LENGTHS)), generator=random)
    inside = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    mask = inside.float()
    return BatchedDataDict(
        input_ids=ids * inside,
        input_lengths=torch.tensor(LENGTHS),
        token_mask=mask,
        sample_mask=torch.ones(len(LENGTHS)),
    )


def alone(
    model: PreTrainedModel, length_of: Callable[[int], int], data: BatchedDataDict
) -> torch.Tensor:
    """Log-probabilities `[B, S]` of each row alone, in a text of the length that is chosen. Each
    has a model of its own: transformers' remember the longest text.
    """
    ids = data["input_ids"]
    found = torch.zeros(ids.shape, dtype=model.dtype)
    for row, length in enumerate(data["input_lengths"].tolist()):
        text = torch.zeros(1, max(length_of(length), length), dtype=torch.int64)
        text[0, :length] = ids[row, :length]
        logprobs_SV = deepcopy(model)(text).logits[0].log_softmax(-1)
        found[row, 1:length] = logprobs_SV[: length - 1].gather(-1, text[0, 1:length, None])[:, 0]
    return found


def length_of(kind: str, choice: str) -> Callable[[int], int]:
    """The length of text that `choice` stands for, of a row."""
    longest = MAXIMUM if kind == "longrope" else FACTOR * ORIGINAL
    fixed = {"maximum": longest, "batch": max(LENGTHS)}
    return lambda row: fixed.get(choice, row)


def config_of(path: Path, section: dict[str, Any], choice: str, **top: Any) -> dict[str, Any]:
    sizes = {"train_global_batch_size": len(LENGTHS), "logprob_batch_size": 2}
    limits = {"max_total_sequence_length": MAXIMUM, "rope_length": choice}
    return policy_config(path, section, **sizes, **limits, **top)


def read_and_learn(config: dict[str, Any]) -> tuple[torch.Tensor, float, float]:
    """Log-probabilities, and the loss and the norm of its gradient in a step on the same rows."""
    with open_policy(config, init_reference_model=False) as policy:
        data = rows()
        logprobs = policy.logprobs(
            BatchedDataDict({name: data[name] for name in ("input_ids", "input_lengths")})
        )
        result = policy.train(data, TokenNLL())
        return logprobs, float(result["loss"]), float(result["grad_norm"])


@pytest.mark.parametrize(("kind", "place", "batching", "choice"), CASES)
def test_a_text_is_as_long_as_was_chosen(ranks, checkpoint, kind, place, batching, choice) -> None:
    path = checkpoint(**KINDS[kind], vocab=VOCAB)
    world, section = PLACES[place]
    config = config_of(path, section, choice, **BATCHINGS[batching])
    compute = partial(alone, length_of=length_of(kind, choice), data=rows())
    exact = Exact.of(path, compute)
    other = length_of(kind, "maximum" if choice == "row" else "row")
    different = Exact.of(path, partial(alone, length_of=other, data=rows()))
    assert (different.value - exact.value).abs().max() > 1e3 * exact.rounding
    inside = rows()["token_mask"].bool()
    for logprobs, _, _ in ranks.run(world, read_and_learn, config):
        assert_equal("logprobs", logprobs.where(inside, 0), exact)


@pytest.mark.parametrize("kind", list(KINDS))
def test_layers_that_are_computed_again_turn_each_row_the_same(ranks, checkpoint, kind) -> None:
    path = checkpoint(**KINDS[kind], vocab=VOCAB)
    kept, again = (
        ranks.run(1, read_and_learn, config_of(path, section, "row", **BATCHINGS["packed"]))[0]
        for section in ({}, {"activation_checkpointing": True})
    )
    assert again[1:] == kept[1:]


def sample_and_read(config: dict[str, Any]) -> tuple[Any, torch.Tensor]:
    """Continuations, and the log-probabilities that the policy gives to them afterwards."""
    tokenizer = type("Tokenizer", (), {"pad_token_id": 0, "eos_token_id": None})()
    with open_policy(config, tokenizer=tokenizer, **UNUSED) as policy:
        data = rows()
        prompts = BatchedDataDict(
            input_ids=data["input_ids"][:, :7], input_lengths=data["input_lengths"].clamp(max=7)
        )
        done = policy.generate(prompts)
        texts = BatchedDataDict(input_ids=done.tokens_BT, input_lengths=done.lengths_B)
        return done, policy.logprobs(texts)


@pytest.mark.parametrize(
    ("kind", "place"), [(kind, place) for kind in KINDS for place in ("one process", "FSDP2")]
)
def test_what_is_sampled_is_what_training_reads(ranks, checkpoint, kind: str, place: str) -> None:
    """By the default choice, though texts outgrow the original length while they are sampled."""
    path = checkpoint(**KINDS[kind], vocab=VOCAB)
    world, section = PLACES[place]
    generation = {"generation": {"max_new_tokens": 9}, "generation_batch_size": len(LENGTHS)}
    config = config_of(path, section, "maximum", **generation)
    del config["rope_length"]
    ((done, read),) = ranks.run(world, sample_and_read, config)
    texts = BatchedDataDict(input_ids=done.tokens_BT, input_lengths=done.lengths_B)
    exact = Exact.of(path, partial(alone, length_of=length_of(kind, "maximum"), data=texts))
    at = torch.arange(done.tokens_BT.size(1))
    starts, ends = rows()["input_lengths"].clamp(max=7)[:, None], done.lengths_B[:, None]
    new = (at >= starts) & (at < ends)
    assert ends.max() > ORIGINAL and new.any()
    wanted = Exact(exact.value * new, exact.rounding)
    assert_equal("logprobs", done.logprobs_BT * new, wanted)
    assert_equal("logprobs", read * new, wanted)
