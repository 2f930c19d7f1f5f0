"""Policies with a scalar head: values and scores as transformers' classification models give them,
under every layout and with every way to make microbatches.
"""

from __future__ import annotations

import itertools
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.auto import modeling_auto

from megatron_policy.batch import BatchedDataDict
from megatron_policy.converters.registry import FAMILIES as FAMILIES_OF_THE_PACKAGE
from megatron_policy.errors import ConfigError, ConversionError
from megatron_policy.policy import MegatronPolicy
from tests import oracle, scalar_oracle
from tests.dist.cases import GLOBAL_BATCH, policy_config
from tests.dist.layouts import EXPERT_LAYOUTS, FAMILIES, LAYOUTS, LENGTH, SIZES, VOCAB
from tests.dist.shortcuts import answer, refusal
from tests.exact import Exact, InDouble, assert_equal
from tests.families import SAMPLES

BATCHINGS: dict[str, dict[str, Any]] = {
    "padded": {},
    "dynamic": {"dynamic_batching": {"enabled": True, "train_mb_tokens": 40}},
    "packed": {"sequence_packing": {"enabled": True, "train_mb_tokens": 40}},
}
KINDS = ("regression", "bradley_terry")
ROWS = 2 * GLOBAL_BATCH
SMALL: dict[str, Any] = {"hidden": 32, "heads": 4, "groups": 2, "layers": 3, "vocab": 131}


def rows() -> BatchedDataDict:
    return oracle.make_batch(ROWS, LENGTH, VOCAB)


def config_of(path: Path, kind: str, megatron: dict[str, Any], **top: Any) -> dict[str, Any]:
    head = {"enabled": True, "reward_model_type": kind}
    return policy_config(path, megatron, reward_model_cfg=head, **top)


@pytest.fixture(scope="session")
def heads(checkpoint, tmp_path_factory):
    """`heads(family, kind)`: the path of its checkpoint with a head of that kind, made once."""
    made: dict[tuple[str, str], Path] = {}

    def path_of(family: str, kind: str) -> Path:
        if (family, kind) not in made:
            sizes = SIZES | (
                {"tied": family == FAMILIES[True]} if family in FAMILIES.values() else {}
            )
            target = tmp_path_factory.mktemp(f"{family}-{kind}") / "model"
            made[family, kind] = scalar_oracle.make(kind, checkpoint(family, **sizes), target)
        return made[family, kind]

    return path_of


def expected_of(path: Path, kind: str, data: BatchedDataDict, compute: Any) -> Exact:
    with torch.no_grad():
        rounded = compute(scalar_oracle.load(kind, path), data)
        with InDouble():
            exact = compute(scalar_oracle.load(kind, path, torch.float64), data)
    return Exact.between(rounded, exact)


def read(data: BatchedDataDict, policy: MegatronPolicy) -> dict[str, torch.Tensor]:
    return {"values": policy.values(data), "scores": policy.score(data)}


CASES = [
    (name, batching, kind, family)
    for (name, batching), (kind, family) in zip(
        itertools.product(LAYOUTS, BATCHINGS),
        itertools.cycle([(k, f) for f in FAMILIES.values() for k in KINDS]),
        strict=False,
    )
] + [
    (name, batching, kind, "qwen3_moe")
    for name, (batching, kind) in zip(
        EXPERT_LAYOUTS, itertools.cycle(itertools.product(BATCHINGS, KINDS)), strict=False
    )
]


@pytest.mark.parametrize(("name", "batching", "kind", "family"), CASES)
def test_values_and_scores_are_those_of_transformers(
    ranks, heads, name: str, batching: str, kind: str, family: str
) -> None:
    assert_values_and_scores(ranks, heads, name, batching, kind, family)


def assert_values_and_scores(
    ranks: Any, heads: Any, name: str, batching: str, kind: str, family: str
) -> None:
    """Of a family under a layout, with a kind of head."""
    path, data = heads(family, kind), rows()
    case = (LAYOUTS | EXPERT_LAYOUTS)[name]
    config = config_of(path, kind, case.megatron, **BATCHINGS[batching])
    values = expected_of(path, kind, data, scalar_oracle.values)
    last = data["input_lengths"].unsqueeze(1) - 1
    scores = Exact(values.value.gather(1, last).squeeze(1), values.rounding)
    if kind == "bradley_terry":
        scores = expected_of(path, kind, data, scalar_oracle.scores)
    for seen in ranks.run(case.world, answer, config, partial(read, data)):
        assert seen["values"].dtype is torch.float32
        assert_equal("values", seen["values"], values)
        assert_equal("scores", seen["scores"], scores)


