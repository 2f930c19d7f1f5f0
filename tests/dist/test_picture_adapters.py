"""Adapters on the decoder of a model that also sees pictures: two steps are those of PEFT over
transformers' composite model, which reads what is exported.

Shapes: B rows, S positions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_policy.batch import BatchedDataDict
from tests import oracle, peft_models
from tests.dist.cases import GLOBAL_BATCH, LOSSES, open_policy, own_steps
from tests.dist.test_adapters import adapted
from tests.dist.test_pictures_in_training import BATCHINGS, LAYOUTS, loss_of, rows_of
from tests.exact import Exact, InDouble, assert_equal
from tests.picture_models import MEDIA, hf_logprobs, load_model, make_model

DECODER = r".*language_model.*\.(q_proj|v_proj|o_proj|up_proj|down_proj)"
MODULES = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
CASES = (
    ("qwen2_5_vl", "TP2+SP"),
    ("qwen3_vl", "TP2+SP"),
    ("qwen3_vl", "PP2"),
    ("qwen3_5", "TP2+SP"),
    ("qwen2_5_vl", "DP2, overlaps"),
)


def train(config: dict[str, Any], rows: BatchedDataDict, target: Path) -> dict[str, Any]:
    """Two steps, the adapters that they leave, and the log-probabilities of the rows with them,
    which are then in the directory `target`.
    """
    texts = BatchedDataDict({key: rows[key] for key in ("input_ids", "input_lengths", *MEDIA)})
    with open_policy(config, init_reference_model=False) as policy:
        mbs = 4 if policy.topology.dp == 1 else 1
        seen: dict[str, Any] = {
            "steps": [
                policy.train(step, LOSSES["token"](), gbs=GLOBAL_BATCH, mbs=mbs)
                for step in own_steps(policy, rows)
            ]
        }
        seen["adapters"] = {n: t.clone() for n, t in policy.export(adapters=True)}
        seen["logprobs"] = policy.logprobs(texts)
        policy.export_peft(target)
        return seen


def read_by_peft(path: Path, adapters: Path, rows: BatchedDataDict) -> Exact:
    """Next-token log-probabilities `[B, S - 1]` of PEFT's model with those of a directory."""
    load = peft_models.Loads(adapters, load=load_model)
    with torch.no_grad():
        rounded = hf_logprobs(load(path), rows)
        double = load(path, torch.float64)
        with InDouble():
            return Exact.between(rounded, hf_logprobs(double, rows))


@pytest.mark.parametrize(("family", "name"), CASES)
def test_adapters_are_trained_and_read_as_peft_does(
    ranks, tmp_path: Path, family: str, name: str
) -> None:
    path, rows = make_model(tmp_path / "hf", family), rows_of(family)
    start = peft_models.make_adapters(path, tmp_path / "start", DECODER, load=load_model)
    load = peft_models.Loads(start, load=load_model)
    own = peft_models.is_adapter
    hf = oracle.Learned.of(path, rows, GLOBAL_BATCH, loss_of, own=own, load=load)
    trained = {peft_models.saved_name(n): w for n, w in hf.exact.weights.items() if own(n) == {}}
    case, batching = LAYOUTS[name]
    config = adapted(path, case.megatron, start, target_modules=MODULES) | BATCHINGS[batching]
    config["max_total_sequence_length"] = rows["input_ids"].size(1)
    inside = torch.arange(1, rows["input_ids"].size(1)) < rows["input_lengths"].unsqueeze(1)
    for seen in ranks.run(case.world, train, config, rows, tmp_path / "peft"):
        hf.assert_same_steps(seen["steps"])
        assert trained and trained.keys() == seen["adapters"].keys()
        for weight, exact in trained.items():
            hf.assert_same_weight(seen["adapters"][weight], exact, weight)
        exact = read_by_peft(path, tmp_path / "peft", rows)
        assert_equal("logprobs", seen["logprobs"][:, 1:][inside], exact[inside])
