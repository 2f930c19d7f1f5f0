"""What a policy tells its user: metrics to writers, a summary at the start, a report, warnings of
libraries in one line. Read `metrics_log.py` first, then `writers.py`.
"""

from megatron_policy.interfaces.metrics import MetricsWriter
from megatron_policy.lm_head.rollout_mismatch import RolloutMismatch, compare_rollouts
from megatron_policy.monitoring.report import PolicyReport
from megatron_policy.monitoring.writers import JsonlWriter, TensorBoardWriter, WandbWriter

__all__ = [
    "JsonlWriter",
    "MetricsWriter",
    "PolicyReport",
    "RolloutMismatch",
    "TensorBoardWriter",
    "WandbWriter",
    "compare_rollouts",
]
