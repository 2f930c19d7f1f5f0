"""Adapters on the decoder of a model that also sees pictures or hears, and on its towers: two steps
are those of PEFT over transformers' composite model, which reads what is exported.

Shapes: B rows, S positions.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_policy.batch import BatchedDataDict
from tests import margins, oracle, peft_models
from tests.dist.cases import GLOBAL_BATCH, LOSSES, open_policy, own_steps
from tests.dist.resuming import paths
from tests.dist.test_adapters import adapted
from tests.dist.test_pictures_in_training import (
    BATCHINGS,
    LAYOUTS,
    LAYOUTS_OF,
    loss_of,
    read_towers,
    rows_of,
    texts_of,
)
from tests.exact import ROOM, Exact, InDouble, assert_equal
from tests.invariance import page
from tests.invariance.further import (
    OF_DECODERS,
    OF_TOWERS,
    PICTURE_ADAPTERS,
    Collected,
    FurtherCell,
)
from tests.picture_models import hf_logprobs, load_model, make_model

DECODER = r".*language_model.*\.(q_proj|v_proj|o_proj|up_proj|down_proj)"
WORDS = ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")
OF_DECODER = [f"*language_model*.{word}" for word in WORDS]
OF_BOTH = {
    "qwen2_5_vl": ["q_proj", "down_proj", "qkv", "attn.proj", "mlp.0"],
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
    ("qwen2_5_vl", "TP2+SP", True),
    ("qwen3_vl_moe", "EP2xTP2+SP", True),
    ("qwen3_vl_moe", "PP2", True),
)


def train(config: dict[str, Any], rows: BatchedDataDict, target: Path) -> dict[str, Any]:
    """Two steps, the adapters that they leave, and the log-probabilities of the rows with them,
    which are then in the directory `target`, and a checkpoint beside it.
    """
    with open_policy(config, init_reference_model=False) as policy:
        mbs = 4 if policy.topology.dp == 1 else 1
        seen: dict[str, Any] = {
            "steps": [
                policy.train(step, LOSSES["token"](), gbs=GLOBAL_BATCH, mbs=mbs)
                for step in own_steps(policy, rows)
            ]
        }
        seen["adapters"] = {n: t.clone() for n, t in policy.export(adapters=True)}
        seen["logprobs"] = policy.logprobs(texts_of(rows))
        policy.save_checkpoint(**paths(target.parent))
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


@pytest.fixture(scope="module")
def start_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The paths of a family's checkpoint and of adapters for it, and what training these gives."""

    @cache
    def made(family: str, towers: bool) -> tuple[Path, Path, oracle.Learned]:
        folder = tmp_path_factory.mktemp(family)
        path, modules = make_model(folder / "hf", family), OF_BOTH[family] if towers else DECODER
        start = peft_models.make_adapters(path, folder / "start", modules, load=load_model)
        load, own = peft_models.Loads(start, load=load_model), peft_models.is_adapter
        rows = rows_of(family)
        return path, start, oracle.Learned.of(path, rows, GLOBAL_BATCH, loss_of, own=own, load=load)

    return made


@pytest.fixture(scope="module")
def measured() -> Iterator[Collected]:
    """Collects differences; writes them on the page if the environment asks for it."""
    collected = Collected(PICTURE_ADAPTERS)
    yield collected
    if os.environ.get(page.WRITE):
        page.write_further(collected)


def list_trained(hf: oracle.Learned) -> dict[str, torch.Tensor]:
    """The adapters that training leaves, by their names on file."""
    weights = hf.exact.weights.items()
    return {peft_models.saved_name(n): w for n, w in weights if peft_models.is_adapter(n) == {}}


@pytest.mark.parametrize(("family", "name", "towers"), CASES)
def test_adapters_are_trained_and_read_as_peft_does(
    ranks, start_of, measured: Collected, tmp_path: Path, family: str, name: str, towers: bool
) -> None:
    path, start, hf = start_of(family, towers)
    rows, trained = rows_of(family), list_trained(hf)
    modules = OF_BOTH[family] if towers else OF_DECODER
    case, batching = LAYOUTS_OF[family][name]
    config = adapted(path, case.megatron, start, target_modules=modules) | BATCHINGS[batching]
    config["max_total_sequence_length"] = rows["input_ids"].size(1)
    inside = torch.arange(1, rows["input_ids"].size(1)) < rows["input_lengths"].unsqueeze(1)
    found = ranks.run(case.world, train, config, rows, tmp_path / "peft")
    exact = read_by_peft(path, tmp_path / "peft", rows)
    with margins.recorded() as record:
        for seen in found:
            hf.assert_same_steps(seen["steps"])
            assert trained and trained.keys() == seen["adapters"].keys()
            for weight, expected in trained.items():
                hf.assert_same_weight(seen["adapters"][weight], expected, weight)
            assert_equal("logprobs", seen["logprobs"][:, 1:][inside], exact[inside])
        if towers:
            apart = hf.compare_towers(read_towers(tmp_path))
            margins.check("tower's gradients", apart, ROOM * hf.towers_rounding)
    kind = OF_TOWERS if towers else OF_DECODERS
    measured.add(FurtherCell(name, batching, kind, family), record)
    with torch.no_grad():
        rounded = hf_logprobs(load_model(tmp_path / "merged"), rows)
        double = load_model(tmp_path / "merged", torch.float64)
        with InDouble():
            merged = Exact.between(rounded, hf_logprobs(double, rows))
    assert_equal(
        "logprobs of the merged export", found[0]["logprobs"][:, 1:][inside], merged[inside]
    )


@pytest.mark.nightly
@pytest.mark.parametrize(("saver", "loader"), [("TP2+SP", "PP2"), ("PP2", "TP2")])
def test_training_of_towers_adapters_goes_on_under_another_layout(
    ranks, start_of, tmp_path: Path, saver: str, loader: str
) -> None:
    (path, start, hf), rows = start_of("qwen3_vl", True), rows_of("qwen3_vl")
    first, then = (
        adapted(path, LAYOUTS[name][0].megatron, start, target_modules=OF_BOTH["qwen3_vl"])
        | {"max_total_sequence_length": rows["input_ids"].size(1)}
        for name in (saver, loader)
    )
    ranks.run(2, go_on, first, then, rows, tmp_path)
    trained = list_trained(hf)
    for adapters in ranks.run(2, go_on, None, then, rows, tmp_path):
        assert adapters.keys() == trained.keys()
        for weight, exact in trained.items():
            hf.assert_same_weight(adapters[weight], exact, weight)
