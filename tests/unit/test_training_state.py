"""Optimizer state and schedule without a model: what other optimizers keep, and what is refused."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_policy.config import PolicyConfig
from megatron_policy.engines.megatron.optimizer_shards import MegatronOptimizerState
from megatron_policy.engines.megatron.trainable import MegatronTrainable
from megatron_policy.errors import CheckpointError, ConfigError
from megatron_policy.weights.load import mark_unfilled, refuse_unfilled
from tests.pure.test_config import OPTIMIZER, minimal


class FusedAdam(torch.optim.Optimizer):
    """Keeps state where Transformer Engine's does: steps are counted in the group."""

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, {"betas": (0.9, 0.99), "bias_correction": True} | settings)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if group["params"]:
                group["step"] = group["step"] + 1 if "step" in group else 1
            for p in group["params"]:
                if not self.state[p]:
                    self.state[p] = {n: torch.zeros_like(p) for n in ("exp_avg", "exp_avg_sq")}
                self.state[p]["exp_avg"].add_(p.grad)


def state_over(*inner: torch.optim.Optimizer | None) -> MegatronOptimizerState:
    """Over a chain of plain optimizers; None trains nothing."""
    leaves = [SimpleNamespace(optimizer=each) for each in inner]
    optimizer: Any = SimpleNamespace(chained_optimizers=leaves)
    return MegatronOptimizerState(optimizer, distributed=False)


def parameters(*shapes: tuple[int, ...]) -> list[torch.nn.Parameter]:
    made = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]
    for each in made:
        each.grad = torch.full_like(each, 0.5)
    return made


def test_a_fused_adam_counts_in_its_groups_and_an_empty_one_counts_nothing() -> None:
    one, two = parameters((2, 3), (5,))
    inner = FusedAdam([{"params": [one]}, {"params": []}, {"params": [two]}])
    state = state_over(None, inner)
    assert (state.step, state.tensors()) == (0, [])
    inner.step()
    assert state.step == 1 and "step" not in inner.param_groups[1]
    saved = [each.tensor.clone() for each in state.tensors()]

    fresh = FusedAdam([{"params": [one]}, {"params": []}, {"params": [two]}])
    state = state_over(None, fresh)
    state.materialize()
    assert state.step == 0
    kinds = [(each.kind, each.last - each.first) for each in state.tensors()]
    assert kinds == [(k, n) for n in (6, 5) for k in ("exp_avg", "exp_avg_sq")]
    for each, tensor in zip(state.tensors(), saved, strict=True):
        each.tensor.copy_(tensor)
    state.set_step(1)
    for both in (inner, fresh):
        both.step()
        assert [group.get("step") for group in both.param_groups] == [2, None, 2]
        assert all(torch.equal(both.state[p]["exp_avg"], p.grad + p.grad) for p in (one, two))
    state.restart()
    assert (state.step, state.tensors()) == (0, []) and "step" not in fresh.param_groups[0]


def test_unequal_counts_of_steps_are_refused_with_both_numbers() -> None:
    one, two = parameters((2,), (3,))
    first, second = torch.optim.AdamW([one]), torch.optim.AdamW([two])
    state = state_over(first, second)
    for each, counts in ((first, r"\(0, 1\)"), (second, None), (second, r"\(1, 2\)")):
        each.step()
        if counts is None:
            assert state.step == 1
            continue
        with pytest.raises(CheckpointError, match=f"different step counts {counts}"):
            _ = state.step


@pytest.mark.parametrize(
    "make", [torch.optim.Adagrad, lambda params: torch.optim.AdamW(params, amsgrad=True)]
)
def test_an_optimizer_whose_state_nobody_knows_is_refused(make: Any) -> None:
    state = state_over(make(parameters((2,))))
    for call in (state.tensors, state.materialize):
        with pytest.raises(CheckpointError, match="neither Adam nor SGD"):
            call()


def test_a_rank_that_trains_nothing_has_no_state() -> None:
    for state in (state_over(), state_over(None), state_over(torch.optim.SGD([{"params": []}]))):
        state.materialize()
        state.set_step(3)
        state.restart()
        assert (state.step, state.tensors()) == (None, [])


