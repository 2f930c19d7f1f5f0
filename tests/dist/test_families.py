"""What families add to the common decoder - windows, scaled rotations, biases, large heads - under
split layouts.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

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
from tests.losses import loss_mask, sequence_nll, token_nll

VOCAB, LENGTH = 200, 23
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "factor": 4.0}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LONG = {"type": "longrope", "short_factor": [1.0, 1.1, 1.3, 1.6]}
LONG |= {"long_factor": [1.5, 2.5, 4.5, 8.5]}
ALPHA = {"rope_type": "dynamic", "factor": 1.0, "alpha": 50.0}
GROWING = YARN | {"original_max_position_embeddings": 5, "llama_4_scaling_beta": 0.7}
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama"},
    "llama with llama 3 rope scaling": {"family": "llama", "rope_scaling": LLAMA3, "tied": True},
    "llama with biases": {"family": "llama", "attention_bias": True, "mlp_bias": True},
    "llama with one head per group": {"family": "llama", "groups": 4, "head_dim": 32},
    "mimo": {"family": "mimo"},
    "ministral3 with growing queries": {"family": "ministral3", "rope_scaling": GROWING},
    "mistral with a window": {"family": "mistral", "window": 7},
    "mistral without one": {"family": "mistral"},
    "qwen2 with a window on later layers": {"family": "qwen2", "window": 6, "full_layers": 1},
    "qwen3 with heads wider than hidden": {"family": "qwen3", "head_dim": 32},
    "qwen3 with a window": {"family": "qwen3", "window": 5, "full_layers": 2},
    "llama with biases in attention only": {"family": "llama", "attention_bias": True},
    "llama with biases in the mlp only": {"family": "llama", "mlp_bias": True},
    "qwen2 with dynamic scaling of longer texts": {
        "family": "qwen2",
        "rope_scaling": DYNAMIC,
        "max_position": LENGTH,  # which padding exceeds under sequence parallelism
    },
    "qwen3 with yarn scaling": {"family": "qwen3", "rope_scaling": YARN},
    "gemma2": {"family": "gemma2", "tied": True},
    "gemma3": {"family": "gemma3_text", "head_dim": 32, "rope_scaling": LINEAR, "tied": True},
    "phi3 with a window": {"family": "phi3", "window": 9},
    "phi3 with longrope over part of a head": {
        "family": "phi3",
        "partial_rotary_factor": 0.5,
        "rope_scaling": LONG,
        "original_max_position_embeddings": LENGTH - 4,
        "max_position": 64,
    },
    "apertus with biases": {"family": "apertus", "attention_bias": True},
    "ernie4_5": {"family": "ernie4_5", "tied": True},
    "ernie4_5 with biases": {"family": "ernie4_5", "use_bias": True},
    "exaone4": {"family": "exaone4", "tied": True},
    "exaone4 with a window": {"family": "exaone4", "window": 5},
    "glm4": {"family": "glm4"},
    "granite": {"family": "granite", "attention_bias": True, "tied": True},
    "hunyuan with a wider base": {"family": "hunyuan_v1_dense", "rope_scaling": ALPHA},
    "olmo2": {"family": "olmo2"},
    "olmo3 with yarn scaling": {"family": "olmo3", "rope_scaling": YARN},
    "seed_oss with biases": {"family": "seed_oss", "attention_out_bias": True, "mlp_bias": True},
    "smollm3 with a window": {"family": "smollm3", "window": 5, "tied": True},
    "starcoder2": {"family": "starcoder2", "window": 9, "tied": True},
    "cohere": {"family": "cohere", "tied": True},
    "cohere with norms of each head": {"family": "cohere", "use_qk_norm": True},
}


IN_A_PIPELINE = (
    "llama with llama 3 rope scaling",
    "ministral3 with growing queries",
    "mistral with a window",
    "qwen2 with dynamic scaling of longer texts",
    "gemma2",
    "gemma3",
    "phi3 with longrope over part of a head",
    "apertus with biases",
    "ernie4_5",
    "exaone4 with a window",
    "glm4",
    "granite",
    "hunyuan with a wider base",
    "olmo2",
    "olmo3 with yarn scaling",
    "smollm3 with a window",
    "starcoder2",
    "cohere",
)
"""What differs from stage to stage: ends of the model, kinds of layers."""
DAILY = {*zip(IN_A_PIPELINE, itertools.cycle(("TP2+SP", "PP2xVPP2")))}
RUNS = [(variant, "TP2+SP") for variant in VARIANTS]
RUNS += [(variant, "PP2xVPP2") for variant in IN_A_PIPELINE]


@pytest.mark.parametrize(
    ("variant", "layout"),
    [pytest.param(*run, marks=[pytest.mark.daily] * (run in DAILY)) for run in RUNS],
)
def test_every_family_computes_and_learns_like_hf(ranks, checkpoint, variant, layout) -> None:
    path = path_of(checkpoint, variant)
    data = oracle.make_batch(2 * GLOBAL_BATCH, LENGTH, VOCAB)
    hf = oracle.Learned.of(path, data, GLOBAL_BATCH, oracle.token_level)
    logits = Exact.of(path, lambda m: m(data["input_ids"]).logits)
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
    ("gemma2", "TP2+SP", ("full",)),
    ("hunyuan with a wider base", "TP2+SP", ("selective core attention",)),
    ("olmo2", "TP2+SP", ("selective norms and mlp",)),
    ("smollm3 with a window", "TP2+SP", ("full by blocks",)),
    ("cohere", "TP2+SP", ("selective norms and mlp",)),
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
