"""Random models of every dense family on one rank: the logits are those of transformers."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch

from tests.checkpoints import FAMILIES, HEAD_DIM, make_checkpoint
from tests.dist.cases import logits_of, open_policy, policy_config
from tests.exact import Exact, assert_equal
from tests.pure.test_table import switches

LENGTH, MODELS = 20, 6
FIXED = {"mimo": ("attention_bias",)}
"""Switches that a family has in one position only."""
WINDOWED = (
    "exaone4",
    "gemma2",
    "gemma3_text",
    "ministral3",
    "mistral",
    "olmo3",
    "phi3",
    "qwen2",
    "qwen3",
)
WINDOWED += ("smollm3", "starcoder2")
SCALINGS: tuple[dict[str, Any] | None, ...] = (
    None,
    {"rope_type": "linear", "factor": 2.5},
    {"rope_type": "dynamic", "factor": 2.5},
    {"rope_type": "yarn", "factor": 2.5, "original_max_position_embeddings": 12},
    {
        "rope_type": "llama3",
        "factor": 2.5,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 12,
    },
)


def draw(family: str, random: Random) -> dict[str, Any]:
    """Arguments of `make_checkpoint` for a model of the family that is legal and like no other."""
    groups = random.choice([1, 2, 3])
    heads = groups * random.choice([1, 2, 3])
    head_dim = random.choice([8, 12, 16])
    sizes: dict[str, Any] = {
        "layers": random.choice([2, 3]),
        "groups": groups,
        "heads": heads,
        "hidden": heads * head_dim,
        "ffn": random.choice([20, 48]),
        "vocab": random.choice([128, 150, 257]),
        "max_position": random.choice([LENGTH, 64]),
        "tied": random.random() < 0.5,
        "rope_theta": random.choice([500.0, 1e4]),
    }
    if family in HEAD_DIM:
        sizes |= {"head_dim": head_dim, "hidden": heads * random.choice([8, 10])}
    for switch in switches(family):
        if switch not in FIXED.get(family, ()):
            sizes[switch] = random.random() < 0.5
    if family in WINDOWED and random.random() < 0.7:
        sizes["window"] = random.choice([3, 9])
    if family == "seed_oss":
        sizes["attention_out_bias"] &= sizes["attention_bias"]
    rope = draw_rope(family, head_dim, random)
    if (rope.get("rope_scaling") or {}).get("rope_type") == "dynamic":
        sizes["max_position"] = 16  # fewer than tokens: only then does it differ
    return sizes | rope


def draw_rope(family: str, head_dim: int, random: Random) -> dict[str, Any]:
    if family == "glm4":
        fraction = random.choice([0.5, 1.0])
        return {"partial_rotary_factor": fraction, "rope_scaling": random.choice(SCALINGS)}
    if family == "hunyuan_v1_dense" and random.random() < 0.4:
        return {"rope_scaling": {"rope_type": "dynamic", "factor": 1.0, "alpha": 50.0}}
    if family == "ministral3":
        growth = {"llama_4_scaling_beta": random.choice([0.0, 0.7])}
        growth["original_max_position_embeddings"] = random.choice([4, 12])
        return {"rope_scaling": (random.choice(SCALINGS) or {"rope_type": "default"}) | growth}
    if family != "phi3":
        return {"rope_scaling": random.choice(SCALINGS)}
    fraction = random.choice([0.5, 0.75, 1.0])
    if random.random() < 0.4:
        return {"partial_rotary_factor": fraction}
    pairs = int(head_dim * fraction) // 2
    if head_dim * fraction % 2:  # transformers would want a factor less than there are pairs
        return {"partial_rotary_factor": fraction}
    factors = {name: [random.uniform(1, 9) for _ in range(pairs)] for name in ("short", "long")}
    return {
        "partial_rotary_factor": fraction,
        "rope_scaling": {"type": "longrope"} | {f"{n}_factor": f for n, f in factors.items()},
        "original_max_position_embeddings": random.choice([12, 16]),
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_random_models_compute_the_logits_of_transformers(ranks, tmp_path, family: str) -> None:
    random = Random(family)
    drawn = [draw(family, random) for _ in range(MODELS)]
    paths = [
        make_checkpoint(tmp_path / str(number), family, tokenizer=False, seed=number, **sizes)
        for number, sizes in enumerate(drawn)
    ]
    tokens = torch.randint(0, 128, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    models = [(path, sizes["vocab"]) for path, sizes in zip(paths, drawn, strict=True)]
    (results,) = ranks.run(1, logits_of, models, tokens)
    for sizes, path, logits in zip(drawn, paths, results, strict=True):
        assert_equal("logits", logits, Exact.of(path, lambda m: m(tokens).logits), sizes)


def dropouts_of(config: dict[str, Any]) -> tuple[float, float, float]:
    """Of embeddings, of what attention and MLP add, and of attention's weights."""
    with open_policy(config, init_optimizer=False, init_reference_model=False) as policy:
        (model,) = policy._engine.pipeline.models
        layer = model.decoder.layers[0]
        core = layer.self_attention.core_attention
        attention = getattr(core, "fallback", core).dropout  # beside Transformer Engine's
        return model.embedding.embedding_dropout.p, layer.hidden_dropout, attention


@pytest.mark.parametrize(
    ("family", "fields", "expected"),
    [
        (
            "starcoder2",
            {"embedding_dropout": 0.1, "residual_dropout": 0.2, "attention_dropout": 0.3},
            (0.1, 0.2, 0.3),
        ),
        ("seed_oss", {"residual_dropout": 0.2, "attention_dropout": 0.3}, (0.0, 0.2, 0.3)),
        ("phi3", {"embd_pdrop": 0.1, "resid_pdrop": 0.2}, (0.0, 0.2, 0.0)),
        ("granite", {"attention_dropout": 0.3}, (0.0, 0.0, 0.3)),
    ],
)
def test_dropouts_are_where_the_config_has_them(
    ranks, checkpoint, family: str, fields: dict[str, Any], expected
) -> None:
    path = checkpoint(family, **fields)
    (dropouts,) = ranks.run(1, dropouts_of, policy_config(path, {}))
    assert dropouts == expected
