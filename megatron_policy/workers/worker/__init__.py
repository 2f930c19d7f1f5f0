"""The worker's side: one rank's MegatronPolicy under the host's method names; each base class has
the methods of one subject. Read `actor.py` first. Only `remote.py` needs Ray.
"""

from __future__ import annotations

from .actor import MegatronPolicyWorkerImpl

__all__ = ["MegatronPolicyWorkerImpl"]
