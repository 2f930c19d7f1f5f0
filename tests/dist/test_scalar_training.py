"""Losses that take values or scores of a scalar head: trained as torch's AdamW trains transformers'
classification models, under every layout and with every way to make microbatches; and what is
exported and saved of them.

Shapes: B rows, S positions.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Mapping
from functools import cache, partial
from operator import methodcaller
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_policy.batch import BatchedDataDict
from megatron_policy.errors import CheckpointError, LossError
from megatron_policy.interfaces import LossInputType, LossType
from megatron_policy.policy import MegatronPolicy
from tests import margins, oracle, scalar_oracle
from tests.dist.cases import GLOBAL_BATCH, LOSSES, open_policy, policy_config
from tests.dist.layouts import EXPERT_LAYOUTS, FAMILIES, LAYOUTS
from tests.dist.resuming import paths, resumed
from tests.dist.shortcuts import answer, refusal
from tests.dist.test_docs import python_blocks
from tests.dist.test_export import tensors_of
from tests.dist.test_scalar_heads import BATCHINGS, config_of, expected_of, heads, rows
from tests.exact import assert_equal
from tests.invariance import cases, page
from tests.invariance.further import SCALAR, Collected, FurtherCell
from tests.invariance.measure import own_rows

__all__ = ["heads"]

CLIP_RANGE = 0.4


def clipped_error(
    values_BS: torch.Tensor, data: Mapping[str, torch.Tensor], tokens: Any
) -> torch.Tensor:
    """PPO's loss of values, whose changes are clipped."""
    returns_BS, old_BS = data["returns"], data["old_values"]
    near_BS = old_BS + (values_BS - old_BS).clamp(-CLIP_RANGE, CLIP_RANGE)
    error_BS = torch.maximum((values_BS - returns_BS) ** 2, (near_BS - returns_BS) ** 2)
    mask_BS = data["token_mask"] * data["sample_mask"].unsqueeze(-1)
    return 0.5 * (error_BS * mask_BS).sum() / tokens


def score_error(
    scores_B: torch.Tensor, data: Mapping[str, torch.Tensor], rows: Any
) -> torch.Tensor:
    """The squared error of a score of each row."""
    return ((scores_B - data["returns"][:, 0]) ** 2 * data["sample_mask"]).sum() / rows


class ClippedValues:
    loss_type, input_type = LossType.TOKEN_LEVEL, LossInputType.VALUE

    def __call__(self, data, global_valid_seqs, global_valid_toks, values) -> Any:
        loss = clipped_error(values, data, global_valid_toks)
        return loss, {"loss": loss.item()}


class ScoreErrors:
    loss_type, input_type = LossType.SEQUENCE_LEVEL, LossInputType.SCORE

    def __call__(self, data, global_valid_seqs, global_valid_toks, scores) -> Any:
        loss = score_error(scores, data, global_valid_seqs)
        return loss, {"loss": loss.item()}


class ValuesAsLogits(ClippedValues):
    """As hosts write them."""

    input_type = LossInputType.LOGIT

    def __call__(self, data, global_valid_seqs, global_valid_toks, logits) -> Any:
        assert logits.shape == (*data["input_ids"].shape, 1)
        return super().__call__(data, global_valid_seqs, global_valid_toks, logits.squeeze(-1))


class ScoresAsLogits(ScoreErrors):
    """As hosts write them."""

    input_type = LossInputType.LOGIT

    def __call__(self, data, global_valid_seqs, global_valid_toks, logits) -> Any:
        assert logits.shape == (data["input_ids"].size(0), 1)
        return super().__call__(data, global_valid_seqs, global_valid_toks, logits.squeeze(-1))


TRAINED: dict[str, tuple[str, type]] = {
    "values": ("regression", ClippedValues),
    "scores": ("bradley_terry", ScoreErrors),
    "values as logits": ("regression", ValuesAsLogits),
    "scores as logits": ("bradley_terry", ScoresAsLogits),
}
"""By name the kind of the head and the loss."""


@cache
def data() -> BatchedDataDict:
    """Rows of two global batches with what the losses read."""
    random = torch.Generator().manual_seed(9)
    found = rows()
    for name in ("returns", "old_values"):
        found[name] = torch.randn(found["input_ids"].shape, generator=random)
    return found


def value_level(model: Any, batch: BatchedDataDict) -> torch.Tensor:
    wide = {name: batch[name].to(model.dtype) for name in ("returns", "old_values")}
    tokens = oracle.loss_mask(batch).sum()
    return clipped_error(scalar_oracle.values(model, batch), {**batch, **wide}, tokens)


