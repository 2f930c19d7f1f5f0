"""Quantised checkpoints in policies: each rank dequantises its own slices, and reads no others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megatron_policy.converters.formats.dequantising import ByteMatrix
from megatron_policy.converters.formats.hf_files import HfReader, inventory, quantised_in
from megatron_policy.engines.megatron import assemble
from tests.checkpoints import make_checkpoint
from tests.dist.cases import open_policy, policy_config
from tests.dist.layouts import EXPERT_LAYOUTS, LAYOUTS
from tests.mtp_checkpoints import add_mtp_layers
from tests.quantised import dequantised_by_transformers, edited, quantise_fp8, quantise_mxfp4

READ_ONLY = {"init_optimizer": False, "init_reference_model": False}

# Sizes that two ranks share cut fp8 blocks of 16 x 16 and mxfp4 blocks of 32.
CASES = {
    "dense in fp8": ("qwen3", "TP2", {"hidden": 72, "ffn": 200}),
    "MLA and experts in fp8, a left-out layer": ("deepseek_v3", "EP2xTP2+SP", {"head_dim": None}),
    "experts with names to skip": ("minimax_m2", "TP2+SP", {"ffn": 72}),
    "mxfp4": ("gpt_oss", "one process", {"ffn": 96}),
}


def load(config: dict[str, Any], plain: dict[str, Any]) -> tuple[list[str], int, float]:
    """Parameters that differ from those of the plain checkpoint, the bytes of quantised tensors
    that this rank read, and the bytes that its own elements of them take.
    """
    read: list[int] = []

    class Counted(HfReader):
        def fetch(self, matrix: ByteMatrix, rows: range, columns: range) -> torch.Tensor:
            found = super().fetch(matrix, rows, columns)
            read.append(found.nbytes)
            return found

    original, assemble.HfReader = assemble.HfReader, Counted
    try:
        with open_policy(config, **READ_ONLY) as policy:
            held = {entry.megatron: p.detach().clone() for entry, p in policy._engine.held}
            entries = [(entry.hf[0], p.numel()) for entry, p in policy._engine.held]
    finally:
        assemble.HfReader = original
    with open_policy(plain, **READ_ONLY) as policy:
        differing = [e.megatron for e, p in policy._engine.held if not p.equal(held[e.megatron])]
    path = Path(config["model_name"])
    quantised = quantised_in(path, inventory(path))
    # Payload alone: scales are what a rank can read in addition.
    rates = {n: t.payload.nbytes / torch.Size(t.shape).numel() for n, t in quantised.items()}
    return differing, sum(read), sum(rates[hf] * n for hf, n in entries if hf in quantised)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> dict[str, tuple[Path, Path]]:
    """Of each case, the quantised checkpoint and what transformers makes of it, in bfloat16."""
    made = {}
    for number, (case, (family, _, sizes)) in enumerate(CASES.items()):
        folder = tmp_path_factory.mktemp(f"case{number}")
        source = make_checkpoint(
            folder / "source", family, layers=2, dtype="bfloat16", tokenizer=False, **sizes
        )
        if "left-out" in case:
            add_mtp_layers(source, 1)
        quantise = quantise_mxfp4 if family == "gpt_oss" else quantise_fp8
        quantised = quantise(source, folder / "quantised")
        plain = edited(source, folder / "plain")
        save_file(dequantised_by_transformers(quantised), plain / "model.safetensors")
        made[case] = (quantised, plain)
    return made


@pytest.mark.parametrize("case", CASES)
def test_a_rank_holds_what_the_dequantised_checkpoint_gives_it_and_reads_no_more(
    ranks, pairs, case: str
) -> None:
    layout = (LAYOUTS | EXPERT_LAYOUTS)[CASES[case][1]]
    configs = [policy_config(path, layout.megatron, precision="bfloat16") for path in pairs[case]]
    for differing, read, needed in ranks.run(layout.world, load, *configs):
        assert differing == []
        assert 0 < needed < read <= 1.1 * needed


def export(config: dict[str, Any], path: Path) -> None:
    with open_policy(config, **READ_ONLY) as policy:
        policy.export_hf(path)


@pytest.mark.parametrize("case", list(CASES)[:2])
def test_an_export_is_the_dequantised_checkpoint_with_a_config_that_says_so(
    ranks, pairs, tmp_path, case: str
) -> None:
    quantised, plain = pairs[case]
    layout = (LAYOUTS | EXPERT_LAYOUTS)[CASES[case][1]]
    ranks.run(layout.world, export, policy_config(quantised, layout.megatron), tmp_path / "out")
    with HfReader(tmp_path / "out") as ours, HfReader(plain) as theirs:
        assert ours.dtypes == theirs.dtypes
        assert all(ours.tensor(name).equal(theirs.tensor(name)) for name in theirs.shapes)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == json.loads((plain / "config.json").read_text())
