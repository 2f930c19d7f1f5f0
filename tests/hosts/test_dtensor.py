"""A driver with NeMo RL's manners and its configuration for DTensor, over workers of ours."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_policy.hosts import nemo_rl as host
from tests import oracle
from tests.hosts.driver import (
    LENGTH,
    ROWS,
    TOKENIZER,
    VOCAB,
    config_of,
    layout_of,
    standin_modules,
)
from tests.margins import check

TOLERANCE = 1e-5
"""Of losses and norms relative, and of log-probabilities absolute, after four steps in fp32."""
DTENSOR = {
    "tensor_parallel_size": 1,
    "context_parallel_size": 1,
    "sequence_parallel": False,
    "activation_checkpointing": False,
    "cpu_offload": False,
    "custom_parallel_plan": None,
    "env_vars": None,
    # Of this project: Megatron-Core leaves norms and biases out of weight decay.
    "weight_decay_of": "matrices",
}
RELEASES: dict[str, dict[str, Any]] = {
    "older": {},
    "newer": {
        "_v2": True,
        "expert_parallel_size": 1,
        "dp_replicate_size": 1,
        "clear_cache_every_n_steps": None,
        "defer_fsdp_grad_sync": True,
        "lora_cfg": {"enabled": False, "dim": 8, "match_all_linear": True},
        "moe_parallelizer": {"ignore_router_for_ac": True},
        "automodel_kwargs": {"force_hf": True, "backend": {"_target_": "x", "attn": "sdpa"}},
    },
}
"""The keys of `dtensor_cfg` that only newer releases have."""


@pytest.fixture(scope="module")
def standin(nemo_rl_standin: None, ray_instance: None) -> SimpleNamespace:
    """The stand-in's modules, with our worker in place of all of theirs."""
    host.install("all")
    return standin_modules()


@pytest.fixture(scope="module")
def path(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("qwen2", vocab=VOCAB)


def steps(standin: SimpleNamespace, release: str, config: dict[str, Any]) -> dict[str, Any]:
    """Two steps of SFT, then two of GRPO, by two data-parallel workers."""
    contract = getattr(standin.policy, release.upper())
    loss = standin.losses.LogitLoss() if release == "older" else standin.losses.LogprobLoss()
    rows = oracle.make_batch(ROWS, LENGTH, VOCAB)
    data = standin.data.BatchedDataDict(dict(rows))
    cluster = standin.cluster.RayVirtualCluster([2], use_gpus=False)
    policy = standin.policy.Policy(contract, cluster, config, TOKENIZER)
    policy.call("prepare_for_training")
    seen = {"sft": policy.train(data, loss)}
    policy.call("prepare_for_lp_inference")
    seen["logprobs"] = read = policy.get_logprobs(data)["logprobs"]
    policy.call("prepare_for_training")
    advantages = torch.randn(ROWS, 1, generator=torch.Generator().manual_seed(1))
    learnt = {"prev_logprobs": read, "advantages": advantages.expand(ROWS, LENGTH).contiguous()}
    seen["grpo"] = policy.train(standin.data.BatchedDataDict(dict(rows) | learnt), loss)
    policy.call("prepare_for_lp_inference")
    seen["after"] = policy.get_logprobs(data)["logprobs"]
    seen["info"] = policy.call("prepare_refit_info")[0]
    policy.shutdown()
    cluster.shutdown()
    return seen


@pytest.fixture(scope="module")
def megatron(standin: SimpleNamespace, path: Path) -> dict[str, Any]:
    return steps(standin, "newer", config_of(path, layout_of(), packing=True))


@pytest.mark.nightly
@pytest.mark.parametrize("release", list(RELEASES))
def test_steps_of_the_dtensor_configuration_are_those_of_megatron(
    standin: SimpleNamespace, path: Path, megatron: dict[str, Any], release: str
) -> None:
    keys = {"dtensor_cfg": DTENSOR | RELEASES[release]}
    config = config_of(path, keys, packing=release == "newer")
    found = steps(standin, release, {"megatron_cfg": {"enabled": False}} | config)
    for kind in ("sft", "grpo"):
        for name in ("loss", "grad_norm"):
            pairs = zip(found[kind][name].view(-1), megatron[kind][name].view(-1), strict=True)
            for own, other in pairs:
                check(f"{kind} {name}", abs(own.item() / other.item() - 1), TOLERANCE)
    mask = torch.arange(LENGTH) < oracle.make_batch(ROWS, LENGTH, VOCAB)["input_lengths"][:, None]
    for name in ("logprobs", "after"):
        apart = (found[name][:, :LENGTH] - megatron[name][:, :LENGTH])[mask].abs().max()
        check(name, apart.item(), TOLERANCE)
    moved = (found["after"] - found["logprobs"])[mask].abs().max()
    assert moved > 100 * TOLERANCE
    assert found["info"].keys() == megatron["info"].keys()
