"""What sections of a configuration have in common: their base, and dtypes by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict

WeightPrecision = Literal["float32", "bfloat16"]
Precision = Literal["float32", "bfloat16", "float16"]

_DTYPE_NAMES = {"fp32": "float32", "float": "float32", "bf16": "bfloat16", "fp16": "float16"}


def _full_dtype_name(value: Any) -> Any:
    return _DTYPE_NAMES.get(value, value) if isinstance(value, str) else value


WeightDtype = Annotated[WeightPrecision, BeforeValidator(_full_dtype_name)]
Dtype = Annotated[Precision, BeforeValidator(_full_dtype_name)]


class Section(BaseModel):
    """Base of every section: frozen, without extra keys or pydantic's own reserved prefixes."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())
