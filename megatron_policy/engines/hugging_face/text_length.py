"""Tells transformers' rotary embeddings how long a text is, where their frequencies depend on it.

They take it for as long as the last of the positions they are given, which are those of one rank
and of one microbatch: one more position, whose angles are dropped, says it in their place.

Shapes: T positions, R rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

_BY_LENGTH = ("longrope", "dynamic")
_CACHED = "max_seq_len_cached"
"""How names end under which a module of dynamic scaling keeps the longest text it has seen."""


@dataclass
class TextLength:
    """`length` is that of the texts to come; None for what the positions say."""

    fixed: bool
    """Whether each module has its own, that of the longest possible text."""
    length: int | None = None

    @classmethod
    def of(cls, model: torch.nn.Module, choice: str, longest: int) -> TextLength:
        """Let the model's rotary embeddings follow `policy.rope_length`, which is `choice`; no text
        has more than `longest` tokens.
        """
        own = cls(choice == "maximum")
        for module in model.modules():
            kinds = _find_kinds(module)
            if not kinds:
                continue
            of_module = None
            if own.fixed:  # as `Rope.longest`
                of_module = max(
                    int(kind["factor"] * kind["max_position"])
                    if _name_type(kind) == "dynamic"
                    else longest
                    for kind in kinds
                )
            _Told(own, of_module).watch(module)
        return own

    @contextmanager
    def of_batch(self, length: int) -> Iterator[None]:
        """Within this context texts are as long as the caller's batch is wide."""
        self.length = length
        try:
            yield
        finally:
            self.length = None


def untold(model: Any) -> str | None:
    """The type of a model's frequencies if they depend on the length of the text, which none of its
    modules can be told; None otherwise.
    """
    if any(_find_kinds(module) for module in model.modules()):
        return None
    return next(map(_name_type, _find_by_length(model.config.get_text_config())), None)


def _find_kinds(module: Any) -> list[Mapping[str, Any]]:
    """The parameters of a rotary embedding of transformers by which the length matters."""
    return _find_by_length(module.config) if hasattr(module, "rope_type") else []


def _name_type(parameters: Mapping[str, Any]) -> str:
    """In the spelling of any release."""
    return str(parameters.get("rope_type", parameters.get("type")))


def _find_by_length(config: Any) -> list[Mapping[str, Any]]:
    """The parameters of frequencies that depend on the length of the text, as they do not where
    they are widened by `alpha`.
    """
    found = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    of_layers = [value for value in found.values() if isinstance(value, Mapping)]
    return [
        {"max_position": config.max_position_embeddings} | dict(each)
        for each in (found, *of_layers)
        if _name_type(each) in _BY_LENGTH and not each.get("alpha")
    ]


@dataclass
class _Told:
    """Hooks of one rotary embedding."""

    text: TextLength
    longest: int | None

    def watch(self, module: torch.nn.Module) -> None:
        """Add the hooks."""
        module.register_forward_pre_hook(self.before, with_kwargs=True)
        module.register_forward_hook(self.after)

    @property
    def length(self) -> int | None:
        """The length that the module is to assume."""
        return self.longest or self.text.length

    def before(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Forget longer texts, and add the last position of a text of this length."""
        for name in [name for name in vars(module) if name.endswith(_CACHED)]:
            setattr(module, name, 0)
        if (length := self.length) is None:
            return None
        given = dict(zip(("x", "position_ids"), args, strict=False)) | kwargs
        positions_RT = given["position_ids"]
        last_R1 = torch.full_like(positions_RT[:, :1], length - 1)
        # Padding lies beyond the text.
        told = torch.cat([positions_RT.clamp(max=length - 1), last_R1], 1)
        return (), given | {"position_ids": told}

    def after(self, module: Any, args: tuple[Any, ...], output: Any) -> Any:
        """Drop the angles of that position."""
        if self.length is None:
            return None
        return tuple(each[:, :-1] for each in output)
