"""Mistral (dense): no biases; either every layer has the window or none."""

from __future__ import annotations

from . import dense
from .architecture import Architecture
from .config_fields import Fields

TABLE = (*dense.ENDS, *dense.BLOCK)


def architecture(fields: Fields) -> Architecture:
    """The architecture a MistralConfig describes."""
    return dense.architecture(fields, window=fields.take("sliding_window", None))
