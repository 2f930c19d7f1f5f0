"""Does the Megatron-Core model compute what Hugging Face computes? Both on the same random tokens.

`compare` asks it of a checkpoint; knows no command line.
"""

from megatron_policy.parity.compare import LIMITS, compare
from megatron_policy.parity.result import Difference, Parity

__all__ = ["LIMITS", "Difference", "Parity", "compare"]
