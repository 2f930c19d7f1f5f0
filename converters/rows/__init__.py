"""Rows: which elements of Hugging Face tensors are which elements of a rank's shard. Read
`blocks.py` (the contract, and the copy) first, then `kinds.py`, `sections.py` and `shards.py`.
"""

from __future__ import annotations

from .blocks import (
    DECAYED,
    Block,
    Role,
    Row,
    Shape,
    blocks_of,
    fill_parts,
    fill_shard,
    pack,
    shard,
    unpack,
    unshard,
)
from .kinds import (
    Columns,
    GateUp,
    Halves,
    Ignore,
    Joined,
    OneTensor,
    Qkv,
    Reshaped,
    RowBase,
    Rows,
    Tied,
    TowerQkv,
    Vocab,
    Whole,
    assign_part,
)
from .sections import GatedQkv, Sections

__all__ = [
    "DECAYED",
    "Block",
    "Columns",
    "GateUp",
    "GatedQkv",
    "Halves",
    "Ignore",
    "Joined",
    "OneTensor",
    "Qkv",
    "Reshaped",
    "Role",
    "Row",
    "RowBase",
    "Rows",
    "Sections",
    "Shape",
    "Tied",
    "TowerQkv",
    "Vocab",
    "Whole",
    "assign_part",
    "blocks_of",
    "fill_parts",
    "fill_shard",
    "pack",
    "shard",
    "unpack",
    "unshard",
]