def score_level(model: Any, batch: BatchedDataDict) -> torch.Tensor:
    wide = {"returns": batch["returns"].to(model.dtype)}
    found = scalar_oracle.scores(model, batch)
    return score_error(found, {**batch, **wide}, batch["sample_mask"].sum())


@cache
def learned(path: Path, kind: str) -> oracle.Learned:
    level = value_level if kind == "regression" else score_level
    load = partial(scalar_oracle.load, kind)
    return oracle.Learned.of(path, data(), GLOBAL_BATCH, level, load=load)


def steps_of(policy: MegatronPolicy, batching: str) -> list[BatchedDataDict]:
    """This data-parallel rank's rows of each global batch."""
    cell = cases.Cell("one process", batching, "", "")
    batches = [data().get_batch(index, GLOBAL_BATCH) for index in range(2)]
    return [own_rows(policy, cell, batch, GLOBAL_BATCH, True) for batch in batches]


def seen_of(policy: MegatronPolicy, steps: list[Any]) -> dict[str, Any]:
    weights = {name: tensor.detach().clone() for name, tensor in policy.export()}
    return {"steps": steps, "weights": weights, "values": policy.values(data())}


def train(config: dict[str, Any], name: str, batching: str, root: Path | None) -> dict[str, Any]:
    """Two steps; with `root` the second goes on from a checkpoint, which is saved there."""
    loss = TRAINED[name][1]()
    with open_policy(config) as policy:
        batches = steps_of(policy, batching)
        steps = [policy.train(batches[0], loss, mbs=1)]
        if root is None:
            steps.append(policy.train(batches[1], loss, mbs=1))
            return seen_of(policy, steps)
        policy.save_checkpoint(**paths(root / "saved"))
    with resumed(config, root / "saved") as policy:
        steps.append(policy.train(batches[1], loss, mbs=1))
        policy.export_hf(root / "exported")
        return seen_of(policy, steps)


@pytest.fixture(scope="module")
def measured() -> Iterator[Collected]:
    """Collects differences; writes them on the page if the environment asks for it."""
    collected = Collected(SCALAR)
    yield collected
    if os.environ.get(page.WRITE):
        page.write_further(collected)


CASES = [
    (layout, batching, name, family)
    for (layout, batching), (name, family) in zip(
        itertools.product(LAYOUTS, ("padded", "packed")),
        itertools.cycle(itertools.product(TRAINED, FAMILIES.values())),
        strict=False,
    )
] + [
    (layout, batching, name, "qwen3_moe")
    for layout, (batching, name) in zip(
        EXPERT_LAYOUTS,
        itertools.cycle(itertools.product(("dynamic", "packed", "padded"), ("values", "scores"))),
        strict=False,
    )
]


@pytest.mark.parametrize(("layout", "batching", "name", "family"), CASES)
def test_losses_of_a_scalar_head_train_like_transformers_by_torchs_optimizer(
    ranks, heads, measured, layout: str, batching: str, name: str, family: str
) -> None:
    with margins.recorded() as record:
        assert_trained(ranks, heads, layout, batching, name, family, None)
    measured.add(FurtherCell(layout, batching, name, family), record)


def assert_trained(
    ranks, heads, layout: str, batching: str, name: str, family: str, root: Path | None
) -> Path:
    kind, _ = TRAINED[name]
    path, case = heads(family, kind), (LAYOUTS | EXPERT_LAYOUTS)[layout]
    config = config_of(path, kind, case.megatron, **BATCHINGS[batching])
    hf = learned(path, kind)
    expected = hf.read(partial(scalar_oracle.values, data=data()))
    for seen in ranks.run(case.world, train, config, name, batching, root):
        hf.assert_same_steps(seen["steps"], layout)
        assert {"score.weight", "model.norm.weight"} <= seen["weights"].keys()
        hf.assert_same_weights(seen["weights"])
        assert_equal("values after training", seen["values"], expected)
    return path


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("layout", "name"), [("TP2+SP", "values"), ("PP2", "scores"), ("PP2", "values")]
)
def test_training_goes_on_from_a_checkpoint_and_transformers_loads_the_export(
    ranks, heads, tmp_path, layout: str, name: str
) -> None:
    path = assert_trained(ranks, heads, layout, "padded", name, FAMILIES[True], tmp_path)
    kind, exported = TRAINED[name][0], tmp_path / "exported"
    assert (exported / "config.json").read_bytes() == (path / "config.json").read_bytes()
    assert tensors_of(exported).keys() == tensors_of(path).keys()
    after = learned(path, kind).read(partial(scalar_oracle.values, data=data()))
    with torch.no_grad():
        values = scalar_oracle.values(scalar_oracle.load(kind, exported), data())
    assert_equal("values of the export", values, after)


