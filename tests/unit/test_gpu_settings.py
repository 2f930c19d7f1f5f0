"""What Megatron-Core and torch are told on a GPU, as far as it can be told without one."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_policy.config import PolicyConfig
from megatron_policy.config.layout import topology_of
from megatron_policy.config.model_table import model_table
from megatron_policy.device import caches
from megatron_policy.engines.megatron import model_config
from megatron_policy.engines.megatron.optimizer import fuse_weight_gradients
from megatron_policy.memory import host_copies, pinned_pool
from megatron_policy.training.reference import Reference
from tests.dist.cases import policy_config
from tests.dist.layouts import layout

UNFUSED = "bias, dropout and activation are not fused"


@pytest.mark.parametrize(
    ("accelerated", "compiled", "fused"),
    [(True, True, True), (True, False, False), (False, True, False), (False, False, False)],
)
def test_what_is_compiled_is_fused_where_a_compiler_is_and_else_said(
    checkpoint: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    accelerated: bool,
    compiled: bool,
    fused: bool,
) -> None:
    monkeypatch.setattr(model_config, "is_accelerated", lambda: accelerated)
    monkeypatch.setattr(model_config, "can_compile", lambda: compiled)
    megatron = {"bias_activation_fusion": True}
    config = PolicyConfig.parse(policy_config(checkpoint("qwen2"), megatron))
    arch = model_table(config).architecture
    found = model_config._kernels(arch, config.megatron_cfg, "local")
    assert found["bias_dropout_fusion"] is found["bias_activation_fusion"] is fused
    assert (UNFUSED in caplog.text) == (accelerated and not compiled)


@pytest.mark.parametrize("accelerated", [True, False])
@pytest.mark.parametrize(("pp", "vpp"), [(1, 1), (2, 1), (2, 2)])
def test_stages_exchange_without_waiting_and_free_what_they_have_sent(
    checkpoint: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    accelerated: bool,
    pp: int,
    vpp: int,
) -> None:
    monkeypatch.setattr(model_config, "is_accelerated", lambda: accelerated)
    megatron = layout(pp, pp=pp, vpp=vpp).megatron
    config = PolicyConfig.parse(policy_config(checkpoint("qwen2"), megatron))
    topology = topology_of(config, pp)
    found = model_config._parallelism(config.megatron_cfg, topology, torch.bfloat16)
    assert found["batch_p2p_sync"] is False
    assert found["deallocate_pipeline_outputs"] == (accelerated and pp > 1)
    assert found["overlap_p2p_comm"] == (vpp > 1) != found["batch_p2p_comm"]


class FusesWeightGradients(torch.nn.Linear):
    """As Transformer Engine's linear layers are before they are told."""

    fuse_wgrad_accumulation = False


def test_layers_that_can_add_weight_gradients_to_buffers_do() -> None:
    fuses, plain = FusesWeightGradients(2, 2), torch.nn.Linear(2, 2)
    fuse_weight_gradients([torch.nn.Sequential(plain, torch.nn.Sequential(fuses))])
    assert fuses.fuse_wgrad_accumulation is True
    assert not hasattr(plain, "fuse_wgrad_accumulation")


@pytest.mark.parametrize("accelerated", [True, False])
def test_releasing_caches_drops_exported_buffers_that_nobody_opened(
    monkeypatch: pytest.MonkeyPatch, accelerated: bool
) -> None:
    """After what is unreachable, which can hold such buffers, and before their memory goes."""
    calls: list[str] = []
    monkeypatch.setattr(caches, "is_accelerated", lambda: accelerated)
    monkeypatch.setattr(gc, "collect", lambda: calls.append("cycles"))
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: calls.append("exported"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("unused"))
    caches.release_cached()
    assert calls == (["cycles", "exported", "unused"] if accelerated else [])


def test_a_reference_takes_no_more_pinned_memory_than_its_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch pins powers of two: tensor by tensor these would take almost twice their bytes."""
    asked: list[int] = []

    def allocate(nbytes: int) -> torch.Tensor:
        asked.append(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8)

    def pool(block_bytes: int) -> Any:
        return pinned_pool.PinnedMemoryPool(allocate, block_bytes=1 << 16)

    monkeypatch.setattr(host_copies, "PinnedMemoryPool", pool)
    parameters = [torch.randn((1 << 12) + 1) for _ in range(20)]
    kept = [each.clone() for each in parameters]
    frozen = Reference(parameters)
    for each in parameters:
        each.zero_()
    with frozen.active():
        assert all(map(torch.equal, parameters, kept))
    own = sum(each.nbytes for each in parameters)
    assert set(asked) == {1 << 16} and own <= sum(asked) < own + (1 << 16) + 20 * 512
    assert sum(1 << (each.nbytes - 1).bit_length() for each in parameters) > 1.9 * own
