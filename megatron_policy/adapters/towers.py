"""Linear layers of towers and projectors, whose weights adapters can be on."""

from __future__ import annotations

import re

from megatron_policy.adapters.stacks import WEIGHT
from megatron_policy.converters.families.shared.pictures import PARAMETERS
from megatron_policy.converters.rows.kinds import Whole
from megatron_policy.converters.table import Entry

_EMBEDS = re.compile("embed|pos_emb|token")
"""What modules have in their names that look up rows in place of multiplying."""


def is_of_tower(entry: Entry) -> bool:
    """Whether it is of a tower or a projector, or of an adapter there."""
    return entry.megatron.startswith(PARAMETERS)


def is_linear_of_tower(entry: Entry) -> bool:
    """Whether it is the weight of a linear layer there, by its name and shape, in a file that has
    the names of transformers' modules: PEFT goes by these.
    """
    name, row = entry.megatron.removeprefix(PARAMETERS), entry.row
    if not is_of_tower(entry) or not name.endswith(WEIGHT) or not entry.hf[0].endswith(name):
        return False
    module = name.removesuffix(WEIGHT).rpartition(".")[2]
    return type(row) is Whole and len(row.dims) == 2 and not _EMBEDS.search(module)
