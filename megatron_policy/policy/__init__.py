"""One policy object per rank: train, score, generate, refit, save, load. Read `policy.py` first,
then `session.py`.
"""

from megatron_policy.policy.policy import MegatronPolicy

__all__ = ["MegatronPolicy"]
