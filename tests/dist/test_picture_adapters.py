"""Adapters on the decoder of a model that also sees pictures or hears, and on its towers: two steps
are those of PEFT over transformers' composite model, which reads what is exported.

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
from tests.dist.resuming import paths
from tests.dist.test_adapters import adapted
from tests.dist.test_pictures_in_training import BATCHINGS, LAYOUTS, loss_of, rows_of
from tests.exact import Exact, InDouble, assert_equal
from tests.picture_models import KEYS, hf_logprobs, load_model, make_model

DECODER = r".*language_model.*\.(q_proj|v_proj|o_proj|up_proj|down_proj)"
WORDS = ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")
OF_DECODER = [f"*language_model*.{word}" for word in WORDS]
OF_BOTH = {
    "qwen3_vl": ["q_proj", "down_proj", "qkv", "attn.proj", "mlp.linear_fc2", "merger.linear_fc1"],
    "qwen2_5_omni_thinker": ["q_proj", "v_proj", "out_proj", "fc1", "audio_tower.proj", "mlp.0"],
    "qwen3_vl_moe": ["q_proj", "qkv", "merger.linear_fc1"],
    "llava": ["q_proj", "v_proj", "out_proj", "fc2", "linear_1"],
}
"""Modules of decoders, towers and projectors, as PEFT and the policy name them."""
CASES = (
    ("qwen2_5_vl", "TP2+SP", False),
    ("qwen3_vl", "TP2+SP", False),
    ("qwen3_vl", "PP2", False),
    ("qwen3_5", "TP2+SP", False),
    ("qwen2_5_vl", "DP2, overlaps", False),
    *(("qwen3_vl", name, True) for name in ("one process", "TP2+SP", "PP2", "CP2", "TP2")),
    ("qwen3_vl", "DP2, overlaps", True),
    ("qwen2_5_omni_thinker", "TP2+SP", True),
    ("llava", "PP2", True),
    ("qwen3_vl_moe", "TP2+SP", True),
)


def train(config: dict[str, Any], rows: BatchedDataDict, target: Path) -> dict[str, Any]:
    """Two steps, the adapters that they leave, and the log-probabilities of the rows with them,
    which are then in the directory `target`.
    """
    keys = ("input_ids", "input_lengths", *KEYS)
    texts = BatchedDataDict({key: rows[key] for key in keys if key in rows})
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
        policy.export_hf(target.with_name("merged"))
        return seen


def go_on(
    saver: dict[str, Any] | None, config: dict[str, Any], rows: BatchedDataDict, root: Path
) -> dict[str, torch.Tensor]:
    """The adapters that the first step leaves, which are saved, as a policy of the config `saver`
    trains, or those that the second leaves that goes on.
    """
    with open_policy(saver or config, init_reference_model=False) as policy:
        if saver is None:
            policy.load_checkpoint(**paths(root))
        step = own_steps(policy, rows)[saver is None]
        policy.train(step, LOSSES["token"](), gbs=GLOBAL_BATCH, mbs=2)
        if saver is not None:
            policy.save_checkpoint(**paths(root))
        return {name: tensor.clone() for name, tensor in policy.export(adapters=True)}


def read_by_peft(path: Path, adapters: Path, rows: BatchedDataDict) -> Exact:
    """Next-token log-probabilities `[B, S - 1]` of PEFT's model with those of a directory."""
    load = peft_models.Loads(adapters, load=load_model)
    with torch.no_grad():
        rounded = hf_logprobs(load(path), rows)
        double = load(path, torch.float64)
        with InDouble():
            return Exact.between(rounded, hf_logprobs(double, rows))


@pytest.mark.parametrize(("family", "name", "towers"), CASES)
def test_adapters_are_trained_and_read_as_peft_does(
    ranks, tmp_path: Path, family: str, name: str, towers: bool
) -> None:
    path, rows = make_model(tmp_path / "hf", family), rows_of(family)
    modules = OF_BOTH[family] if towers else OF_DECODER
    theirs = modules if towers else DECODER
    start = peft_models.make_adapters(path, tmp_path / "start", theirs, load=load_model)
    load = peft_models.Loads(start, load=load_model)
    own = peft_models.is_adapter
    hf = oracle.Learned.of(path, rows, GLOBAL_BATCH, loss_of, own=own, load=load)
    trained = {peft_models.saved_name(n): w for n, w in hf.exact.weights.items() if own(n) == {}}
    case, batching = LAYOUTS[name]
    config = adapted(path, case.megatron, start, target_modules=modules) | BATCHINGS[batching]
    config["max_total_sequence_length"] = rows["input_ids"].size(1)
    inside = torch.arange(1, rows["input_ids"].size(1)) < rows["input_lengths"].unsqueeze(1)
    for seen in ranks.run(case.world, train, config, rows, tmp_path / "peft"):
        hf.assert_same_steps(seen["steps"])
        assert trained and trained.keys() == seen["adapters"].keys()
        for weight, exact in trained.items():
            hf.assert_same_weight(seen["adapters"][weight], exact, weight)
        exact = read_by_peft(path, tmp_path / "peft", rows)
        assert_equal("logprobs", seen["logprobs"][:, 1:][inside], exact[inside])
    with torch.no_grad():
        rounded = hf_logprobs(load_model(tmp_path / "merged"), rows)
        double = load_model(tmp_path / "merged", torch.float64)
        with InDouble():
            merged = Exact.between(rounded, hf_logprobs(double, rows))
    assert_equal("logprobs of the merged export", seen["logprobs"][:, 1:][inside], merged[inside])


@pytest.mark.nightly
@pytest.mark.parametrize(("saver", "loader"), [("TP2+SP", "PP2"), ("PP2", "TP2")])
def test_training_of_towers_adapters_goes_on_under_another_layout(
    ranks, tmp_path: Path, saver: str, loader: str
) -> None:
    path, rows = make_model(tmp_path / "hf", "qwen3_vl"), rows_of("qwen3_vl")
    modules, own = OF_BOTH["qwen3_vl"], peft_models.is_adapter
    start = peft_models.make_adapters(path, tmp_path / "start", modules, load=load_model)
    load = peft_models.Loads(start, load=load_model)
    hf = oracle.Learned.of(path, rows, GLOBAL_BATCH, loss_of, own=own, load=load)
    first, then = (
        adapted(path, LAYOUTS[name][0].megatron, start, target_modules=modules)
        | {"max_total_sequence_length": rows["input_ids"].size(1)}
        for name in (saver, loader)
    )
    ranks.run(2, go_on, first, then, rows, tmp_path)
    trained = {peft_models.saved_name(n): w for n, w in hf.exact.weights.items() if own(n) == {}}
    for adapters in ranks.run(2, go_on, None, then, rows, tmp_path):
        assert adapters.keys() == trained.keys()
        for weight, exact in trained.items():
            hf.assert_same_weight(adapters[weight], exact, weight)
