"""Converts whole checkpoints between formats, and compares them: streamed, verified, atomic.

Formats are Hugging Face directories and Megatron-Core's `torch_dist`, of adapters alone those of
PEFT and training checkpoints; needs no GPU and no process group. Read `plan.py` first, then
`convert.py`; of adapters `bases.py`.
"""

from megatron_policy.convert.compare import Check, Comparison, Difference, check, verify
from megatron_policy.convert.convert import Report, convert
from megatron_policy.convert.plan import plan_conversion
from megatron_policy.convert.planned import ConversionPlan

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
