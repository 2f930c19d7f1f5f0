"""What sections of a configuration have in common: their base, and dtypes by name."""

from __future__ import annotations

from collections.abc import Iterator
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

    def __repr_args__(self) -> Iterator[tuple[str, Any]]:
        """What differs from the defaults."""
        return find_differences(self, None)


class ValueSection(Section):
    """A section that is one value, such as an item of a list: its fields are no keys."""


def find_differences(section: Section, base: Section | None) -> Iterator[tuple[str, Any]]:
    """The fields of a section that differ from those of `base`, or from the defaults; in them, the
    values of environment variables are left out, since they can be secrets.
    """
    for name, info in type(section).model_fields.items():
        value = getattr(section, name)
        if base is None:
            default = info.get_default(call_default_factory=True)
        else:
            default = getattr(base, name)
        if not info.is_required() and value == default:
            continue
        if isinstance(value, Section) and isinstance(default, type(value)):
            yield name, _Differing(value, default)
        else:
            yield name, dict.fromkeys(value, "...") if name == "env_vars" else value


class _Differing:
    """A section that shows what differs from another of its kind."""

    def __init__(self, section: Section, base: Section) -> None:
        self.section, self.base = section, base

    def __repr__(self) -> str:
        shown = ", ".join(
            f"{key}={value!r}" for key, value in find_differences(self.section, self.base)
        )
        return f"{type(self.section).__name__}({shown})"
