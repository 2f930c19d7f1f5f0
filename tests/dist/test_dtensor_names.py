"""The names of the host's DTensor worker, on a worker over transformers' own modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends

from megatron_policy.device.process_groups import join_process_group
from megatron_policy.memory.move_model import get_cpu_state_dict, unshard_fsdp2_model
from megatron_policy.memory.states import Kind
from megatron_policy.workers.worker import MegatronPolicyWorkerImpl
from megatron_policy.workers.worker.actor import NOISE_STD
from tests.dist.cases import fsdp_config, open_policy
from tests.dist.fsdp_cases import data, share
from tests.exact import load_hf


def worker_of(policy: Any) -> tuple[MegatronPolicyWorkerImpl, torch.nn.Module]:
    """A worker with this policy, and the module that FSDP2 has sharded, above transformers' own."""
    worker = object.__new__(MegatronPolicyWorkerImpl)
    worker.policy = policy
    layers = [layer for _, layer in policy.decoder_layers()]
    model = policy._engine.decoder
    assert any(module is layers[0] for module in model.modules())
    return worker, model


def read_whole(config: dict[str, Any]) -> dict[str, Any]:
    with open_policy(config, init_reference_model=False) as policy:
        worker, model = worker_of(policy)
        rows = share(data(), policy)
        before = policy.logprobs(rows)
        own = get_cpu_state_dict(model.model.state_dict().items())
        pinned = get_cpu_state_dict(model.model.state_dict().items(), pin_memory=True)
        with unshard_fsdp2_model(model):
            whole = {name: p.detach().clone() for name, p in model.model.named_parameters()}
        assert torch.equal(policy.logprobs(rows), before)
        assert all(torch.equal(own[name], pinned[name]) for name in own)
        return {"own": own, "whole": whole, "config": worker.return_model_config()}


def test_a_sharded_model_is_whole_within_a_context_and_its_parts_are_copied(
    ranks, checkpoint
) -> None:
    path = checkpoint("qwen2", tied=True)
    config = fsdp_config(path, {}, hf_config_overrides={"rms_norm_eps": 1e-5})
    first, second = ranks.run(2, read_whole, config)
    for name, weight in load_hf(path).named_parameters():
        assert torch.equal(first["whole"][name], weight) and torch.equal(
            second["whole"][name], weight
        )
        parts = torch.cat([first["own"][name], second["own"][name]])
        assert torch.equal(parts, weight) and first["own"][name].numel() < weight.numel()
    assert first["config"].model_type == "qwen2"
    assert first["config"].rms_norm_eps == 1e-5 != load_hf(path).config.rms_norm_eps


def moved(config: dict[str, Any]) -> None:
    with open_policy(config) as policy:
        worker, model = worker_of(policy)
        rows = share(data(), policy)
        before = policy.logprobs(rows)
        for there, back in (
            (lambda: worker.move_to_device(model, "cpu"), lambda: worker.move_to_cuda(model)),
            (lambda: worker.move_to_cpu(model), lambda: worker.move_to_cuda(model)),
        ):
            assert there() is model
            assert Kind.PARAMETERS not in policy.memory.state.holds
            assert back() is model
            assert Kind.PARAMETERS in policy.memory.state.holds
            assert worker.move_buffer_to_device(model, "cpu") is model
            assert torch.equal(policy.logprobs(rows), before)


def test_the_model_leaves_the_device_and_comes_back(ranks, checkpoint) -> None:
    ranks.run(2, moved, fsdp_config(checkpoint("qwen2", tied=True), {}))


def noisy(config: dict[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    with open_policy(config, init_optimizer=False, init_reference_model=False) as policy:
        worker, _ = worker_of(policy)
        before = worker.return_state_dict()
        worker._add_noise_to_weights()
        return before, worker.return_state_dict()


@pytest.mark.parametrize("copies", [1, 2])
def test_every_weight_is_returned_and_changed_a_little_alike_on_its_copies(
    ranks, checkpoint, copies
) -> None:
    config = fsdp_config(checkpoint("qwen2", tied=False), {"dp_replicate_size": copies})
    seen = ranks.run(2, noisy, config)
    for before, after in seen:
        assert before.keys() == after.keys() and len(before) > 10
        for name, weight in after.items():
            apart = (weight - before[name]).abs()
            assert not weight.numel() or 0 < apart.max() < 10 * NOISE_STD, name
    if copies == 2:
        (_, first), (_, second) = seen
        assert all(torch.equal(first[name], second[name]) for name in first)


def split() -> dict[str, Any]:
    join_process_group()
    worker, length = MegatronPolicyWorkerImpl, 8
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    tokens, kept = torch.arange(length).view(1, -1), torch.arange(length).view(1, -1)
    context = worker.create_context_parallel_ctx(mesh, [tokens, kept], [1, 1], {kept}, "allgather")
    with worker.train_context(context):
        inside, kernels = tokens.clone(), {each.name for each in _cur_sdpa_kernel_backends()}
    with worker.train_context():
        assert SDPBackend.MATH in _cur_sdpa_kernel_backends()
    return {"inside": inside, "after": tokens, "kept": kept, "kernels": kernels}


def test_buffers_are_split_within_a_context_of_torchs_context_parallelism(ranks) -> None:
    seen = ranks.run(2, split)
    own = [set(each["inside"].flatten().tolist()) for each in seen]
    assert own[0] | own[1] == set(range(8)) and not own[0] & own[1]
    for each in seen:
        assert torch.equal(each["after"], torch.arange(8).view(1, -1))
        assert torch.equal(each["kept"], each["inside"])
        assert "MATH" not in each["kernels"]
        assert "FLASH_ATTENTION" in each["kernels"]
