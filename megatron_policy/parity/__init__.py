"""Compares the Megatron-Core model with the Hugging Face model on the same random tokens.

`compare` does this for a checkpoint. Read `compare.py` first.
"""

from typing import Any

from megatron_policy.parity.compare import LIMITS, compare
from megatron_policy.parity.result import Deviation, Parity
from megatron_policy.renamed import renamed_name

__all__ = ["LIMITS", "Deviation", "Parity", "compare"]

_RENAMED = {"Difference": "megatron_policy.parity:Deviation"}


def __getattr__(name: str) -> Any:
    return renamed_name(__name__, name, _RENAMED)
