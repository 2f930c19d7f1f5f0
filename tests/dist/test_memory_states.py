"""Weights, gradients and optimizer state that leave for the host between steps, and come back as if
they had never gone.

On the CPU there is nothing to gain by it; told to move nevertheless, the same code empties and
refills storages of host memory.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_policy.engines.hugging_face.table import local_part
from megatron_policy.errors import ConfigError, TransitionError
from megatron_policy.memory.device_memory import DeviceMemory
from megatron_policy.memory.move_model import move_buffers, move_to_device, move_to_own_device
from megatron_policy.memory.pinned_pool import PinnedMemoryPool
from megatron_policy.memory.states import (
    ALL,
    IDLE,
    LOGPROB,
    NOTHING,
    REFIT,
    SEND_WEIGHTS,
    TRAIN,
    Kind,
    MemoryState,
)
from megatron_policy.policy import MegatronPolicy
from tests import oracle
from tests.dist.cases import GLOBAL_BATCH, LOSSES, open_policy, own_share, policy_config
from tests.dist.layouts import (
    FSDP1_LAYOUTS,
    FSDP2_LAYOUTS,
    FSDP2_TENSOR_LAYOUTS,
    LENGTH,
    OVERLAPPED,
    SIZES,
    VOCAB,
)
from tests.dist.layouts import LAYOUTS as MEGATRON_LAYOUTS
from tests.dist.resuming import modules, optimizers

LAYOUTS = MEGATRON_LAYOUTS | FSDP2_LAYOUTS | FSDP2_TENSOR_LAYOUTS | FSDP1_LAYOUTS
SHARDED = {"optimizer": {"use_distributed_optimizer": True}}
BF16 = {"precision": "bfloat16"}
SMALL = 1024
LORA = {"enabled": True, "dim": 8, "alpha": 16.0}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "one process": ("one process", {}, {}),
    "TP2": ("TP2", {}, {}),
    "PP2xVPP2": ("PP2xVPP2", {}, {}),
    "distributed optimizer": ("DP2", SHARDED, {}),
    "distributed optimizer, overlapped": ("DP2", OVERLAPPED, {}),
    "distributed fp32 main parameters": ("DP2", OVERLAPPED, BF16),
    "experts": ("DP2", OVERLAPPED, {}),
    "adapters": ("PP2xVPP2", {"peft": LORA}, BF16),
    "adapters, distributed, overlapped": ("DP2", OVERLAPPED | {"peft": LORA}, {}),
    "FSDP2 x 2": ("FSDP2 x 2", {}, {}),
    "FSDP2 TP2 x 2": ("FSDP2 TP2 x 2", {}, {}),
    "FSDP2 2x2 copies, bf16": ("FSDP2 2x2 copies", {}, BF16),
    "FSDP1 x 2, gradients, bf16": ("FSDP1 x 2, gradients", {}, BF16),
}
EVERYWHERE: tuple[MemoryState, ...] = (
    *(TRAIN, LOGPROB, TRAIN, REFIT, TRAIN, IDLE, TRAIN, LOGPROB),
    *(REFIT, LOGPROB, IDLE, LOGPROB, IDLE, REFIT, IDLE, TRAIN),
)
"""From every state to every other one."""


@pytest.fixture
def config_of(checkpoint: Callable[..., Path]) -> Callable[[str], tuple[int, dict[str, Any]]]:
    """World size and config of a case."""

    def of(name: str) -> tuple[int, dict[str, Any]]:
        layout, megatron, top = CASES[name]
        family = {"experts": "qwen3_moe"}.get(name, "qwen2")
        path = checkpoint(family, tied=name != "experts", **SIZES)
        return LAYOUTS[layout].world, policy_config(
            path, LAYOUTS[layout].megatron | megatron, **top
        )

    return of


def memory_of(policy: MegatronPolicy, **options: Any) -> DeviceMemory:
    """The policy's memory from now on: one that really moves."""
    policy.memory = DeviceMemory(
        policy._engine, policy._session.state, **({"move": True} | options)
    )
    return policy.memory