def test_a_checkpoint_of_another_head_is_refused(ranks, heads, checkpoints, tmp_path) -> None:
    path, saved = checkpoints[True], paths(tmp_path / "saved")
    config = config_of(heads(FAMILIES[True], "regression"), "regression", {})
    ranks.run(1, train, config, "values", "padded", tmp_path)
    for other in (policy_config(path, {}), config_of(path, "bradley_terry", {})):
        (said,) = ranks.run(1, partial(refusal, **saved), other, CheckpointError)
        assert "reward_model_cfg differ" in said


def export(root: Path, policy: MegatronPolicy) -> torch.Tensor:
    policy.export_hf(root)
    return policy.values(data())


@pytest.mark.parametrize("kind", ["regression", "bradley_terry"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_language_model_with_a_fresh_head_is_exported_as_transformers_classifier(
    ranks, checkpoints, tmp_path, tied: bool, kind: str
) -> None:
    target, again = tmp_path / "exported", tmp_path / "again"
    padded = {"hf_config_overrides": {"pad_token_id": 0}}
    config = config_of(checkpoints[tied], kind, LAYOUTS["PP2"].megatron, **padded)
    values, _ = ranks.run(2, answer, config, partial(export, target))
    written = json.loads((target / "config.json").read_text())
    model = scalar_oracle.CLASSES[kind].from_pretrained(target)
    assert written["architectures"] == [type(model).__name__]
    assert (model.config.num_labels, model.config.pad_token_id) == (1, 0)
    assert "lm_head.weight" not in tensors_of(target)
    exact = expected_of(target, kind, data(), scalar_oracle.values)
    reloaded = ranks.run(1, answer, config_of(target, kind, {}), partial(export, again))
    for each in (values, *reloaded):
        assert_equal("values of a fresh head", each, exact)
    assert (again / "config.json").read_bytes() == (target / "config.json").read_bytes()


PAIRS = {"one process": 2, "TP2+SP": 4, "PP2xVPP2": 2, "DP2": 2, "TP2xCP2+SP": 2}
"""Layouts with the rows of a microbatch that they have here."""


def preferences(config: dict[str, Any], batching: str, mbs: int) -> dict[str, Any]:
    """Two steps with the loss of docs/values.md."""
    namespace: dict[str, Any] = {}
    (code,) = python_blocks("docs/values.md")
    exec(code, namespace)
    with open_policy(config) as policy:
        batches, loss = steps_of(policy, batching), namespace["Preference"]()
        return seen_of(policy, [policy.train(batch, loss, mbs=mbs) for batch in batches])


def preference_level(model: Any, batch: BatchedDataDict) -> torch.Tensor:
    better_P, worse_P = scalar_oracle.scores(model, batch).view(-1, 2).unbind(1)
    losses_P = -(better_P - worse_P).sigmoid().log() * batch["sample_mask"][::2]
    return losses_P.sum() / (batch["sample_mask"].sum() / 2)


PAIRED = [(layout, "padded") for layout in PAIRS]
PAIRED += itertools.product(("PP2xVPP2", "TP2+SP"), ("dynamic", "packed"))


@pytest.mark.parametrize(("layout", "batching"), PAIRED)
def test_the_documented_reward_model_is_trained_like_that_of_transformers(
    ranks, heads, layout: str, batching: str
) -> None:
    path, case = heads("qwen3", "bradley_terry"), LAYOUTS[layout]
    config = config_of(path, "bradley_terry", case.megatron, **BATCHINGS[batching])
    load = partial(scalar_oracle.load, "bradley_terry")
    hf = oracle.Learned.of(path, data(), GLOBAL_BATCH, preference_level, load=load)
    for seen in ranks.run(case.world, preferences, config, batching, PAIRS[layout]):
        hf.assert_same_steps(seen["steps"], layout)
        hf.assert_same_weights(seen["weights"])


def test_a_loss_that_does_not_fit_the_head_is_refused(ranks, heads, checkpoints) -> None:
    scalar = config_of(heads("qwen3", "regression"), "regression", {})
    plain = policy_config(checkpoints[False], {})
    for config, losses, reason in (
        (scalar, (LOSSES["token"](), LOSSES["sequence"]()), "has a scalar head"),
        (plain, (ClippedValues(), ScoreErrors()), "policy.reward_model_cfg"),
    ):
        for loss in losses:
            call = methodcaller("train", data(), loss, mbs=1)
            assert reason in ranks.run(1, refusal, config, LossError, call)[0]
