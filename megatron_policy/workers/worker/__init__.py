"""The worker's side: the actor of one rank, a MegatronPolicy under the host's method names; each of
its base classes has the methods of one subject. Read `actor.py` first.
"""

from __future__ import annotations

from .actor import MegatronPolicyWorker, MegatronPolicyWorkerImpl

__all__ = ["MegatronPolicyWorker", "MegatronPolicyWorkerImpl"]
