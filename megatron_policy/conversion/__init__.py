"""Whole checkpoints from one format to another, and compared: streamed, verified, never half there.

Hugging Face directories and Megatron-Core's `torch_dist`; needs no GPU and no process group.
"""

from megatron_policy.conversion.check import Check, check
from megatron_policy.conversion.compare import Comparison, Difference, verify
from megatron_policy.conversion.convert import Report, convert
from megatron_policy.conversion.plan import ConversionPlan, plan_conversion

__all__ = [
    "Check",
    "Comparison",
    "ConversionPlan",
    "Difference",
    "Report",
    "check",
    "convert",
    "plan_conversion",
    "verify",
]
