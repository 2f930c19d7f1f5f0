"""Other values for fields of a config.json: in the words of its file, and as they are written."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeGuard

from megatron_policy.converters.config_fields.quantisation import SECTION
from megatron_policy.converters.families.shared.omni import override_part
from megatron_policy.converters.files import strict_json

_NEW = "rope_parameters"
_BESIDE_SCALING = ("rope_theta", "partial_rotary_factor")
"""What rope_parameters have and older releases have beside rope_scaling."""
ROPE = (frozenset({_NEW}), frozenset({"rope_scaling", "rope_theta"}))
"""What releases of transformers call the settings of rotary embeddings: 5, and before."""


def in_kind(
    overrides: Mapping[str, Any], config: Mapping[str, Any], written: Mapping[str, Any]
) -> dict[str, Any]:
    """The values of `overrides` as the model's config.json has such values: whole numbers as floats
    where those of `config` are, and rotary embeddings in the words of the file, which has
    `written`.
    """
    return {
        name: float(value) if type(value) is int and type(config.get(name)) is float else value
        for name, value in _in_words_of(written, overrides).items()
    }


def _in_words_of(written: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """`overrides` with one rotary embedding in the words of the release that wrote the config.
    Those of several kinds of layers stay as they are: the older words say less.
    """
    newer, older = ROPE
    given = overrides.keys() & (newer | older)
    own, asked = written.get(_NEW), overrides.get(_NEW)
    scaling = overrides.get("rope_scaling")
    rest = {name: value for name, value in overrides.items() if name not in given}
    if given == newer and not own and any(map(written.get, older)) and _is_one_rope(asked):
        parts = {name: v for name, v in asked.items() if name not in _BESIDE_SCALING}
        parts = {} if parts.get("rope_type", "default") == "default" else parts
        beside = {name: asked[name] for name in _BESIDE_SCALING if name in asked}
        return {**rest, **beside, "rope_scaling": parts or None}
    if given and given <= older and _is_one_rope(own) and isinstance(scaling, Mapping | None):
        kept = own if "rope_scaling" not in given else {}
        as_newer = {"rope_type" if n == "type" else n: v for n, v in (scaling or {}).items()}
        parts = {"rope_type": "default", **kept, **as_newer}
        beside = {name: own[name] for name in _BESIDE_SCALING if name in own}
        beside |= {name: overrides[name] for name in given - {"rope_scaling"}}
        return {**rest, _NEW: parts | beside}
    return dict(overrides)


def _is_one_rope(section: Any) -> TypeGuard[Mapping[str, Any]]:
    """Whether these are rope_parameters for all layers."""
    return bool(section) and isinstance(section, Mapping) and "rope_type" in section


def without_quantisation(config: bytes) -> bytes:
    """The content of a config.json without what says how its weights are quantised."""
    fields = strict_json.parse(config, finite=False)
    del fields[SECTION]
    return encoded_like(config, fields)


def with_overrides(config: bytes, overrides: Mapping[str, Any]) -> bytes:
    """The content of a config.json with the values of `overrides` in place of its own."""
    return encoded_like(config, override_part(strict_json.parse(config, finite=False), overrides))


def encoded_like(config: bytes, fields: Mapping[str, Any]) -> bytes:
    """The content of a config.json with these fields, indented like `config`."""
    indent = re.match(rb'\{\s*\n( +)"', config)
    return strict_json.encoded(fields, indent=len(indent[1]) if indent else 2) + b"\n"
