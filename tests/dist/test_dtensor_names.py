"""The names of the host's DTensor worker, on a worker over transformers' own modules, and those of
the driver, on a rank's policy.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends

from megatron_policy.batch import BatchedDataDict
from megatron_policy.device.process_groups import join_process_group
from megatron_policy.memory.move_model import get_cpu_state_dict, unshard_fsdp2_model
from megatron_policy.memory.states import Kind
from megatron_policy.policy import MegatronPolicy
from megatron_policy.workers.worker import NOISE_STD, MegatronPolicyWorkerImpl
from tests import oracle
from tests.dist.cases import GLOBAL_BATCH, LOSSES, fsdp_config, open_policy, policy_config
from tests.dist.fsdp_cases import data, share
from tests.dist.layouts import LENGTH, SIZES, VOCAB
from tests.dist.shortcuts import answer
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
        assert all(torch.equal(each["whole"][name], weight) for each in (first, second))
        parts = torch.cat([first["own"][name], second["own"][name]])
        assert torch.equal(parts, weight) and first["own"][name].numel() < weight.numel()
    assert first["config"].model_type == "qwen2"
    assert first["config"].rms_norm_eps == 1e-5 != load_hf(path).config.rms_norm_eps


def move(config: dict[str, Any], calls: list[tuple[str, str, dict[str, str]]]) -> None:
    with open_policy(config) as policy:
        worker, model = worker_of(policy)
        rows = share(data(), policy)
        before = policy.logprobs(rows)
        for leave, come_back, options in calls:
            assert getattr(worker, leave)(model, **options) is model
            assert Kind.PARAMETERS not in policy.memory.state.holds
            assert getattr(worker, come_back)(model) is model
            assert Kind.PARAMETERS in policy.memory.state.holds
            assert worker.move_buffer_to_device(model, "cpu") is model
            assert torch.equal(policy.logprobs(rows), before)


def test_the_model_leaves_the_device_and_comes_back(ranks, checkpoint) -> None:
    path, to_cpu = checkpoint("qwen2", tied=True), {"device": "cpu"}
    of_fsdp2 = [("move_to_device", "move_to_cuda", to_cpu), ("move_to_cpu", "move_to_cuda", {})]
    ranks.run(2, move, fsdp_config(path, {}), of_fsdp2)
    of_fsdp1 = [("manual_offload_to_cpu", "manual_load_to_gpu", {})]
    ranks.run(2, move, fsdp_config(path, {}, section="fsdp_cfg"), of_fsdp1)


def add_noise(policy: MegatronPolicy) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    worker, _ = worker_of(policy)
    before = worker.return_state_dict()
    worker._add_noise_to_weights()
    return before, worker.return_state_dict()


@pytest.mark.parametrize("copies", [1, 2])
def test_every_weight_is_returned_and_changed_a_little_alike_on_its_copies(
    ranks, checkpoint, copies
) -> None:
    config = fsdp_config(checkpoint("qwen2", tied=False), {"dp_replicate_size": copies})
    seen = ranks.run(2, answer, config, add_noise)
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


DATA = oracle.make_batch(GLOBAL_BATCH, LENGTH, VOCAB)


def compare(config: dict[str, Any]) -> None:
    tokens = BatchedDataDict({key: DATA[key] for key in ("input_ids", "input_lengths")})
    with open_policy(config) as policy:
        policy.prepare_for_training("whatever", a_host="passes")
        policy.begin_train_step(LOSSES["token"](), mbs=1)
        policy.train_microbatch(DATA)
        policy.abort_train_step()
        policy.begin_train_step(LOSSES["token"](), mbs=1)
        policy.train_microbatch(DATA)
        assert policy.finish_train_step()["step"] == policy.steps == 1
        for name, state in (
            ("offload_before_refit", "refit"),
            ("offload_after_refit", "idle"),
            ("prepare_for_generation", "logprob"),
            ("finish_training", "logprob"),
            ("finish_inference", "idle"),
        ):
            if name == "finish_training":
                policy.prepare_for_lp_inference(keep_train_buffers=True)
            getattr(policy, name)()
            assert policy.memory.state.name == state, name
        policy.prepare_for_lp_inference()
        own = policy.logprobs(tokens)
        most = dict(
            zip(("topk_logits", "topk_indices"), policy.topk_logits(tokens, 3), strict=True)
        )
        for found, wanted in (
            (policy.get_logprobs(tokens, 2), {"logprobs": own}),
            (policy.get_entropy(tokens), {"entropy": policy.entropy(tokens)}),
            (policy.get_topk_logits(tokens, 3), most),
        ):
            assert found.keys() == wanted.keys()
            for key, value in wanted.items():
                torch.testing.assert_close(found[key], value)
        reference = policy.get_reference_policy_logprobs(tokens)["reference_logprobs"]
        with policy.use_reference_model():
            assert torch.equal(policy.logprobs(tokens), reference)
        assert not torch.equal(own, reference)
        # Arrays, and a mask in place of lengths.
        mask = torch.arange(LENGTH) < DATA["input_lengths"].unsqueeze(1)
        arrays = {"input_ids": DATA["input_ids"].numpy(), "attention_mask": mask.numpy()}
        assert torch.equal(policy.logprobs(arrays), own)
        hot = policy.logprobs(arrays, temperature=np.full(GLOBAL_BATCH, 0.7))
        assert torch.equal(hot, policy.logprobs(tokens, temperature=0.7))


def test_a_rank_answers_to_the_drivers_names(ranks, checkpoint) -> None:
    ranks.run(1, compare, policy_config(checkpoint("qwen2", **SIZES), {}))
