"""The rotary embedding that a Hugging Face config describes, whichever release wrote it.

What the config leaves open is filled in as transformers does (modeling_rope_utils.py).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal

from megatron_policy.converters.architecture.rotary import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    Rope,
    Scaling,
    YarnScaling,
)

from .fields import REQUIRED, Fields

KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
_ORIGINAL = "original_max_position_embeddings"


def take_rope(
    fields: Fields,
    *,
    partial: bool = False,
    interleaved: bool = False,
    fraction: float = 1.0,
    threefold: Literal["", "apart", "alternating"] = "",
) -> Rope:
    """The rotary embedding in either spelling: `rope_parameters`, or `rope_theta` and
    `rope_scaling`.

    `partial` says that the family can leave part of a head unrotated; without
    `partial_rotary_factor` in the config, `fraction` of it is rotated. `threefold` says that tokens
    have three positions, and how these share the pairs of a head: one position after another or, in
    turn, height and width at every third pair as long as they have some left.
    """
    section = fields.section("rope_parameters") or fields.section("rope_scaling")
    rope = _rope(fields, section, "rope_theta", partial, interleaved, fraction)
    if not threefold:
        return rope
    return replace(rope, axes=_take_axes(section or Fields({}), threefold == "alternating"))


def _take_axes(section: Fields, alternating: bool) -> tuple[int, ...]:
    """`mrope_section` says how many pairs each position turns; which ones is up to the class."""
    for name in ("mrope_interleaved", "interleaved"):
        section.expect(name, (alternating,), "the model's class turns pairs so")
    counts = section.take("mrope_section")
    if not isinstance(counts, list | tuple) or [type(each) for each in counts] != [int] * 3:
        section.refuse("mrope_section", counts, "must be a list of three numbers of pairs")
        return ()
    if not alternating:
        return tuple(axis for axis, count in enumerate(counts) for _ in range(count))
    axes = [0] * sum(counts)
    for axis in (1, 2):
        at = range(axis, min(3 * counts[axis], len(axes)), 3)
        for pair in at:
            axes[pair] = axis
    return tuple(axes)


def take_ropes_by_window(
    fields: Fields, *, base_of_windowed: str = "rope_local_base_freq"
) -> tuple[Rope, Rope]:
    """Rotary embeddings of layers that see everything and of those that have the window.

    Gemma 3 and OLMo 3 have both, as two mappings in `rope_parameters` or as separate fields, of
    which `base_of_windowed` is the one with the base of windowed layers.
    """
    both = fields.section("rope_parameters")
    whole = both.section("full_attention") if both else fields.section("rope_scaling")
    windowed = both.section("sliding_attention") if both else None
    return (
        _rope(fields, whole, "rope_theta"),
        _rope(fields, windowed, base_of_windowed),
    )


def _rope(
    fields: Fields,
    section: Fields | None,
    base_field: str,
    partial: bool = False,
    interleaved: bool = False,
    fraction: float = 1.0,
) -> Rope:
    inner = section or Fields({})
    base = _either(fields, base_field, inner, "rope_theta")
    fraction = _either(fields, "partial_rotary_factor", inner, "partial_rotary_factor", fraction)
    if fraction != 1.0 and not partial:
        (section or fields).refuse("partial_rotary_factor", fraction, "the whole head is rotated")
    scaling = _scaling(fields, inner)
    return Rope(float(base), scaling, float(fraction), interleaved)


def _either(
    fields: Fields, outer: str, section: Fields, inner: str, default: Any = REQUIRED
) -> Any:
    """The section's field, or the one of the whole config if the section has none."""
    value = section.take(inner, None)
    if value is None:
        return fields.take(outer, default)
    # A release that only knows the outer field adds its default to a config without it.
    fields.ignore(outer, "rope_parameters takes precedence")
    return value


def _scaling(fields: Fields, section: Fields) -> Scaling | None:
    kind = section.take("rope_type", section.take("type", "default"))
    longest = fields.take("max_position_embeddings")
    match kind:
        case "default":
            for place in (section, fields):
                place.ignore(_ORIGINAL, "frequencies are not scaled")
            return None
        case "linear":
            return LinearScaling(_number(section, "factor"))
        case "dynamic":
            section.ignore(_ORIGINAL, "transformers uses max_position_embeddings")
            return DynamicScaling(_number(section, "factor"), longest)
        case "llama3":
            return Llama3Scaling(
                factor=_number(section, "factor"),
                low_freq_factor=_number(section, "low_freq_factor"),
                high_freq_factor=_number(section, "high_freq_factor"),
                original_max_position=_original(fields, section),
            )
        case "yarn":
            original, factor = _original(fields, section), _number(section, "factor")
            attention = _mscale(factor, 1.0)
            if section.take("mscale", None) and section.take("mscale_all_dim", None):
                of_all = _mscale(factor, _number(section, "mscale_all_dim"))
                attention = _mscale(factor, _number(section, "mscale")) / of_all
            return YarnScaling(
                factor=factor,
                original_max_position=original,
                beta_fast=_number(section, "beta_fast", 32.0),
                beta_slow=_number(section, "beta_slow", 1.0),
                truncate=bool(section.take("truncate", True)),
                attention_factor=_number(section, "attention_factor", attention),
            )
        case "longrope":
            original = _original(fields, section)
            factor = _number(section, "factor", longest / original)
            attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
            return LongScaling(
                short=_numbers(section, "short_factor"),
                long=_numbers(section, "long_factor"),
                original_max_position=original,
                attention_factor=_number(section, "attention_factor", attention),
            )
    section.refuse("rope_type", kind, f"frequencies can be scaled by {', '.join(KINDS)}")
    return None


def _original(fields: Fields, section: Fields) -> int:
    """The context length before scaling; a field of the whole config overrides the section's."""
    longest = fields.take("max_position_embeddings")
    inner = _number(section, _ORIGINAL, longest)
    original = int(_number(fields, _ORIGINAL, inner))
    if original < 2:
        section.refuse(_ORIGINAL, original, "must be 2 or more")
    return max(2, original)


def _mscale(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _number(section: Fields, name: str, default: Any = REQUIRED) -> float:
    """A positive number; returns 2 in place of a refused value."""
    value = section.take(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        section.refuse(name, value, "must be a positive number")
        return 2.0
    return float(value)


def _numbers(section: Fields, name: str) -> tuple[float, ...]:
    values = section.take(name)
    if not isinstance(values, list | tuple) or not all(isinstance(x, int | float) for x in values):
        section.refuse(name, values, "must be a list of numbers")
        return ()
    return tuple(map(float, values))
