"""Which model families there are: the built-in ones and those of installed packages.

An installed package adds one by an entry point of the group `megatron_policy.models`: its name is
the model_type, its object a `Family`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points

from megatron_policy.errors import ConversionError

from . import llama, mistral, qwen2, qwen3
from .architecture import Architecture
from .config_fields import Fields
from .rows import Ignore, Row

GROUP = "megatron_policy.models"


@dataclass(frozen=True)
class Family:
    """Its rows, how its config reads, and the HF classes whose checkpoints it converts."""

    name: str
    table: tuple[Row | Ignore, ...]
    architecture: Callable[[Fields], Architecture]
    hf_architectures: tuple[str, ...]


FAMILIES = {
    family.name: family
    for family in (
        Family("llama", llama.TABLE, llama.architecture, ("LlamaForCausalLM",)),
        Family("mistral", mistral.TABLE, mistral.architecture, ("MistralForCausalLM",)),
        Family("qwen2", qwen2.TABLE, qwen2.architecture, ("Qwen2ForCausalLM",)),
        Family("qwen3", qwen3.TABLE, qwen3.architecture, ("Qwen3ForCausalLM",)),
    )
}


def family_of(model_type: str) -> Family:
    """The family of a config's model_type; ConversionError naming those there are."""
    if model_type in FAMILIES:
        return FAMILIES[model_type]
    added = {entry.name: entry for entry in entry_points(group=GROUP)}
    if model_type in added:
        family = added[model_type].load()
        if not isinstance(family, Family):
            raise ConversionError(
                f"entry point {model_type} of {GROUP} is not a Family: {family!r}"
            )
        return family
    known = sorted({*FAMILIES, *added})
    close = difflib.get_close_matches(model_type, known, n=1)
    raise ConversionError(
        f"no model family {model_type!r}; there are {', '.join(known)}"
        + (f" (did you mean {close[0]}?)" if close else "")
        + f". A package can add one through the entry point group {GROUP}."
    )
