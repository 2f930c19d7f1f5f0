"""Layers for multi-token prediction that the policy leaves out are in its exports all the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megatron_policy.errors import ConfigError
from tests.checkpoints import make_checkpoint
from tests.dist.cases import open_policy, policy_config
from tests.dist.layouts import FSDP2_LAYOUTS, LAYOUTS
from tests.dist.test_export import assert_same_tensors, export, tensors_of
from tests.mtp_checkpoints import add_mtp_layers, layer_name, own_names

SMALL = {"hidden": 48, "heads": 4, "layers": 4, "ffn": 40, "vocab": 200}


def made(path: Path, family: str, layers: int = 1, copies: bool = True) -> Path:
    return add_mtp_layers(make_checkpoint(path, family, **SMALL), layers, copies)


@pytest.mark.parametrize(
    ("family", "layout", "options"),
    [
        ("deepseek_v3", "one process", {}),
        ("glm4_moe", "TP2+SP", {"max_shard_bytes": 100_000}),
        ("glm4_moe_lite", "PP2", {}),
        ("mimo", "PP2", {}),
        ("mimo", "FSDP2 x 2", {}),
    ],
)
def test_tensors_of_layers_that_are_left_out_are_exported_unchanged(
    ranks, tmp_path, family: str, layout: str, options: dict[str, int]
) -> None:
    source, case = made(tmp_path / "source", family, layers=2), (LAYOUTS | FSDP2_LAYOUTS)[layout]
    config = policy_config(source, case.megatron)
    ranks.run(case.world, export, config, tmp_path / "exported", options)
    assert_same_tensors(tmp_path / "exported", source)
    written = json.loads((tmp_path / "exported/config.json").read_text())
    assert written["num_nextn_predict_layers"] == 2
    last = layer_name(written, 1) + own_names(written)[2]
    assert last in tensors_of(tmp_path / "exported")


def export_without_source(config: dict[str, Any], source: Path, path: Path) -> str:
    """The error of an export whose source has lost its weights; with them it succeeds."""
    file, away = source / "model.safetensors", source.parent / "away"
    with open_policy(config, init_optimizer=False, init_reference_model=False) as policy:
        dist.barrier()  # all ranks have read their weights
        if policy.rank == 0:
            file.rename(away)
        with pytest.raises(ConfigError) as error:
            policy.export_hf(path)
        assert not path.exists()
        if policy.rank == 0:
            away.rename(file)
        policy.export_hf(path)
        return str(error.value)


def test_a_source_that_has_lost_these_tensors_is_named_and_the_policy_stays_usable(
    ranks, tmp_path
) -> None:
    source, case = made(tmp_path / "source", "deepseek_v3"), LAYOUTS["PP2"]
    config = policy_config(source, case.megatron)
    target = tmp_path / "exported"
    for message in ranks.run(case.world, export_without_source, config, source, target):
        assert str(source) in message and "model.layers.4." in message
        assert "Put the checkpoint's safetensors back" in message
    assert_same_tensors(target, source)