def step(policy: MegatronPolicy) -> dict[str, Any]:
    data = own_share(policy, oracle.make_batch(GLOBAL_BATCH, LENGTH, VOCAB))
    return policy.train(data, LOSSES["token"](), mbs=1)


def read(policy: MegatronPolicy) -> torch.Tensor:
    data = own_share(policy, oracle.make_batch(GLOBAL_BATCH, LENGTH, VOCAB))
    return policy.logprobs(data)


def optimizer_tensors(policy: MegatronPolicy) -> list[torch.Tensor]:
    """Main parameters and moments."""
    inner = optimizers(policy)
    mains = [p for each in inner for group in each.param_groups for p in group["params"]]
    moments = [
        value
        for each in inner
        for state in each.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]
    return [local_part(tensor) for tensor in mains + moments]


def parameters(policy: MegatronPolicy) -> list[torch.Tensor]:
    return [local_part(p) for model in modules(policy) for p in model.parameters()]


def gradients(policy: MegatronPolicy) -> list[torch.Tensor]:
    """The buffers of Megatron-Core, or what FSDP has left of a step."""
    if not policy.config.megatron_cfg.enabled:
        (model,) = modules(policy)
        return [local_part(p.grad) for p in model.parameters() if p.grad is not None]
    chunks = policy._engine.trainable.chunks
    return [each.grad_data for c in chunks for each in (*c.buffers, *c.expert_parallel_buffers)]


def everything(policy: MegatronPolicy) -> list[torch.Tensor]:
    held = [*parameters(policy), *optimizer_tensors(policy)]
    return [tensor.detach().clone() for tensor in held]


def on_device(tensors: list[torch.Tensor]) -> dict[int, int]:
    """Bytes of each storage, without the small ones, by the address of its first tensor."""
    sizes = {id(t): t.untyped_storage().nbytes() for t in tensors}
    return {key: size for key, size in sizes.items() if size >= SMALL}


def assert_sizes(policy: MegatronPolicy) -> None:
    """Storages are empty or full as each state says."""
    memory = policy.memory
    policy._engine.trainable.zero_gradients()
    groups = {
        Kind.PARAMETERS: parameters(policy),
        Kind.GRADIENTS: gradients(policy),
        Kind.OPTIMIZER: optimizer_tensors(policy),
    }
    if not policy.config.megatron_cfg.enabled:
        assert groups.pop(Kind.GRADIENTS) == [], "it has no buffers of gradients"
    theirs = {tensor.untyped_storage().data_ptr() for tensor in groups[Kind.PARAMETERS]}
    groups[Kind.OPTIMIZER] = [
        t for t in groups[Kind.OPTIMIZER] if t.untyped_storage().data_ptr() not in theirs
    ]
    full = {kind: on_device(tensors) for kind, tensors in groups.items()}
    assert all(full.values())
    ceilings = memory.ceilings()
    for state in (REFIT, IDLE, LOGPROB, TRAIN, IDLE, TRAIN):
        memory.enter(state)
        assert memory.state is state
        for kind, tensors in groups.items():
            here = full[kind] if kind in state.holds else {}
            assert on_device(tensors) == here, (state, kind)
            assert bool(memory.resident_bytes()[kind]) == (kind in state.holds)
        assert sum(memory.resident_bytes().values()) == ceilings[state.name]
        assert memory.ceilings() == ceilings
    assert not any(bool(each.any()) for each in gradients(policy))
    assert ceilings["idle"] == 0 < ceilings["logprob"] == ceilings["refit"] < ceilings["train"]


def travelled(config: dict[str, Any], route: tuple[MemoryState, ...]) -> dict[str, Any]:
    """Two steps, each after that route through the states, and what came of them."""
    with open_policy(config) as policy:
        memory_of(policy)
        seen: dict[str, Any] = {"losses": [], "logprobs": []}
        for _ in range(2):
            for state in route:
                policy.memory.enter(state)
            seen["losses"].append(step(policy))
            seen["logprobs"].append(read(policy))
        seen["tensors"] = everything(policy)
        assert_sizes(policy)
        return seen


