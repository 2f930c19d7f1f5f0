"""Opens a model: reads its config, decides its head and its layers for multi-token prediction, and
binds its family's table to them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_policy.converters.architecture import ScalarHead
from megatron_policy.converters.registry import family_of
from megatron_policy.converters.table import Table, bind

from .hf_config import read_config
from .hf_files import list_tensors


@dataclass(frozen=True)
class OpenModel:
    """A model: the fields of its config, with the defaults of their class, and its table."""

    fields: Mapping[str, Any]
    table: Table


def open_model(
    path: str | Path,
    overrides: Mapping[str, Any] | None = None,
    *,
    tensors: Collection[str] = (),
    mtp_layers: int = 0,
    head: ScalarHead | None = None,
    left_out: Collection[str] = (),
    named: Collection[str] = (),
) -> OpenModel:
    """Open the model at `path`, a directory, its config.json or a name on the hub, with `overrides`
    of fields of its config; see `bind` for what else it has. Without `named` and `tensors`, names
    of HF tensors, or their shapes, are looked up at `path` if it matters. Reads no weights.

    ConfigError for a config that cannot be read, ConversionError for one that cannot be translated.
    """
    fields = read_config(path, overrides)
    family = family_of(fields["model_type"])
    if not (named or tensors) and (family.has_forms or family.has_orders):
        named = list_tensors(path, with_shapes=family.has_orders)
    return OpenModel(fields, bind(fields, family, mtp_layers, head, left_out, tensors, named))
