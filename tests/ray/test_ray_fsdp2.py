"""The driver's policy over workers of the engine over transformers' modules: what it trains, reads,
hands over and saves is what workers of Megatron-Core make of the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron_policy import Policy
from megatron_policy.workers import RayVirtualCluster
from tests.dist.cases import fsdp_config
from tests.losses import TokenNLL
from tests.ray.policies import DP2, GBS, TOKENIZER, VOCAB, batch, config_of

PACKED = {"sequence_packing": {"enabled": True, "train_mb_tokens": 32}}


def run(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    cluster = RayVirtualCluster([2], use_gpus=False)
    policy = Policy(cluster, config, TOKENIZER)
    try:
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
    finally:
        policy.shutdown()
        cluster.shutdown()


@pytest.fixture(scope="module", params=["dtensor_cfg", "fsdp_cfg"])
def both(
    request: pytest.FixtureRequest,
    checkpoint: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[dict[str, Any], dict[str, Any], Path, Path]]:
    path = checkpoint("qwen2", vocab=VOCAB)
    common = {
        "train_global_batch_size": GBS,
        "generation": {"max_new_tokens": 6, "stop_token_ids": []},
    }
    keys = {"env_vars": {"OF_FSDP": "1"}}
    fsdp = fsdp_config(path, keys, section=request.param, **common, **PACKED)
    fsdp["optimizer"]["kwargs"]["weight_decay"] = 0.0
    none = {"start_weight_decay": 0.0, "end_weight_decay": 0.0}
    megatron = config_of(checkpoint, DP2, path) | PACKED
    megatron["megatron_cfg"]["optimizer"]["weight_decay"] = 0.0
    megatron["megatron_cfg"]["scheduler"] |= none
    own, other = tmp_path_factory.mktemp("fsdp"), tmp_path_factory.mktemp("megatron")
    yield run(fsdp, own), run(megatron, other), own, other


def test_steps_and_readings_equal_those_of_megatron_core(both) -> None:
    own, other, *_ = both
    for mine, theirs in zip(own["steps"], other["steps"], strict=True):
        assert torch.allclose(mine["loss"], theirs["loss"], rtol=1e-5)
        assert torch.allclose(mine["grad_norm"], theirs["grad_norm"], rtol=1e-5)
    inside = torch.arange(own["read"].size(1)) < batch()["input_lengths"][:, None]
    for name in ("read", "reference"):
        assert torch.allclose(own[name][inside], other[name][inside], atol=1e-5, rtol=0)
    assert own["written"]["generation_lengths"].eq(6).all()


def test_exports_equal_those_of_megatron_core(both) -> None:
    *_, own, other = both
    mine, theirs = (load_file(folder / "exported" / "model.safetensors") for folder in (own, other))
    assert mine.keys() == theirs.keys()
    for name, weight in mine.items():
        assert torch.allclose(weight, theirs[name], atol=1e-5, rtol=0), name
