"""The cells that `make test` runs: an array in which layouts, ways to make microbatches, losses and
families meet in pairs. The page's table, and what is beside it, are for `make nightly`.

A cell outside it that has once found a fault joins it, in `FOUND`.
"""

from __future__ import annotations

from itertools import combinations

from tests.invariance.cases import BATCHINGS, UNCLIPPED, WITH_LOGITS, Cell
from tests.oracle import CLIP

DENSE = ("TP2+SP", "PP2xVPP2", "DP2, distributed optimizer, overlaps", "CP2", "TP2xCP2+SP")
OF_EXPERTS = ("EP2xTP2+SP", "EP2xPP2", "EP2xCP2")
OF_FSDP = ("FSDP2 x 2", "FSDP2 TP2+SP x 2", "FSDP1 x 2")
"""Each axis that cuts a model, rows or tokens once alone and once with another: what cuts it in
more pieces, or along three, is for the night.
"""
FAMILIES = {
    **dict.fromkeys(DENSE, ("qwen2", "qwen3")),
    **dict.fromkeys(OF_EXPERTS, ("qwen3_moe", "deepseek_v3", "mixtral", "gpt_oss")),
    **dict.fromkeys(OF_FSDP, ("qwen2", "qwen3", "gemma2", "gpt_oss")),
}
LOSSES = {
    "qwen2": ("token", "sequence"),
    "qwen3": ("policy gradient", "entropy of logits"),
    "gemma2": ("policy gradient",),
    "qwen3_moe": ("sequence",),
    "deepseek_v3": ("policy gradient",),
    "mixtral": ("policy gradient",),
    "gpt_oss": ("token",),
}
"""What each family is trained by: the oracle is dear, and one of a family's losses is like another.
"""
CLIP_OF = {"mixtral": UNCLIPPED}
_ROWS = 8
"""Of a global batch: half of the table's, which are several microbatches for two replicas."""

_PAIRWISE = (
    ("TP2+SP", "padded", "token", "qwen2"),
    ("TP2+SP", "dynamic", "policy gradient", "qwen3"),
    ("TP2+SP", "packed", "sequence", "qwen2"),
    ("PP2xVPP2", "padded", "policy gradient", "qwen3"),
    ("PP2xVPP2", "dynamic", "sequence", "qwen2"),
    ("PP2xVPP2", "packed", "token", "qwen2"),
    ("DP2, distributed optimizer, overlaps", "padded", "policy gradient", "qwen3"),
    ("DP2, distributed optimizer, overlaps", "dynamic", "sequence", "qwen2"),
    ("DP2, distributed optimizer, overlaps", "packed", "token", "qwen2"),
    ("CP2", "padded", "token", "qwen2"),
    ("CP2", "dynamic", "policy gradient", "qwen3"),
    ("CP2", "packed", "sequence", "qwen2"),
    ("TP2xCP2+SP", "padded", "token", "qwen2"),
    ("TP2xCP2+SP", "padded", "policy gradient", "qwen3"),
    ("TP2xCP2+SP", "dynamic", "entropy of logits", "qwen3"),
    ("TP2xCP2+SP", "packed", "sequence", "qwen2"),
    ("EP2xTP2+SP", "padded", "sequence", "qwen3_moe"),
    ("EP2xTP2+SP", "dynamic", "policy gradient", "mixtral"),
    ("EP2xTP2+SP", "dynamic", "token", "gpt_oss"),
    ("EP2xTP2+SP", "packed", "policy gradient", "deepseek_v3"),
    ("EP2xPP2", "padded", "policy gradient", "deepseek_v3"),
    ("EP2xPP2", "padded", "token", "gpt_oss"),
    ("EP2xPP2", "dynamic", "sequence", "qwen3_moe"),
    ("EP2xPP2", "packed", "policy gradient", "mixtral"),
    ("EP2xCP2", "padded", "policy gradient", "mixtral"),
    ("EP2xCP2", "padded", "token", "gpt_oss"),
    ("EP2xCP2", "dynamic", "policy gradient", "deepseek_v3"),
    ("EP2xCP2", "packed", "sequence", "qwen3_moe"),
    ("FSDP2 x 2", "padded", "sequence", "qwen2"),
    ("FSDP2 x 2", "padded", "entropy of logits", "qwen3"),
    ("FSDP2 x 2", "dynamic", "policy gradient", "gemma2"),
    ("FSDP2 x 2", "packed", "token", "gpt_oss"),
    ("FSDP2 TP2+SP x 2", "padded", "entropy of logits", "qwen3"),
    ("FSDP2 TP2+SP x 2", "padded", "token", "gpt_oss"),
    ("FSDP2 TP2+SP x 2", "dynamic", "sequence", "qwen2"),
    ("FSDP2 TP2+SP x 2", "packed", "policy gradient", "gemma2"),
    ("FSDP1 x 2", "padded", "sequence", "qwen2"),
    ("FSDP1 x 2", "padded", "policy gradient", "gemma2"),
    ("FSDP1 x 2", "padded", "token", "gpt_oss"),
    ("FSDP1 x 2", "dynamic", "token", "qwen2"),
    ("FSDP1 x 2", "packed", "entropy of logits", "qwen3"),
)
FOUND: tuple[Cell, ...] = ()
"""Cells of other tables that have failed since this array was drawn."""


def _cell(layout: str, batching: str, loss: str, family: str) -> Cell:
    return Cell(layout, batching, loss, family, _ROWS, clip=CLIP_OF.get(family, CLIP))


ARRAY = (*(_cell(*row) for row in _PAIRWISE), *FOUND)


def legal_cells() -> list[Cell]:
    """Every cell of these layouts with one of its families and one of that family's losses."""
    return [
        _cell(layout, batching, loss, family)
        for layout, families in FAMILIES.items()
        for batching in BATCHINGS
        for family in families
        for loss in LOSSES[family]
        if loss != "entropy of logits" or layout in (*WITH_LOGITS, *OF_FSDP)
    ]


def pairs_of(cell: Cell) -> set[tuple[str, str]]:
    """The choices that meet in a cell, two by two."""
    choices = (cell.layout, cell.batching, cell.loss, cell.family)
    return set(combinations(choices, 2))
