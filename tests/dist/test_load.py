"""Loading straight from Hugging Face files, also quantised ones: what a rank reads, and whether the
table and the model agree.
"""

from __future__ import annotations

import json
from operator import methodcaller
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_policy.converters import table as tables
from megatron_policy.converters.formats.dequantising import ByteMatrix
from megatron_policy.converters.formats.hf_files import HfReader, inventory, quantised_in
from megatron_policy.converters.rows.shards import split_dimension
from megatron_policy.engines.megatron import assemble
from megatron_policy.errors import ConversionError
from megatron_policy.policy import MegatronPolicy
from tests.checkpoints import make_checkpoint
from tests.dist.cases import open_policy, policy_config
from tests.dist.layouts import EXPERT_LAYOUTS, LAYOUTS, layout
from tests.dist.resuming import replaced
from tests.dist.shortcuts import UNUSED, answer, refusal
from tests.mtp_checkpoints import add_mtp_layers
from tests.quantised import dequantised_by_transformers, edited, quantise_fp8, quantise_mxfp4

DENSE, WIDE = {"vocab": 1024, "layers": 4}, {"ffn": 96, "hidden": 96}


def count_bytes(config: dict[str, Any]) -> tuple[int, int]:
    """Bytes that this rank copied out of the checkpoint's files, and bytes of its parameters."""
    readers: list[HfReader] = []

    class Counted(HfReader):
        def __init__(self, model: str | Path) -> None:
            super().__init__(model)
            readers.append(self)

    with replaced(assemble, "HfReader", lambda _: Counted), open_policy(config, **UNUSED) as policy:
        held = sum(p.nbytes for _, p in policy.named_parameters())
    return sum(reader.bytes_read for reader in readers), held


OWN = [
    pytest.param("qwen2", DENSE | {"tied": True}, layout(4, tp=2, pp=2), marks=pytest.mark.daily),
    pytest.param("qwen2", DENSE | {"tied": False}, layout(4, tp=2, pp=2)),
    pytest.param("qwen3_moe", WIDE, EXPERT_LAYOUTS["EP4"], marks=pytest.mark.daily),
    pytest.param("gpt_oss", WIDE, EXPERT_LAYOUTS["EP2xTP2+SP"]),
]


@pytest.mark.parametrize(("family", "sizes", "case"), OWN)
def test_a_rank_reads_no_more_than_its_own_weights(ranks, tmp_path, family, sizes, case) -> None:
    path = make_checkpoint(tmp_path / "model", family, **sizes)
    for read, held in ranks.run(case.world, count_bytes, policy_config(path, case.megatron)):
        assert 0 < read <= 1.1 * held


def partition_dims(policy: MegatronPolicy) -> list[tuple[str, int | None, int | None]]:
    """For each parameter: its name, the table's shard dimension, and the built module's."""
    return [
        (
            entry.megatron,
            split_dimension(entry.row, policy._engine.table.architecture),
            p.partition_dim if getattr(p, "tensor_model_parallel", False) else None,
        )
        for entry, p in policy._engine.held
    ]


@pytest.mark.parametrize("name", ["TP2", "TP2+SP", "TP4 over 2 groups"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_the_table_splits_what_the_built_model_splits(ranks, checkpoints, name, tied) -> None:
    config = policy_config(checkpoints[tied], LAYOUTS[name].megatron)
    for seen in ranks.run(LAYOUTS[name].world, answer, config, partition_dims):
        assert {dim for _, dim, _ in seen} == {0, 1, None}
        for parameter, table_dim, model_dim in seen:
            assert table_dim == model_dim, parameter


def load_with_a_row_less(config: dict[str, Any], megatron: str) -> str:
    """The error when the table lacks the row of one parameter but the files match."""

    def lacking(entries_of: Any) -> Any:
        return lambda *args, **kwargs: tuple(
            entry for entry in entries_of(*args, **kwargs) if entry.megatron != megatron
        )

    with replaced(tables.Table, "entries_of", lacking):
        return refusal(config, ConversionError)


def test_a_parameter_that_no_row_fills_is_named(ranks, checkpoints) -> None:
    name = "decoder.layers.2.mlp.linear_fc2.weight"
    (message,) = ranks.run(1, load_with_a_row_less, policy_config(checkpoints[True], {}), name)
    assert name in message


def test_a_checkpoint_that_lacks_a_tensor_is_refused_by_every_rank(ranks, tmp_path) -> None:
    path = make_checkpoint(tmp_path / "model", "llama", layers=2)
    file = path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.up_proj.weight"
    del tensors[name]
    save_file(tensors, file)
    config = policy_config(path, LAYOUTS["TP2"].megatron)
    for message in ranks.run(2, refusal, config, ConversionError):
        assert name in message and "decoder.layers.1.mlp.linear_fc1.weight" in message


# Sizes that two ranks share cut fp8 blocks of 16 x 16 and mxfp4 blocks of 32.
QUANTISED = {
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

    with replaced(assemble, "HfReader", lambda _: Counted), open_policy(config, **UNUSED) as policy:
        held = {entry.megatron: p.detach().clone() for entry, p in policy._engine.held}
        entries = [(entry.hf[0], p.numel()) for entry, p in policy._engine.held]
    with open_policy(plain, **UNUSED) as policy:
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
    for number, (case, (family, _, sizes)) in enumerate(QUANTISED.items()):
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


@pytest.mark.parametrize("case", QUANTISED)
def test_a_rank_holds_what_the_dequantised_checkpoint_gives_it_and_reads_no_more(
    ranks, pairs, case: str
) -> None:
    layout = (LAYOUTS | EXPERT_LAYOUTS)[QUANTISED[case][1]]
    configs = [policy_config(path, layout.megatron, precision="bfloat16") for path in pairs[case]]
    for differing, read, needed in ranks.run(layout.world, load, *configs):
        assert differing == []
        assert 0 < needed < read <= 1.1 * needed


@pytest.mark.parametrize("case", list(QUANTISED)[:2])
def test_an_export_is_the_dequantised_checkpoint_with_a_config_that_says_so(
    ranks, pairs, tmp_path, case: str
) -> None:
    quantised, plain = pairs[case]
    layout = (LAYOUTS | EXPERT_LAYOUTS)[QUANTISED[case][1]]
    export = methodcaller("export_hf", tmp_path / "out")
    ranks.run(layout.world, answer, policy_config(quantised, layout.megatron), export)
    with HfReader(tmp_path / "out") as ours, HfReader(plain) as theirs:
        assert ours.dtypes == theirs.dtypes
        assert all(ours.tensor(name).equal(theirs.tensor(name)) for name in theirs.shapes)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == json.loads((plain / "config.json").read_text())