def assert_bit_equal(moved: dict[str, Any], still: dict[str, Any]) -> None:
    for a, b in zip(moved["losses"], still["losses"], strict=True):
        assert torch.equal(a["loss"], b["loss"])
        assert torch.equal(a["grad_norm"], b["grad_norm"])
    for kind in ("logprobs", "tensors"):
        assert same(moved[kind], still[kind]), kind


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_states_hold_what_they_say_and_training_after_every_route_is_bit_equal_to_staying(
    ranks, config_of, name: str
) -> None:
    world, config = config_of(name)
    stayed = ranks.run(world, travelled, config, ())
    losses = [each["loss"].item() for each in stayed[0]["losses"]]
    assert len(set(losses)) == len(losses), "the steps change nothing: there is nothing to lose"
    for moved, still in zip(ranks.run(world, travelled, config, EVERYWHERE), stayed, strict=True):
        assert_bit_equal(moved, still)


def addresses(policy: MegatronPolicy) -> list[int]:
    """Of all that is in place; 0 of what is not."""
    held = (*parameters(policy), *gradients(policy), *optimizer_tensors(policy))
    return [tensor.untyped_storage().data_ptr() for tensor in held]


def repeat_every_transition(config: dict[str, Any]) -> None:
    blocks: list[torch.Tensor] = []

    def allocate(nbytes: int) -> torch.Tensor:
        blocks.append(torch.empty(nbytes, dtype=torch.uint8))
        return blocks[-1]

    with open_policy(config) as policy:
        memory = memory_of(policy, pool=lambda: PinnedMemoryPool(allocate, 1 << 16))
        step(policy)
        policy.memory.enter(IDLE)
        made, kept = len(blocks), memory.host_bytes
        mains = [p for o in optimizers(policy) for group in o.param_groups for p in group["params"]]
        assert all(main.grad is None for main in mains), "gradients beside the buffers stay"
        assert made > 2 and kept == made << 16
        for _ in range(5):
            for state in (IDLE, LOGPROB, LOGPROB, REFIT, REFIT, TRAIN, TRAIN, IDLE):
                policy.memory.enter(state)
                before = addresses(policy)
                policy.memory.enter(state)
                assert addresses(policy) == before
        assert len(blocks) == made and memory.host_bytes == kept
        policy.memory.enter(TRAIN)
        step(policy)


