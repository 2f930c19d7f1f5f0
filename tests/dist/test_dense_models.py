"""Random models of every dense family on one rank: the logits are those of transformers."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch

from tests.checkpoints import make_checkpoint
from tests.dist.cases import logits_of, open_policy, policy_config
from tests.exact import Exact, assert_equal
from tests.families import DENSE, SAMPLES
from tests.pure.test_table import switches

LENGTH, MODELS = 20, 6


def draw(family: str, random: Random) -> dict[str, Any]:
    """Arguments of `make_checkpoint` for a model of the family that is legal and like no other."""
    samples, groups = SAMPLES[family], random.choice([1, 2, 3])
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
    if samples.head_dim:
        sizes |= {"head_dim": head_dim, "hidden": heads * random.choice([8, 10])}
    for switch in switches(family):
        sizes[switch] = random.random() < 0.5
    if samples.windows is not None and random.random() < 0.7:
        sizes["window"] = random.choice([3, 9])
    sizes |= samples.draw(random, sizes)
    if (sizes.get("rope_scaling") or {}).get("rope_type") == "dynamic":
        sizes["max_position"] = 16  # fewer than tokens: only then does it differ
    return sizes


@pytest.mark.parametrize("family", DENSE)
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
