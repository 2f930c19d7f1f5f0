"""The actor of one rank. Everything else in this folder works without Ray."""

from __future__ import annotations

from megatron_policy.extras import require

require("ray")

import ray  # noqa: E402

from megatron_policy.workers.worker.actor import MegatronPolicyWorkerImpl  # noqa: E402


@ray.remote
class MegatronPolicyWorker(MegatronPolicyWorkerImpl):
    """`MegatronPolicyWorkerImpl` as an actor; Ray pickles it by value, so its body is empty."""
