"""What each memory state permits, and what is said of it."""

from __future__ import annotations

import itertools

import pytest

from megatron_policy.errors import ConfigError
from megatron_policy.memory.states import (
    ALL,
    FORWARD,
    IDLE,
    LOGPROB,
    NOTHING,
    REFIT,
    SEND_WEIGHTS,
    STATES,
    TRAIN,
    TRAIN_STEP,
    Kind,
    MemoryState,
    check_permits,
    parse_kinds,
)

PERMITTED = {
    TRAIN: {TRAIN_STEP, FORWARD, SEND_WEIGHTS},
    LOGPROB: {FORWARD, SEND_WEIGHTS},
    REFIT: {FORWARD, SEND_WEIGHTS},
    IDLE: set(),
}
SUBSETS = [frozenset(some) for size in range(4) for some in itertools.combinations(Kind, size)]


@pytest.mark.parametrize("state", STATES, ids=lambda state: state.name)
@pytest.mark.parametrize("need", [TRAIN_STEP, FORWARD, SEND_WEIGHTS], ids=lambda need: need.call)
def test_a_state_permits_what_it_holds_and_refuses_the_rest_by_name(state, need) -> None:
    if need in PERMITTED[state]:
        check_permits(state, "probe()", need)
        return
    with pytest.raises(ConfigError) as refusal:
        check_permits(state, "probe()", need)
    said = str(refusal.value)
    assert "probe()" in said and state.name in said and f"call {need.call} first" in said


def test_the_refusal_of_training_while_idle_reads_as_a_sentence() -> None:
    with pytest.raises(ConfigError) as refusal:
        check_permits(IDLE, "train()", TRAIN_STEP)
    assert str(refusal.value) == (
        "train() needs the train state; the policy is idle (its weights are in host memory): "
        "call prepare_for_training() first"
    )


@pytest.mark.parametrize("holds", SUBSETS, ids=lambda holds: "+".join(sorted(holds)) or "none")
def test_a_state_that_nobody_named_is_known_by_what_it_holds(holds) -> None:
    state = MemoryState.of(holds)
    assert state.holds == holds
    named = {ALL: TRAIN, NOTHING: IDLE, frozenset({Kind.PARAMETERS}): LOGPROB}
    assert state == named.get(holds, MemoryState("partial", holds))
    assert all(kind in str(state) for kind in holds)


def test_an_interrupted_transition_is_no_named_state_even_when_nothing_is_whole() -> None:
    left = TRAIN.interrupted(set())
    assert left not in STATES
    assert "interrupted on the way to train" in str(left) and "nothing" in str(left)


def test_kinds_are_given_alone_or_together_and_others_are_refused_with_the_legal_ones() -> None:
    assert parse_kinds("gradients") == {Kind.GRADIENTS}
    assert parse_kinds(["optimizer", Kind.PARAMETERS]) == {Kind.OPTIMIZER, Kind.PARAMETERS}
    with pytest.raises(ConfigError, match=r"weights.*legal: parameters, gradients, optimizer"):
        parse_kinds(["weights", "optimizer"])
