"""Optimizer state taken out of a policy and put into one built anew: the next step is bit-equal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_policy.engines.megatron.optimizer_shards import optimizer_shards
from megatron_policy.engines.megatron.optimizer_state import MegatronOptimizerState
from megatron_policy.engines.megatron.trainable import restore_schedule, schedule_state
from megatron_policy.interfaces.engine import KINDS, MAIN
from megatron_policy.policy import MegatronPolicy
from tests import oracle
from tests.dist.cases import GLOBAL_BATCH, LOSSES, open_policy, own_share, policy_config
from tests.dist.layouts import LAYOUTS, LENGTH, OVERLAPPED, VOCAB

SHARDED = {"optimizer": {"use_distributed_optimizer": True}}
SGD = {"optimizer": {"optimizer": "sgd", "sgd_momentum": 0.9, "lr": 1e-3}}
PLAIN = {"optimizer": {"optimizer": "sgd", "sgd_momentum": 0.0, "lr": 1e-3}}
BF16 = {"precision": "bfloat16"}
FALLING = {
    "optimizer": {"min_lr": 0.0},
    "scheduler": {"lr_decay_style": "linear", "lr_decay_iters": 6, "lr_warmup_init": 0.0}
    | {"lr_warmup_iters": 1, "end_weight_decay": 0.5, "weight_decay_incr_style": "linear"},
}
SIZES = {"layers": 2, "heads": 4, "groups": 2, "hidden": 32, "ffn": 48, "vocab": VOCAB}
ADAM = ("exp_avg", "exp_avg_sq")
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "distributed": ("DP2", SHARDED, {}, ADAM),
    "distributed bf16": ("DP2", OVERLAPPED, BF16, (MAIN, *ADAM)),
    "bf16": ("one process", {}, BF16, (MAIN, *ADAM)),
    "TP2": ("TP2", {}, {}, ADAM),
    "PP2 tied bf16": ("PP2", SHARDED, BF16, (MAIN, *ADAM)),
    "sgd with momentum": ("one process", SGD, {}, ("momentum_buffer",)),
    "sgd bf16 without momentum": ("one process", PLAIN, BF16, (MAIN,)),
    "experts with frozen routers": (
        "DP2",
        OVERLAPPED | {"freeze_moe_router": True},
        BF16,
        (MAIN, *ADAM),
    ),
}


@pytest.fixture
def config_of(checkpoint: Callable[..., Path]) -> Callable[[str], tuple[int, dict[str, Any]]]:
    """World size and config of a case."""

    def of(name: str) -> tuple[int, dict[str, Any]]:
        layout, megatron, top, _ = CASES[name]
        family = "deepseek_v3" if "experts" in name else "qwen2"
        path = checkpoint(family, tied="experts" not in name, **SIZES)
        section = {
            key: {**FALLING.get(key, {}), **value} if isinstance(value, dict) else value
            for key, value in {**FALLING, **LAYOUTS[layout].megatron, **megatron}.items()
        }
        return LAYOUTS[layout].world, policy_config(path, section, **top)

    return of


def state_of(policy: MegatronPolicy) -> MegatronOptimizerState:
    policy.memory.ready("the test")
    return MegatronOptimizerState(policy._engine.trainable)


def step(policy: MegatronPolicy, seed: int) -> dict[str, Any]:
    """What a step on these data comes to, and all that it leaves."""
    data = own_share(policy, oracle.make_batch(GLOBAL_BATCH, LENGTH, VOCAB, seed=seed))
    result = policy.train(data, LOSSES["token"](), mbs=1)
    state, trainable = state_of(policy), policy._engine.trainable
    return {
        "numbers": [result["loss"], result["grad_norm"]],
        "tensors": [each.tensor.clone() for each in state.tensors()],
        "ranges": [(each.kind, each.first, each.last) for each in state.tensors()],
        "weights": {name: p.detach().clone() for name, p in policy.named_parameters()},
        "count": state.step,
        "schedule": schedule_state(trainable),
        "rates": [(g["lr"], g["weight_decay"]) for g in trainable.optimizer.param_groups],
        "inside": inside(policy),
    }


def inside(policy: MegatronPolicy) -> list[Any]:
    """Name, dtype, device, shape and strides of all that the innermost optimizers keep."""
    whole = policy._engine.trainable.optimizer
    return [
        [(n, v.dtype, v.device, v.shape, v.stride()) for n, v in sorted(each.items())]
        for part in whole.chained_optimizers
        if part.optimizer is not None
        for group in part.optimizer.param_groups
        for each in (part.optimizer.state[main] for main in group["params"])
    ]


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for key in one.keys() - {"numbers", "tensors", "weights"}:
        assert one[key] == other[key], key
    assert one["weights"].keys() == other["weights"].keys()
    pairs = [*zip(one["numbers"], other["numbers"], strict=True)]
    pairs += zip(one["tensors"], other["tensors"], strict=True)
    pairs += [(each, other["weights"][name]) for name, each in one["weights"].items()]
    assert all(torch.equal(a, b) for a, b in pairs)


@torch.no_grad()
def scramble(policy: MegatronPolicy, state: MegatronOptimizerState) -> None:
    generator = torch.Generator().manual_seed(policy.rank)
    for tensor in (
        *(p for _, p in policy.named_parameters()),
        *(t.tensor for t in state.tensors()),
    ):
        tensor.copy_(torch.rand(tensor.shape, generator=generator))


def kinds_of(state: MegatronOptimizerState) -> tuple[str, ...]:
    there = {each.kind for each in state.tensors()}
    return tuple(kind for kind in KINDS if kind in there)


@torch.no_grad()
def publish(policy: MegatronPolicy, state: MegatronOptimizerState) -> None:
    """Round main parameters to the model's, as after a step."""
    trainable = policy._session.trainable
    for each in optimizer_shards(trainable.optimizer):
        if each.separate:
            each.own.copy_(each.main.view(-1))
    for chunk in trainable.chunks if state.distributed else ():
        chunk.start_param_sync(force_sync=True)


