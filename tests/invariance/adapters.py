"""The rows of the invariance page with adapters, which `tests/dist/test_adapters.py` measures."""

from __future__ import annotations

from dataclasses import dataclass

PADDED, PACKED = "padded", "packed"
OF_MODULES, FUSED = "of each module", "of fused layers"


@dataclass(frozen=True)
class AdapterCell:
    """Where adapters of some kind are trained."""

    layout: str
    batching: str
    adapters: str
    family: str


_QWEN2, _OF_EXPERTS = (OF_MODULES, "qwen2"), ("of experts", "qwen3_moe")
_OF_STACKS, _LATENT = ("of stacked experts", "gpt_oss"), ("of latent attention", "deepseek_v3")
CELLS = (
    AdapterCell("TP2+SP", PADDED, *_QWEN2),
    AdapterCell("TP2+SP", PADDED, FUSED, "qwen2"),
    AdapterCell("PP2", PADDED, *_QWEN2),
    AdapterCell("TP2xPP2xDP2+SP", PADDED, *_QWEN2),
    AdapterCell("TP2xCP2+SP", PACKED, *_QWEN2),
    AdapterCell("DP2 distributed optimizer, both overlaps", PACKED, *_QWEN2),
    AdapterCell("TP2+SP, experts whole", PADDED, *_OF_EXPERTS),
    AdapterCell("EP2", PADDED, *_OF_EXPERTS),
    AdapterCell("EP2", PACKED, *_OF_EXPERTS),
    AdapterCell("EP2xPP2", PADDED, *_OF_EXPERTS),
    AdapterCell("EP2xCP2", PADDED, *_OF_EXPERTS),
    AdapterCell("EP2", PADDED, *_OF_STACKS),
    AdapterCell("EP2xTP2+SP", PADDED, *_LATENT),
)
QUANTITIES = {"loss": "loss", "grad norm": "grad norm", "weights": "adapters"}
"""What is checked, and what the page calls it."""
