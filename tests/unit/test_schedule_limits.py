"""A schedule that Megatron-Core would refuse is refused when the configuration is read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import assume, given, settings
from hypothesis import strategies as st
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_policy.config import PolicyConfig
from megatron_policy.errors import ConfigError
from tests.pure.test_config import OPTIMIZER, minimal


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
