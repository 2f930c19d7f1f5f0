"""What verl's offload flags of an actor and its reference leave on the device between calls.

On a CPU nothing moves, but a policy's memory keeps the same states and refuses the same calls.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from verl.workers.engine import base as verls_base

from megatron_policy.hosts.verl import state
from megatron_policy.memory.states import Kind
from tests.hosts.real.verl.actor import (
    made_worker,
    old_log_probs,
    reference_log_probs,
    update,
)
from tests.hosts.real.verl.configs import Case
from tests.hosts.real.verl.rollouts import add_responses, rollouts
from tests.hosts.real.verl.worker import in_its_own_job, mine, text_of

DEVICE = "device"
"""In the place of "cuda" where verl names the device that engines move to."""
ROLES = "actor_rollout_ref"


@in_its_own_job
def offloading(case: Case, model: Path) -> dict[str, Any]:
    """What the policy holds after each of verl's calls, and what the calls returned."""
    held: dict[str, set[str]] = {}
    found: dict[str, Any] = {"held": held}
    with (
        mock.patch.object(state, "get_device_name", lambda: DEVICE),
        mock.patch.object(verls_base, "get_device_name", lambda: DEVICE),
    ):
        worker = made_worker(case, model, ROLES)
        engine = worker.actor.engine

        def after(call: str) -> None:
            held[call] = {kind.name for kind in engine.policy.memory.state.holds}

        after("init_model")
        rows = rollouts(0, "v1", temperature=0.7)
        read = text_of(engine, old_log_probs(worker, mine(worker.actor, rows)), "log_probs")
        after("compute_log_prob")
        output = reference_log_probs(worker, mine(worker.ref, rows))
        reference = text_of(worker.ref.engine, output, "log_probs")
        after("compute_ref_log_prob")
        add_responses(rows, "old_log_probs", read)
        add_responses(rows, "ref_log_prob", reference)
        update(worker, mine(worker.actor, rows))
        after("update_actor")
        asyncio.run(worker.update_weights(global_steps=1, mode="naive"))
        after("update_weights")
    found["weights"] = {key: each.numpy() for key, each in worker.rollout.received.items()}
    return found


def flags(
    parameters: bool, optimizer: bool, reference: bool, gradients: bool = False
) -> dict[str, bool]:
    return {
        f"{ROLES}.actor.engine.grad_offload": gradients,
        f"{ROLES}.actor.engine.param_offload": parameters,
        f"{ROLES}.actor.engine.optimizer_offload": optimizer,
        f"{ROLES}.ref.engine.param_offload": reference,
    }


@pytest.mark.parametrize(
    ("asked", "leaves"),
    [
        ((True, True, True), set(Kind)),
        ((True, False, True), {Kind.PARAMETERS, Kind.GRADIENTS}),
        ((False, True, False), {Kind.OPTIMIZER}),
        # Parameters stay where a role of the process wants them.
        ((True, True, False), {Kind.GRADIENTS, Kind.OPTIMIZER}),
        # Gradients alone, which verl's own engine leaves where they are.
        ((False, False, False, True), {Kind.GRADIENTS}),
    ],
)
def test_what_both_roles_offload_is_not_on_the_device_between_calls(
    verl_ranks: Any, qwen2: Path, asked: tuple[bool, ...], leaves: set[Kind]
) -> None:
    (plain,) = verl_ranks.run(1, offloading, Case(), qwen2)
    assert all(held == {kind.name for kind in Kind} for held in plain["held"].values())
    (found,) = verl_ranks.run(1, offloading, Case(overrides=flags(*asked)), qwen2)
    stays = {kind.name for kind in set(Kind) - leaves}
    assert found["held"] == dict.fromkeys(found["held"], stays)
    for name, weight in plain["weights"].items():
        assert np.array_equal(found["weights"][name], weight), name