def test_families_have_the_classes_that_transformers_has() -> None:
    for name, family in FAMILIES_OF_THE_PACKAGE.items():
        kind = family.hf_model_type or name
        for head, known, own in zip(
            ("bradley_terry", "regression"),
            (
                modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
                modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
            ),
            family.scalar_classes,
            strict=True,
        ):
            lacking = head in SAMPLES[name].without_heads
            assert known.get(kind) == (None if lacking else own), (name, head)


@pytest.mark.parametrize(
    ("family", "kind"),
    (
        (family, next(kind for kind in turned if kind not in SAMPLES[family].without_heads))
        for family, turned in zip(
            [name for name, each in SAMPLES.items() if each.without_heads != KINDS],
            itertools.cycle((KINDS, KINDS[::-1])),
            strict=False,
        )
    ),
)
def test_every_familys_values_are_those_of_transformers(
    ranks, checkpoint, tmp_path, family: str, kind: str
) -> None:
    path = scalar_oracle.make(kind, checkpoint(family, **SMALL), tmp_path / "model")
    data = oracle.make_batch(4, LENGTH, SMALL["vocab"])
    (seen,) = ranks.run(1, answer, config_of(path, kind, {}), partial(read, data))
    assert_equal("values", seen["values"], expected_of(path, kind, data, scalar_oracle.values))


def export_head(policy: MegatronPolicy) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in policy.export() if "score" in name}


@pytest.mark.parametrize("tied", [True, False])
def test_a_language_models_checkpoint_is_given_a_fresh_head(ranks, checkpoints, tied) -> None:
    path = checkpoints[tied]
    seen = []
    for name in ("one process", "TP2+SP", "PP2"):
        config = config_of(path, "regression", LAYOUTS[name].megatron)
        seen += ranks.run(LAYOUTS[name].world, answer, config, export_head)
    weight = seen[0]["score.weight"]
    assert weight.shape == (1, SIZES["hidden"]) and not seen[0]["score.bias"].any()
    drawn = torch.randn(1, SIZES["hidden"], generator=torch.Generator().manual_seed(1234))
    assert torch.equal(weight, drawn * 0.1), "initializer_range is 0.1, the seed 1234"
    for each in seen:
        assert torch.equal(each["score.weight"], weight)
    (other,) = ranks.run(1, answer, config_of(path, "bradley_terry", {}, seed=5), export_head)
    assert set(other) == {"score.weight"} and not torch.equal(other["score.weight"], weight)


def test_a_value_head_can_start_from_that_of_a_reward_model(ranks, heads) -> None:
    path = heads("qwen3", "bradley_terry")
    (own,) = ranks.run(1, answer, config_of(path, "bradley_terry", {}), export_head)
    (seen,) = ranks.run(1, answer, config_of(path, "regression", {}), export_head)
    assert torch.equal(seen["score.weight"], own["score.weight"])
    assert torch.equal(seen["score.bias"], torch.zeros(1))


def test_what_does_not_fit_the_head_is_refused(ranks, heads, checkpoint, checkpoints) -> None:
    ask = partial(ranks.run, 1, partial(refusal, init_optimizer=False))
    path = heads("qwen3", "regression")
    scalar, plain = config_of(path, "regression", {}), policy_config(checkpoints[False], {})
    for method in ("logprobs", "entropy", "generate", "reference_logprobs"):
        assert "has no vocabulary" in ask(scalar, ConfigError, methodcaller(method, rows()))[0]
    most = methodcaller("topk_logits", rows(), 2)
    assert "has no vocabulary" in ask(scalar, ConfigError, most)[0]
    for method in ("values", "score"):
        said = ask(plain, ConfigError, methodcaller(method, rows()))[0]
        assert "policy.reward_model_cfg" in said
    deepseek = config_of(checkpoint("deepseek_v3", **SMALL), "regression", {"mtp_num_layers": 1})
    other = config_of(path, "bradley_terry", {})
    assert "reward_model_type: regression" in ask(policy_config(path, {}), ConfigError)[0]
    assert "mtp_num_layers to 0" in ask(deepseek, ConversionError)[0]
    assert "reward_model_type to regression" in ask(other, ConversionError)[0]
