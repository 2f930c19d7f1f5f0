"""Checks that tied copies in a checkpoint equal their originals."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_policy.convert.blockwise import LEAST_BYTES, BlockBuffer, cut
from megatron_policy.convert.open_checkpoint import Opened
from megatron_policy.converters.table import Table
from megatron_policy.errors import ConversionError


def check_copies(opened: Opened, table: Table) -> None:
    """Raise ConversionError naming a tied copy that differs from its original."""
    for name, original in table.copies().items():
        if name in opened.infos and original in opened.infos and not _equal(opened, name, original):
            raise ConversionError(
                f"{opened.root}: {name} differs from {original}, but config.json says they are one "
                "tensor; set tie_word_embeddings to false, or remove the one that is not meant"
            )


def _equal(opened: Opened, name: str, original: str) -> bool:
    one, other = opened.infos[name], opened.infos[original]
    if one.shape != other.shape:
        return False
    plan = cut(one, (one.dtype, other.dtype), 0, LEAST_BYTES)
    none = torch.empty(0, dtype=torch.uint8)
    for first, (left, right), _ in BlockBuffer(LEAST_BYTES).blocks(plan):
        opened.tensors.read(name, first, left, none)
        opened.tensors.read(original, first, right, none)
        if not torch.equal(_comparable(left, right), _comparable(right, left)):
            return False
    return True


def _comparable(values: Tensor, other: Tensor) -> Tensor:
    return values if values.dtype == other.dtype else values.double()
