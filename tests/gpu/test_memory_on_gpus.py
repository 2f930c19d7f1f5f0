"""Memory states where they count: the device's memory is free for others, and comes back."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_policy import device
from megatron_policy.device import allocated, release_cached
from megatron_policy.errors import TransitionError
from megatron_policy.memory.move_model import move_to_host, move_to_own_device
from megatron_policy.memory.pinned_pool import page_locked
from megatron_policy.memory.states import IDLE, REFIT, TRAIN
from tests.dist.cases import open_policy, policy_config
from tests.dist.layouts import OVERLAPPED, SIZES
from tests.dist.test_memory_states import everything, parameters, step

WIDE = SIZES | {"hidden": 1024, "ffn": 2816}  # about 0.7 GiB with its optimizer state in fp32


def given_back(config: dict[str, Any]) -> None:
    with open_policy(config) as policy:
        step(policy)
        policy.memory.ready("this test")
        memory, before = policy.memory, [tensor.cpu() for tensor in everything(policy)]
        policy.memory.enter(TRAIN)
        full, free, ceilings = allocated(), device.memory_info().free, memory.ceilings()
        for _ in range(3):
            for state in (REFIT, IDLE):
                policy.memory.enter(state)
                managed = ceilings["train"] - ceilings[state.name]
                assert full - allocated() >= managed > 0
                assert device.memory_info().free - free >= managed // 2
            assert ceilings["idle"] == sum(memory.resident_bytes().values()) == 0
            assert all(p.untyped_storage().nbytes() < 1024 for p in parameters(policy))
            policy.memory.enter(TRAIN)
        after = [tensor.cpu() for tensor in everything(policy)]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        assert page_locked(4096).is_pinned()
        step(policy)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("megatron", [{}, OVERLAPPED], ids=["plain", "distributed optimizer"])
def test_an_idle_policy_leaves_the_gpu_to_others_and_comes_back_bit_equal(
    gpu_ranks, checkpoint, megatron: dict[str, Any], precision: str
) -> None:
    path = checkpoint("qwen2", tied=True, **WIDE)
    gpu_ranks.run(1, given_back, policy_config(path, megatron, precision=precision))


def filled_up(config: dict[str, Any]) -> None:
    """The allocator refuses memory on the way back, as on a device that others have filled."""
    with open_policy(config) as policy:
        step(policy)
        memory, before = policy.memory, [tensor.cpu() for tensor in everything(policy)]
        memory.enter(IDLE)
        release_cached()
        room = torch.cuda.memory_reserved() + memory.ceilings()["train"] // 4
        torch.cuda.set_per_process_memory_fraction(room / device.memory_info().total)
        try:
            with pytest.raises(TransitionError, match="out of memory"):
                memory.enter(TRAIN)
            assert memory.state is not TRAIN
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        memory.enter(TRAIN)
        after = [tensor.cpu() for tensor in everything(policy)]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        step(policy)


@pytest.mark.gpu
def test_a_full_gpu_stops_the_way_back_and_it_goes_on_when_there_is_room(
    gpu_ranks, checkpoint
) -> None:
    path = checkpoint("qwen2", tied=True, **WIDE)
    gpu_ranks.run(1, filled_up, policy_config(path, OVERLAPPED, precision="bfloat16"))


def moved(config: dict[str, Any]) -> None:
    with open_policy(config) as policy:
        step(policy)
        (chunk,), free = policy._engine.trainable.chunks, device.memory_info().free
        before, nbytes = (
            [p.cpu() for p in parameters(policy)],
            sum(p.nbytes for p in parameters(policy)),
        )
        assert move_to_host(policy.memory, chunk) is chunk
        assert device.memory_info().free - free >= nbytes // 2
        assert move_to_own_device(policy.memory, chunk) is chunk
        assert all(p.is_cuda for p in parameters(policy))
        after = [p.cpu() for p in parameters(policy)]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        stranger = torch.nn.Linear(1024, 1024)
        assert move_to_own_device(policy.memory, stranger).weight.is_cuda
        assert not move_to_host(policy.memory, stranger).weight.is_cuda
        step(policy)


@pytest.mark.gpu
def test_a_model_that_a_host_moves_to_its_memory_and_back_is_bit_equal(
    gpu_ranks, checkpoint
) -> None:
    path = checkpoint("qwen2", tied=True, **WIDE)
    gpu_ranks.run(1, moved, policy_config(path, precision="bfloat16", megatron={}))
