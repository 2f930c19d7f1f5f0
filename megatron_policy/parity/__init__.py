"""Compares the Megatron-Core model with the Hugging Face model on the same random tokens.

`compare` does this for a checkpoint. Read `compare.py` first.
"""

from megatron_policy.parity.compare import LIMITS, compare
from megatron_policy.parity.result import Deviation, Parity

__all__ = ["LIMITS", "Deviation", "Parity", "compare"]