@torch.no_grad()
def put_back(policy: MegatronPolicy, saved: dict[str, Any]) -> None:
    """As little as will do: of weights that are trained only what no main parameter and no other
    rank can give.
    """
    state = state_of(policy)
    state.materialize()
    assert inside(policy) == saved["inside"], "moments are not as the optimizer makes them"
    scramble(policy, state)
    names = {id(p): name for name, p in policy.named_parameters()}
    mains = MAIN in kinds_of(state)
    for name, parameter in policy.named_parameters():
        if not (parameter.requires_grad and (mains or state.distributed)):
            parameter.data.copy_(saved["weights"][name])
    for each, tensor in zip(state.tensors(), saved["tensors"], strict=True):
        each.tensor.copy_(tensor)
        if not mains:
            weight = saved["weights"][names[id(each.parameter)]]
            own = slice(each.first, each.last)
            each.parameter.view(-1)[own] = weight.view(-1)[own]
    publish(policy, state)
    for name, parameter in policy.named_parameters():
        assert torch.equal(parameter, saved["weights"][name]), f"{name} was not published"
    if saved["count"] is not None:
        assert state.step == 0
        state.set_step(saved["count"])
    assert restore_schedule(policy._engine.trainable, saved["schedule"]) == {}


Ranges = list[tuple[tuple[Any, ...], int, tuple[int, int]]]


def taken_over(config: dict[str, Any], kinds: tuple[str, ...], count: int | None) -> Ranges:
    """Asserts, on a rank, that a policy built anew goes on as the one whose state it was given.

    Returns of each tensor of state whose it is, the size of that, and its range.
    """
    with open_policy(config, init_reference_model=False) as policy:
        state = state_of(policy)
        assert {each.kind for each in state.tensors()} == {MAIN} & set(kinds)
        assert state.step == (0 if count else None)
        step(policy, seed=1)
        saved = step(policy, seed=2)
        assert saved["count"] == count
        assert kinds_of(state) == kinds
        at, names = policy.coords, {id(p): name for name, p in policy.named_parameters()}
        ranges: Ranges = []
        for each in state.tensors():
            key = (at.tp, at.pp, names[id(each.parameter)], each.kind)
            ranges.append((key, each.parameter.numel(), (each.first, each.last)))
        expected = step(policy, seed=3)
    with open_policy(config, init_reference_model=False) as policy:
        put_back(policy, saved)
        assert_same(step(policy, seed=3), expected)
        starts_over(state_of(policy), kinds)
    return ranges


def starts_over(state: MegatronOptimizerState, kinds: tuple[str, ...]) -> None:
    for each in state.tensors():
        each.tensor.fill_(7.0)
    state.restart()
    assert {each.kind for each in state.tensors()} == {MAIN} & set(kinds)
    for each in state.tensors():
        assert torch.equal(each.tensor, each.parameter.view(-1)[each.first : each.last].float())
    assert not state.step


@pytest.mark.parametrize("name", CASES)
def test_a_policy_that_is_given_the_state_of_another_goes_on_bit_equal(
    ranks, config_of, name: str
) -> None:
    world, config = config_of(name)
    kinds = CASES[name][-1]
    found: dict[tuple[Any, ...], list[tuple[int, int]]] = {}
    sizes: dict[tuple[Any, ...], int] = {}
    for held in ranks.run(world, taken_over, config, kinds, 2 if kinds[-1] in ADAM else None):
        for key, size, own in held:
            found.setdefault(key, []).append(own)
            sizes[key] = size
    assert {kind for *_, kind in found} == set(kinds)
    assert not any("router" in parameter for _, _, parameter, _ in found), "frozen, yet trained"
    for key, ranges in found.items():
        if config["megatron_cfg"]["optimizer"]["use_distributed_optimizer"]:
            edges = [edge for own in sorted(ranges) for edge in own]
            assert edges[0] == 0 and edges[-1] == sizes[key], key
            assert edges[1:-1:2] == edges[2:-1:2], f"{key} is not tiled: {ranges}"
        else:
            assert set(ranges) == {(0, sizes[key])}, key
