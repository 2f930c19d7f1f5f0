"""A config.json read field by field, so that none is overlooked. Read `fields.py` first, then
`rope_fields.py`.
"""

from __future__ import annotations

from .fields import IGNORED, IGNORED_FIELD, REFUSED, REQUIRED, TRANSLATED, Fields, FieldUse, shown

__all__ = [
    "IGNORED",
    "IGNORED_FIELD",
    "REFUSED",
    "REQUIRED",
    "TRANSLATED",
    "FieldUse",
    "Fields",
    "shown",
]