def scheduled(**other: Any) -> Any:
    """A schedule over two groups, one of which does not decay."""
    groups = [{"lr": 0.0, "weight_decay": 0.0, "wd_mult": mult} for mult in (1.0, 0.0)]
    optimizer: Any = SimpleNamespace(param_groups=groups)
    settings = dict(
        zip(("init_lr", "max_lr", "min_lr"), (1e-4, 1e-2, 1e-3), strict=True),
        lr_warmup_steps=8,
        lr_decay_steps=64,
        lr_decay_style="cosine",
        start_wd=0.1,
        end_wd=0.3,
        wd_incr_steps=64,
        wd_incr_style="linear",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
    scheduler = OptimizerParamScheduler(optimizer, **settings | other)
    unused: Any = None
    return MegatronTrainable((), optimizer, scheduler, *[unused] * 6)


def test_a_restored_schedule_goes_on_as_if_it_had_never_stopped() -> None:
    whole = scheduled()
    for at in range(0, 80, 8):
        saved = json.loads(json.dumps(whole.schedule_state()))
        assert saved["num_steps"] == at
        resumed = scheduled()
        resumed.scheduler.step(40)  # a policy may have trained already
        assert resumed.restore_schedule(saved) == {}
        assert resumed.optimizer.param_groups == whole.optimizer.param_groups
        for each in (whole, resumed):
            each.scheduler.step(8)
        assert resumed.optimizer.param_groups == whole.optimizer.param_groups


def test_the_configured_schedule_wins_and_what_differs_is_told() -> None:
    whole, other = scheduled(), scheduled(max_lr=5e-3, lr_decay_style="linear")
    whole.scheduler.step(24)
    differing = other.restore_schedule(whole.schedule_state())
    assert differing == {"max_lr": (1e-2, 5e-3), "lr_decay_style": ("cosine", "linear")}
    expected = scheduled(max_lr=5e-3, lr_decay_style="linear")
    expected.scheduler.step(24)
    assert other.optimizer.param_groups == expected.optimizer.param_groups


@pytest.mark.parametrize("count", [None, -1, "12", 1.5])
def test_a_schedule_that_does_not_say_where_it_is_changes_nothing(count: Any) -> None:
    trainable = scheduled()
    trainable.scheduler.step(16)
    before = trainable.schedule_state()
    with pytest.raises(CheckpointError, match="num_steps"):
        trainable.restore_schedule(before | {"num_steps": count})
    assert trainable.schedule_state() == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_element_that_nobody_filled_is_found_and_a_computed_nan_is_not(dtype: Any) -> None:
    computed = torch.tensor([0.0, float("inf")], dtype=dtype)
    computed = torch.cat([computed / 0.0, computed - computed, computed * 0.0, -(computed * 0.0)])
    assert bool(computed.isnan().any())
    refuse_unfilled([("computed", computed), ("none", torch.empty(0, dtype=dtype))])
    for place in range(15):
        tensor = torch.randn(3, 5).to(dtype)
        marked = torch.empty(1, dtype=dtype)
        mark_unfilled([(None, marked)])  # type: ignore[list-item]
        tensor.view(-1)[place] = marked[0]
        for each in (tensor, tensor.float(), tensor.t()):
            with pytest.raises(CheckpointError, match=r"into layer\.7, or not into all"):
                refuse_unfilled([("layer.6", computed), ("layer.7", each)])


@settings(max_examples=200, deadline=None)
@given(
    lr=st.sampled_from([0.0, 1e-3, 1e-2]),
    min_lr=st.sampled_from([0.0, 1e-3, 1e-2]),
    schedule=st.fixed_dictionaries(
        {
            "lr_warmup_init": st.sampled_from([0.0, 1e-3, 1e-2]),
            "lr_warmup_iters": st.integers(0, 3),
            "lr_decay_style": st.sampled_from(
                ["constant", "linear", "cosine", "inverse-square-root"]
            ),
            "weight_decay_incr_style": st.sampled_from(["constant", "linear", "cosine"]),
            "start_weight_decay": st.sampled_from([0.0, 0.1]),
            "end_weight_decay": st.sampled_from([0.0, 0.1]),
        },
        optional={"lr_decay_iters": st.integers(1, 5)},
    ),
)
def test_a_schedule_is_refused_exactly_where_megatron_core_refuses_it(
    lr: float, min_lr: float, schedule: dict[str, Any]
) -> None:
    # Without a length, only a constant schedule is taken, and gets one beyond its warm-up.
    constant = schedule["lr_decay_style"] == schedule["weight_decay_incr_style"] == "constant"
    assume("lr_decay_iters" in schedule or constant)
    raw = minimal(
        **{OPTIMIZER + "lr": lr, OPTIMIZER + "min_lr": min_lr, "megatron_cfg.scheduler": schedule}
    )
    try:
        parsed = PolicyConfig.parse(raw).megatron_cfg.scheduler
    except ConfigError:
        parsed = None
    iters = parsed.lr_decay_iters if parsed else schedule.get("lr_decay_iters", 9)
    group = {"lr": lr, "max_lr": lr, "min_lr": min_lr, "weight_decay": 0.0}
    try:
        theirs = OptimizerParamScheduler(
            SimpleNamespace(param_groups=[group]),  # type: ignore[arg-type]
            init_lr=schedule["lr_warmup_init"],
            max_lr=lr,
            min_lr=min_lr,
            lr_warmup_steps=schedule["lr_warmup_iters"],
            lr_decay_steps=iters,
            lr_decay_style=schedule["lr_decay_style"],
            start_wd=schedule["start_weight_decay"],
            end_wd=schedule["end_weight_decay"],
            wd_incr_steps=iters,
            wd_incr_style=schedule["weight_decay_incr_style"],
        )
        theirs.step(2)
    except AssertionError:
        theirs = None
    assert (parsed is None) == (theirs is None)
