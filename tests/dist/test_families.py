"""What families add to the common decoder - windows, scaled rotations, biases, large heads - under
split layouts.
"""

from __future__ import annotations

import itertools
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_policy.batch import BatchedDataDict
from tests import oracle
from tests.dist.cases import (
    GLOBAL_BATCH,
    LOSSES,
    MICROBATCHES,
    open_policy,
    own_steps,
    policy_config,
    read_everything,
    train_two_steps,
)
from tests.dist.layouts import LAYOUTS
from tests.exact import Exact, assert_equal
from tests.families import DENSE
from tests.losses import loss_mask, sequence_nll, token_nll

VOCAB, LENGTH = 200, 23
VARIANTS: dict[str, dict[str, Any]] = {
    name: {"family": family} | sizes
    for family, samples in DENSE.items()
    for name, sizes in samples.variants.items()
}
IN_A_PIPELINE = [next(iter(samples.variants)) for samples in DENSE.values()]
"""What differs from stage to stage: ends of the model, kinds of layers."""
DAILY = {*zip(IN_A_PIPELINE, itertools.cycle(("TP2+SP", "PP2xVPP2")))}
RUNS = [(variant, "TP2+SP") for variant in VARIANTS]
RUNS += [(variant, "PP2xVPP2") for variant in IN_A_PIPELINE]


@cache
def learn(path: Path) -> tuple[BatchedDataDict, Exact, oracle.Learned]:
    """Data, the logits that transformers computes of them, and what it learns from them."""
    data = oracle.make_batch(2 * GLOBAL_BATCH, LENGTH, VOCAB)
    logits = Exact.of(path, lambda m: m(data["input_ids"]).logits)
    return data, logits, oracle.Learned.of(path, data, GLOBAL_BATCH, oracle.token_level)


@pytest.mark.parametrize(
    ("variant", "layout"),
    [pytest.param(*run, marks=[pytest.mark.daily] * (run in DAILY)) for run in RUNS],
)
def test_every_family_computes_and_learns_like_hf(ranks, checkpoint, variant, layout) -> None:
    path = path_of(checkpoint, variant)
    data, logits, hf = learn(path)
    config = policy_config(path, LAYOUTS[layout].megatron, logprob_batch_size=GLOBAL_BATCH)
    for read, steps in ranks.run(2, read_and_learn, config, data):
        assert_equal("logits", read, logits)
        hf.assert_same_steps(steps)


def path_of(checkpoint: Any, variant: str) -> Path:
    return checkpoint(**VARIANTS[variant], vocab=VOCAB)


def read_and_learn(config: dict[str, Any], data: Any) -> tuple[torch.Tensor, list[Any]]:
    """All logits of the tokens, and the results of a step on each global batch."""
    with open_policy(config, init_reference_model=False) as policy:
        logits = read_everything(policy, data["input_ids"], VOCAB)["logits"]
        micro = GLOBAL_BATCH // policy.topology.dp // MICROBATCHES
        steps = own_steps(policy, data)
        return logits, [
            policy.train(step, LOSSES["token"](), gbs=GLOBAL_BATCH, mbs=micro) for step in steps
        ]


RECOMPUTED = {
    "full": {"recompute_granularity": "full"},
    "full by blocks": {
        "recompute_granularity": "full",
        "recompute_method": "block",
        "recompute_num_layers": 1,
    },
    "selective core attention": {"recompute_granularity": "selective"},
    "selective norms and mlp": {
        "recompute_granularity": "selective",
        "recompute_modules": ["layernorm", "mlp"],
    },
}


RECOMPUTED_IN: list[tuple[str, str, tuple[str, ...]]] = [
    ("qwen3 with yarn scaling", "TP2+SP", tuple(RECOMPUTED)),
    ("qwen3 with yarn scaling", "PP2", tuple(RECOMPUTED)),
    ("apertus with biases", "TP2+SP", ("selective norms and mlp",)),
    ("gemma2 with biases", "TP2+SP", ("full",)),
    ("hunyuan_v1_dense with biases and a wider base", "TP2+SP", ("selective core attention",)),
    ("olmo2 with biases", "TP2+SP", ("selective norms and mlp",)),
    ("smollm3 with biases and a window", "TP2+SP", ("full by blocks",)),
    ("cohere with biases", "TP2+SP", ("selective norms and mlp",)),
    ("lfm2 with biases", "PP2", ("full by blocks", "selective core attention")),
    ("qwen3_5_text with biases", "TP2+SP", ("full", "selective norms and mlp")),
]


@pytest.mark.parametrize(("variant", "layout", "kinds"), RECOMPUTED_IN)
def test_recomputing_activations_changes_no_gradient(
    ranks, checkpoint, variant: str, layout: str, kinds: tuple[str, ...]
) -> None:
    path, megatron = path_of(checkpoint, variant), LAYOUTS[layout].megatron
    data = oracle.make_batch(2 * GLOBAL_BATCH, 12, VOCAB)
    again = [megatron | {"activation_checkpointing": True} | RECOMPUTED[kind] for kind in kinds]
    plain, *others = (
        ranks.run(2, train_two_steps, policy_config(path, m), "token", data, VOCAB, False)
        for m in (megatron, *again)
    )
    for kind, other in zip(kinds, others, strict=True):
        for one, recomputed in zip(plain, other, strict=True):
            for name, weight in one["weights"].items():
                # The same operations again; only the order of some sums may differ.
                torch.testing.assert_close(
                    recomputed["weights"][name], weight, rtol=0, atol=1e-6, msg=f"{kind}: {name}"
                )


@pytest.mark.parametrize("loss", ["token", "sequence"])
def test_losses_and_readings_are_at_the_temperature_of_rollouts(ranks, checkpoints, loss) -> None:
    """Both a loss that takes logits and one that takes log-probabilities."""
    temperature = 0.7
    data = oracle.make_batch(2 * GLOBAL_BATCH, 12, 251)

    def loss_of(model: Any, batch: Any) -> torch.Tensor:
        logprobs = oracle.hf_logprobs(model, batch["input_ids"], temperature)
        if loss == "sequence":
            return sequence_nll(logprobs, batch, batch["sample_mask"].sum())
        return token_nll(logprobs, batch, loss_mask(batch).sum())

    path, tokens = checkpoints[False], data["input_ids"]
    hf = oracle.Learned.of(path, data, GLOBAL_BATCH, loss_of)
    expected = Exact.of(path, lambda m: oracle.hf_logprobs(m, tokens, temperature))
    logits = Exact.of(path, lambda m: m(tokens).logits)
    settings = {"generation": {"max_new_tokens": 1, "temperature": temperature}}
    config = policy_config(path, LAYOUTS["TP2"].megatron, **settings)
    for seen in ranks.run(2, train_two_steps, config, loss, data, 251, True):
        assert_equal("logprobs", seen["before"]["logprobs"][:, 1:], expected)
        assert_equal("logits", seen["before"]["logits"], logits)
        hf.assert_same_steps(seen["steps"])
