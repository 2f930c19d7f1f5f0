"""The driver's policy over workers of the engine over transformers' modules: what it trains, reads,
hands over and saves is what workers of Megatron-Core make of the same.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.dist.cases import fsdp_config
from tests.losses import TokenNLL
from tests.ray.policies import DP2, GBS, VOCAB, batch, config_of, opened

PACKED = {"sequence_packing": {"enabled": True, "train_mb_tokens": 32}}


def run(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    folder.mkdir()
    with opened(config) as policy:
        policy.prepare_for_training()
        steps = [policy.train(batch(seed), TokenNLL()) for seed in range(2)]
        policy.prepare_for_lp_inference()
        read = policy.get_logprobs(batch())["logprobs"]
        reference = policy.get_reference_policy_logprobs(batch())["reference_logprobs"]
        written = policy.generate({key: batch()[key] for key in ("input_ids", "input_lengths")})
        policy.prepare_for_training()
        policy.save_checkpoint(folder / "saved", folder / "saved")
        policy.export_hf(folder / "exported")
        return {"steps": steps, "read": read, "reference": reference, "written": written}


@pytest.mark.parametrize("section", ["dtensor_cfg", "fsdp_cfg"])
def test_steps_readings_and_exports_equal_those_of_megatron_core(
    checkpoint: Callable[..., Path], tmp_path: Path, section: str
) -> None:
    path = checkpoint("qwen2", vocab=VOCAB)
    common = {
        "train_global_batch_size": GBS,
        "generation": {"max_new_tokens": 6, "stop_token_ids": []},
    }
    keys = {"env_vars": {"OF_FSDP": "1"}}
    fsdp = fsdp_config(path, keys, section=section, **common, **PACKED)
    fsdp["optimizer"]["kwargs"]["weight_decay"] = 0.0
    none = {"start_weight_decay": 0.0, "end_weight_decay": 0.0}
    megatron = config_of(checkpoint, DP2, path) | PACKED
    megatron["megatron_cfg"]["optimizer"]["weight_decay"] = 0.0
    megatron["megatron_cfg"]["scheduler"] |= none
    folders = tmp_path / "fsdp", tmp_path / "megatron"
    own, other = (run(*each) for each in zip((fsdp, megatron), folders, strict=True))
    for mine, theirs in zip(own["steps"], other["steps"], strict=True):
        assert torch.allclose(mine["loss"], theirs["loss"], rtol=1e-5)
        assert torch.allclose(mine["grad_norm"], theirs["grad_norm"], rtol=1e-5)
    inside = torch.arange(own["read"].size(1)) < batch()["input_lengths"][:, None]
    for name in ("read", "reference"):
        assert torch.allclose(own[name][inside], other[name][inside], atol=1e-5, rtol=0)
    assert own["written"]["generation_lengths"].eq(6).all()
    mine, theirs = (load_file(folder / "exported" / "model.safetensors") for folder in folders)
    assert mine.keys() == theirs.keys()
    for name, weight in mine.items():
        assert torch.allclose(weight, theirs[name], atol=1e-5, rtol=0), name