class Limited:
    """Gives storages memory until the budget of calls is spent; None is without end."""

    def __init__(self) -> None:
        self.left: int | None = None

    def __call__(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        if self.left == 0:
            raise torch.OutOfMemoryError("no device memory")
        self.left = None if self.left is None else self.left - 1
        storage.resize_(nbytes)


def short_of_room(config: dict[str, Any], fail: bool) -> dict[str, Any]:
    """Two steps; with `fail` what is between them fails on both sides at every storage."""
    with open_policy(config) as policy:
        resize, seen = Limited(), {"losses": [step(policy)], "states": set()}
        memory = memory_of(policy, resize=resize)
        for room in range(200 if fail else 0):
            policy.memory.enter(IDLE)
            resize.left = room
            try:
                policy.memory.enter(TRAIN)
                break
            except TransitionError as error:
                assert str(memory.state) in str(error) and "no device memory" in str(error)
            assert "interrupted on the way to train" in memory.state.name
            seen["states"].add(memory.state.holds)
            with pytest.raises(ConfigError, match=r"train\(\).*interrupted.*prepare_for_training"):
                step(policy)
            if room % 2:
                resize.left = None
                policy.memory.enter(TRAIN)  # the repeat
                resize.left = room
        else:
            assert not fail, "it has never had enough room"
        assert memory.state is TRAIN
        seen["losses"].append(step(policy))
        seen["logprobs"], seen["tensors"] = [read(policy)], everything(policy)
        return seen


@pytest.mark.parametrize("name", ["one process", "distributed fp32 main parameters"])
def test_a_way_back_without_room_leaves_a_named_state_and_its_repeat_succeeds(
    ranks, config_of, name: str
) -> None:
    world, config = config_of(name)
    failed = ranks.run(world, short_of_room, config, True)
    for moved, still in zip(failed, ranks.run(world, short_of_room, config, False), strict=True):
        assert_bit_equal(moved, still)
        whole = {Kind.PARAMETERS}, {Kind.PARAMETERS, Kind.GRADIENTS}
        assert {NOTHING, *map(frozenset, whole)} == moved["states"]


def one_without_room(config: dict[str, Any]) -> str:
    """Rank 1 has no room for what comes back; what this rank hears of it."""
    with open_policy(config) as policy:
        step(policy)
        before, resize = everything(policy), Limited()
        memory = memory_of(policy, resize=resize, agree=policy._session._agree)
        policy.memory.enter(IDLE)
        resize.left = 0 if policy.rank == 1 else None
        with pytest.raises(TransitionError) as error:
            policy.memory.enter(TRAIN)
        assert (memory.state is TRAIN) == (policy.rank != 1)
        resize.left = None
        policy.memory.enter(TRAIN)
        assert memory.state is TRAIN
        assert same(everything(policy), before)
        step(policy)
        return str(error.value)


def test_a_rank_without_room_stops_all_and_the_repeat_brings_all_there(ranks, config_of) -> None:
    for said in ranks.run(2, one_without_room, config_of("distributed optimizer")[1]):
        assert "rank 1" in said and "no device memory" in said
        assert "interrupted on the way to train" in said


def move_kinds_by_themselves(config: dict[str, Any]) -> None:
    with open_policy(config) as policy:
        memory = memory_of(policy)
        step(policy)
        read(policy)
        expected = [each.clone() for each in gradients(policy)]
        assert any(bool(each.any()) for each in expected)

        policy.memory.onload(Kind.PARAMETERS)
        assert memory.state is TRAIN
        policy.memory.offload("parameters")
        assert memory.state == MemoryState("partial", frozenset({Kind.GRADIENTS, Kind.OPTIMIZER}))
        with pytest.raises(ConfigError, match=r"partial.*gradients, optimizer.*lp_inference"):
            read(policy)
        policy.memory.onload(Kind.PARAMETERS)
        assert same(gradients(policy), expected)

        policy.memory.offload(["optimizer", "gradients"])
        assert memory.state is LOGPROB
        policy.memory.offload("parameters")
        assert memory.state is IDLE
        policy.memory.onload(Kind.PARAMETERS)
        assert memory.state is LOGPROB
        policy.memory.onload(("optimizer", "gradients"))
        assert memory.state is TRAIN and memory.state.holds == ALL
        with pytest.raises(ConfigError, match="weights cannot be moved"):
            policy.memory.onload("weights")
        step(policy)


@pytest.mark.parametrize(
    ("act", "name"),
    [
        pytest.param(repeat_every_transition, "one process", marks=pytest.mark.daily),
        (repeat_every_transition, "distributed fp32 main parameters"),
        pytest.param(move_kinds_by_themselves, "one process", marks=pytest.mark.daily),
        (move_kinds_by_themselves, "distributed optimizer, overlapped"),
    ],
)
def test_a_repeat_does_nothing_and_kinds_that_move_by_themselves_keep_their_content(
    ranks, config_of, act: Callable[..., None], name: str
) -> None:
    world, config = config_of(name)
    ranks.run(world, act, config)


def go_out_without_host_memory(config: dict[str, Any]) -> None:
    with open_policy(config) as policy:
        step(policy)
        before, blocks = everything(policy), [True]

        def allocate(nbytes: int) -> torch.Tensor:
            if not blocks:
                raise RuntimeError("no host memory")
            blocks.pop()
            return torch.empty(nbytes, dtype=torch.uint8)

        memory = memory_of(policy, pool=lambda: PinnedMemoryPool(allocate, 1 << 16))
        with pytest.raises(TransitionError, match="could not go to the idle state: no host memory"):
            policy.memory.enter(IDLE)
        assert memory.state.holds == {Kind.PARAMETERS}
        read(policy)
        policy.memory.enter(TRAIN)
        assert same(everything(policy), before)
        with pytest.raises(TransitionError, match="no host memory"):
            policy.memory.enter(IDLE)
        blocks += [True] * 100
        policy.memory.enter(IDLE)
        assert sum(memory.resident_bytes().values()) == 0
        policy.memory.enter(TRAIN)
        assert same(everything(policy), before)


def stay_while_the_reference_is_active(config: dict[str, Any]) -> None:
    with open_policy(config) as policy:
        memory = memory_of(policy)
        own = everything(policy)
        moves: list[Callable[[], None]] = [
            lambda: policy.memory.enter(IDLE),
            lambda: policy.memory.offload("optimizer"),
            lambda: policy.memory.onload("parameters"),
        ]
        with policy.reference():
            for move in moves:
                with pytest.raises(ConfigError, match="while the reference policy is running"):
                    move()
            assert memory.state is TRAIN
        policy.memory.enter(LOGPROB)
        with policy.reference():
            read(policy)
        policy.memory.enter(TRAIN)
        assert same(everything(policy), own)


def free_gradients_alone_on_the_cpu(config: dict[str, Any]) -> None:
    with open_policy(config) as policy:
        memory = memory_of(policy, move=None)
        step(policy)
        addresses = [t.data_ptr() for t in (*parameters(policy), *optimizer_tensors(policy))]
        for state in (REFIT, IDLE):
            policy.memory.enter(state)
            with pytest.raises(ConfigError, match=rf"train\(\).*{state.name}"):
                step(policy)
            assert not on_device(gradients(policy)) and memory.host_bytes == 0
            now = [t.data_ptr() for t in (*parameters(policy), *optimizer_tensors(policy))]
            assert now == addresses
        ceilings = memory.ceilings()
        assert ceilings["idle"] == ceilings["logprob"] < ceilings["train"]
        policy.memory.enter(TRAIN)
        step(policy)


def move_a_chunk_by_the_name_of_a_device(config: dict[str, Any]) -> None:
    with open_policy(config) as policy:
        memory = memory_of(policy)
        (chunk,), (model,) = policy._engine.trainable.chunks, policy._engine.pipeline.models
        assert move_to_device(memory, chunk, "cpu") is chunk
        assert memory.state.holds == {Kind.GRADIENTS, Kind.OPTIMIZER}
        assert not on_device(parameters(policy))
        assert move_buffers(memory, model, "cpu") is model
        assert move_to_own_device(memory, model) is model and memory.state is TRAIN
        stranger = torch.nn.BatchNorm1d(3)
        assert move_buffers(memory, stranger, "meta").running_mean.device.type == "meta"
        assert stranger.weight.device.type == "cpu"
        assert move_to_device(memory, stranger, "meta").weight.device.type == "meta"
        assert memory.state is TRAIN
        step(policy)


def stay_while_an_iterator_is_half_read(config: dict[str, Any]) -> None:
    with open_policy(config) as policy:
        memory = memory_of(policy)
        weights = memory.during("export()", SEND_WEIGHTS, policy.named_parameters())
        policy.memory.enter(TRAIN)
        name, _ = next(weights)
        with pytest.raises(ConfigError, match=r"while export\(\) is running"):
            policy.memory.enter(IDLE)
        rest = [name, *(name for name, _ in weights)]
        assert rest == [name for name, _ in policy.named_parameters()]
        late = memory.during("export()", SEND_WEIGHTS, policy.named_parameters())
        policy.memory.enter(IDLE)
        with pytest.raises(ConfigError, match=r"export\(\) needs the weights.*idle"):
            next(late)


def move_weights_without_an_optimizer(config: dict[str, Any]) -> None:
    with open_policy(config, init_optimizer=False) as policy:
        memory = memory_of(policy)
        before = read(policy)
        for state in (TRAIN, IDLE, REFIT, IDLE, LOGPROB):
            policy.memory.enter(state)
        assert torch.equal(read(policy), before)
        assert memory.ceilings()["train"] == memory.ceilings()["logprob"] > 0


@pytest.mark.daily
@pytest.mark.parametrize(
    "act",
    [
        go_out_without_host_memory,
        stay_while_the_reference_is_active,
        free_gradients_alone_on_the_cpu,
        move_a_chunk_by_the_name_of_a_device,
        stay_while_an_iterator_is_half_read,
        move_weights_without_an_optimizer,
    ],
)
def test_one_process_does_what_its_states_allow(ranks, config_of, act: Callable[..., None]) -> None:
    ranks.run(1, act, config_of("one process")[1])
