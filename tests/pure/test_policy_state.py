"""Every transition of a policy's state, and what those that are not legal say."""

from __future__ import annotations

import pytest

from megatron_policy.errors import CheckpointError, ConfigError
from megatron_policy.memory.policy_state import PolicyState
from megatron_policy.memory.states import (
    CONTINUE_STEP,
    EXCHANGE_WEIGHTS,
    FORWARD,
    IDLE,
    LOGPROB,
    TRAIN,
    TRAIN_STEP,
)


def test_a_new_policy_permits_everything_and_needs_no_weights() -> None:
    state = PolicyState()
    assert (state.memory, state.user, state.awaits_weights) == (TRAIN, "", False)
    for need in (TRAIN_STEP, FORWARD, EXCHANGE_WEIGHTS):
        state.check("train()", need)


def test_an_open_step_refuses_what_is_not_part_of_it_and_says_how_to_end_it() -> None:
    state = PolicyState()
    state.begin_step("begin_train_step()")
    assert state.step_open
    state.check("train_microbatch()", CONTINUE_STEP)
    state.check("logprobs()", FORWARD)
    for attempt in (
        lambda: state.check("train()", TRAIN_STEP),
        lambda: state.begin_step("begin_train_step()"),
    ):
        with pytest.raises(ConfigError, match=r"call finish_train_step\(\), or abort_train_step"):
            attempt()
    state.end_step("finish_train_step()")
    state.check("train()", TRAIN_STEP)
    with pytest.raises(ConfigError, match=r"call begin_train_step\(\) first"):
        state.end_step("finish_train_step()")


def test_a_load_that_was_not_finished_is_named_until_another_is() -> None:
    state = PolicyState(awaits_weights=True)
    state.begin_load("/checkpoints/iter_0000007")
    with pytest.raises(CheckpointError, match=r"iter_0000007 was not finished.*load_checkpoint"):
        state.check("train()", TRAIN_STEP)
    state.check("load_checkpoint()", FORWARD, repairs=True)
    state.fill()
    state.end_load()
    state.check("train()", TRAIN_STEP)
    assert not state.awaits_weights


def test_weights_in_use_are_not_taken_away() -> None:
    state = PolicyState()
    with state.in_use("the reference policy"), state.in_use("export()"):
        assert state.user == "export()"
        state.check("logprobs()", FORWARD)
        with pytest.raises(ConfigError, match=r"has to wait until export\(\) has ended"):
            state.check("train()", TRAIN_STEP)
    assert state.user == ""
    state.check("train()", TRAIN_STEP)


def test_memory_in_use_or_with_gradients_of_an_open_step_stays() -> None:
    state = PolicyState()
    with (
        state.in_use("export()"),
        pytest.raises(ConfigError, match=r"idle state while export\(\) is running.*stays in state"),
    ):
        state.check_can_enter(IDLE)
    state.begin_step("begin_train_step()")
    state.check_can_enter(TRAIN)
    with pytest.raises(ConfigError, match=r"lose gradients: .*call finish_train_step\(\)"):
        state.check_can_enter(LOGPROB)
    assert state.memory == TRAIN
    state.end_step("abort_train_step()")
    state.check_can_enter(LOGPROB)
    state.enter(IDLE)
    with pytest.raises(ConfigError, match=r"call prepare_for_training\(\) first"):
        state.check("train()", TRAIN_STEP)


def test_a_load_ends_only_after_it_has_begun() -> None:
    for end in (PolicyState().fill, PolicyState().end_load):
        with pytest.raises(AssertionError, match="no load has begun"):
            end()


def test_a_step_leaves_a_gather_until_it_is_settled() -> None:
    state = PolicyState()
    assert not state.gather_pending
    for change, steps in ((state.expect_gather, 0), (state.count_step, 1)):
        change()
        assert (state.gather_pending, state.steps) == (True, steps)
        state.settle()
        assert not state.gather_pending


def test_a_policy_that_was_shut_down_says_so_of_every_operation() -> None:
    state = PolicyState()
    state.begin_step("begin_train_step()")
    state.close()
    for operation, need in (("train()", TRAIN_STEP), ("finish_train_step()", CONTINUE_STEP)):
        with pytest.raises(ConfigError, match=rf"{operation[:-2]}\(\): .* shut down.* new one"):
            state.check(operation, need)
    with pytest.raises(ConfigError, match=r"the idle state: it was shut down, make a new one"):
        state.check_can_enter(IDLE)
