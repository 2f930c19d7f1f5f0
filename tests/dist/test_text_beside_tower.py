"""A text model and one that also sees pictures, whose decoder it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText

from tests.checkpoints import make_checkpoint
from tests.dist import test_mtp_training as mtp
from tests.dist.cases import logits_of, policy_config
from tests.dist.test_export import assert_same_tensors, export
from tests.exact import Exact, assert_equal
from tests.families.qwen3_5_text import GRIDS
from tests.mtp_checkpoints import add_mtp_layers


def put_beside_tower(source: Path, path: Path) -> Path:
    """The text model at `source` as published ones are: within a model that also has a tower."""
    text = json.loads((source / "config.json").read_text())
    sizes = {"depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2}
    tower = sizes | {"patch_size": 4, "out_hidden_size": text["hidden_size"]}
    sections = {"text_config": text, "vision_config": tower}
    config = AutoConfig.for_model("qwen3_5", **sections, image_token_id=text["vocab_size"] - 1)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    model.save_pretrained(path)
    own = {
        name.replace("model.", "model.language_model."): tensor
        for name, tensor in load_file(source / "model.safetensors").items()
    }
    both = load_file(path / "model.safetensors") | own
    save_file(both, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.mark.parametrize(
    "predicting",
    [False, pytest.param(True, marks=pytest.mark.nightly)],
    ids=["left out", "predicting"],
)
def test_a_text_model_beside_a_tower_computes_alike_and_is_exported_with_it(
    ranks, tmp_path: Path, predicting: bool
) -> None:
    sizes = mtp.SMALL
    grids = GRIDS | {"mrope_section": [1, 1, 1]}
    text = make_checkpoint(tmp_path / "text", "qwen3_5_text", rope_scaling=grids, **sizes)
    add_mtp_layers(text)
    path, case = put_beside_tower(text, tmp_path / "hf"), mtp.LAYOUTS["PP2"]
    tokens = torch.randint(0, 127, (2, 9), generator=torch.Generator().manual_seed(0))
    ((logits,),) = ranks.run(1, logits_of, [(path, sizes["vocab"])], tokens)
    assert_equal("logits", logits, Exact.of(text, lambda m: m(tokens).logits))
    config = policy_config(path, case.megatron | (mtp.MTP if predicting else {}))
    ranks.run(2, export, config, tmp_path / "exported")
    assert_same_tensors(tmp_path / "exported", path)
