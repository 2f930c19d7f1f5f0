"""What verl's PPO trainer loads of the tests by keys of its own: a sampler, a reward, and a policy
loss with a fault (`actor_rollout_ref.model.external_lib`).
"""

from __future__ import annotations

import os
from typing import Any

from verl.trainer.ppo import core_algos
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

from tests.hosts.real.verl.faults import fail_at


class InOrder(ReplayBuffer):  # type: ignore[misc]
    """verl's own sampler, whose rows come in the order in which rollouts end; here in that of
    their prompts' lengths.
    """

    def sample(self, *args: Any, **keywords: Any) -> Any:
        batch, metrics = super().sample(*args, **keywords)
        lengths = [tag["prompt_len"] for tag in batch.tags]
        assert len(set(lengths)) == len(lengths), lengths
        batch.reorder(sorted(range(len(lengths)), key=lengths.__getitem__))
        return batch, metrics


def compute_score(data_source: str, solution_str: str, ground_truth: str, **_: Any) -> float:
    """A reward that tells responses apart of a model that has learnt nothing."""
    return sum(map(ord, solution_str)) % 11 / 10


@core_algos.register_policy_loss("faulty")
def faulty_policy_loss(**keywords: Any) -> Any:
    """verl's own policy loss, up to the fault."""
    fail_at(os.environ["TESTS_FAULT"])
    return core_algos.compute_policy_loss_vanilla(**keywords)
