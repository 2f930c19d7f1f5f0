"""Loading straight from Hugging Face files: what a rank reads, and whether the table and the model
agree.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_policy.converters import table as tables
from megatron_policy.converters.formats.hf_files import HfReader
from megatron_policy.converters.rows.shards import split_dimension
from megatron_policy.engines.megatron import assemble
from megatron_policy.errors import ConversionError
from tests.checkpoints import make_checkpoint
from tests.dist.cases import open_policy, policy_config
from tests.dist.layouts import EXPERT_LAYOUTS, LAYOUTS

READ_ONLY = {"init_optimizer": False, "init_reference_model": False}


def count_bytes(config: dict[str, Any]) -> tuple[int, int]:
    """Bytes that this rank copied out of the checkpoint's files, and bytes of its parameters."""
    readers: list[HfReader] = []

    class Counted(HfReader):
        def __init__(self, model: str | Path) -> None:
            super().__init__(model)
            readers.append(self)

    original, assemble.HfReader = assemble.HfReader, Counted
    try:
        with open_policy(config, **READ_ONLY) as policy:
            held = sum(p.nbytes for _, p in policy.named_parameters())
    finally:
        assemble.HfReader = original
    return sum(reader.bytes_read for reader in readers), held


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_rank_reads_no_more_than_its_own_parameters(ranks, tmp_path, tied: bool) -> None:
    path = make_checkpoint(tmp_path / "model", "qwen2", tied=tied, vocab=1024, layers=4)
    config = policy_config(
        path, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    )
    for read, held in ranks.run(4, count_bytes, config):
        assert 0 < read <= 1.1 * held


@pytest.mark.parametrize(("family", "name"), [("qwen3_moe", "EP4"), ("gpt_oss", "EP2xTP2+SP")])
def test_a_rank_reads_no_more_than_its_own_experts(ranks, tmp_path, family: str, name: str) -> None:
    path = make_checkpoint(tmp_path / "model", family, ffn=96, hidden=96)
    case = EXPERT_LAYOUTS[name]
    for read, held in ranks.run(case.world, count_bytes, policy_config(path, case.megatron)):
        assert 0 < read <= 1.1 * held


def partition_dims(config: dict[str, Any]) -> list[tuple[str, int | None, int | None]]:
    """For each parameter: its name, the table's shard dimension, and the built module's."""
    with open_policy(config, **READ_ONLY) as policy:
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
    for seen in ranks.run(LAYOUTS[name].world, partition_dims, config):
        assert {dim for _, dim, _ in seen} == {0, 1, None}
        for parameter, table_dim, model_dim in seen:
            assert table_dim == model_dim, parameter


def load_with_a_row_less(config: dict[str, Any], megatron: str) -> str:
    """The error when the family's table lacks the row of one Megatron parameter but the files match
    the rest.
    """
    original = tables.Table.entries_of

    def without(self: tables.Table, *args: Any, **kwargs: Any) -> Any:
        return tuple(e for e in original(self, *args, **kwargs) if e.megatron != megatron)

    tables.Table.entries_of = without
    try:
        with open_policy(config, **READ_ONLY):
            return "no error"
    except ConversionError as error:
        return str(error)
    finally:
        tables.Table.entries_of = original


def test_a_parameter_that_no_row_fills_is_named(ranks, checkpoints) -> None:
    name = "decoder.layers.2.mlp.linear_fc2.weight"
    (message,) = ranks.run(1, load_with_a_row_less, policy_config(checkpoints[True], {}), name)
    assert name in message


def load_error(config: dict[str, Any]) -> str:
    with pytest.raises(ConversionError) as error, open_policy(config, **READ_ONLY):
        pass
    return str(error.value)


def test_a_checkpoint_that_lacks_a_tensor_is_refused_by_every_rank(ranks, tmp_path) -> None:
    from safetensors.torch import load_file, save_file

    path = make_checkpoint(tmp_path / "model", "llama", layers=2)
    file = path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.up_proj.weight"
    del tensors[name]
    save_file(tensors, file)
    for message in ranks.run(2, load_error, policy_config(path, LAYOUTS["TP2"].megatron)):
        assert name in message and "decoder.layers.1.mlp.linear_fc1.weight" in message


def loaded_dtypes(config: dict[str, Any]) -> set[torch.dtype]:
    with open_policy(config, **READ_ONLY) as policy:
        return {p.dtype for _, p in policy.named_parameters()}


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_parameters_have_the_precision_of_the_config(ranks, checkpoints, precision: str) -> None:
    config = policy_config(checkpoints[True], {}, precision=precision)
    assert ranks.run(1, loaded_dtypes, config) == [{getattr(torch, precision)}]
