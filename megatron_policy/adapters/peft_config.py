"""The fields of PEFT's `adapter_config.json`: each is applied, does not affect what adapters
compute, or is refused by name.

Names of modules that are regular expressions are never evaluated: the file comes from elsewhere.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

from megatron_policy.converters.config_fields.fields import (
    IGNORED_FIELD,
    REFUSED,
    TRANSLATED,
    FieldUse,
    shown,
)
from megatron_policy.errors import ConversionError

_MERGED = "merge them into their model with PEFT (merge_and_unload), and take that as the model"
_PLAIN: tuple[Any, ...] = (None, False, "none", [], {})
"""Values with which a field changes nothing."""

_REMEDIES: Mapping[str, str] = {
    "bias": "they also change biases: " + _MERGED,
    "fan_in_fan_out": "it is for Conv1D layers, which these models do not have: set it to false",
    "lora_bias": "they also add biases: " + _MERGED,
    "use_dora": "DoRA is not supported: " + _MERGED,
}
_UNKNOWN = "not supported; remove it if it does not affect what they compute, or " + _MERGED
_DRAWN = "how the first values were drawn; init_lora_weights says whether the base changed"
_IGNORED: Mapping[str, str] = {
    "auto_mapping": "which class PEFT loads",
    "corda_config": _DRAWN,
    "ensure_weight_tying": "of embeddings and heads of language models, whose adapters are refused",
    "eva_config": _DRAWN,
    "inference_mode": "whether PEFT trains them",
    "loftq_config": _DRAWN,
    "lora_ga_config": _DRAWN,
    "megatron_core": "of megatron_config, which is refused",
    "peft_version": "which release wrote the file",
    "qalora_group_size": "of use_qalora, which is refused",
    "runtime_config": "how PEFT computes",
}
_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")
"""Ways to draw the first values that leave the base as it is."""
_HEADS = ("classifier", "score")
"""Names under which PEFT looks for a scalar head; models of transformers call it the latter."""
_OF_HEADS = ("SEQ_CLS", "TOKEN_CLS")
"""Tasks of models with a scalar head in place of a language model's."""
Number = TypeVar("Number", int, float)

_LITERAL = re.compile(r"\^?[\w.-]+", re.ASCII)
_DIGITS = 10
_MOST = 2**31
"""Limits of numbers, beyond which Python's own functions fail."""


@dataclass(frozen=True)
class PeftSettings:
    """What an `adapter_config.json` says of adapters."""

    rank: int
    alpha: float
    dropout: float
    rank_stabilised: bool
    """Whether the scale is `alpha / sqrt(rank)` instead of `alpha / rank`."""
    model: str | None
    revision: str | None
    targets: frozenset[str] | None
    """Modules by their paths, or the ends of these; None: a pattern."""
    excluded: frozenset[str]
    layers: frozenset[int] | None
    layer_lists: frozenset[str]
    """Modules in which the numbers of `layers` count; empty: those with the first number."""
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    """Other ranks and alphas than the above, by modules."""
    parameters: tuple[str, ...] = ()
    """Tensors with stacked experts by their paths, or the ends of these."""
    has_head: bool = False
    """Whether a scalar head, which is trained in full, comes with the adapters."""
    of_head: bool = False
    """Whether they are of a model with such a head."""

    def rank_of(self, module: str) -> int:
        """The rank of a module's adapter."""
        return _by_module(self.ranks, module, self.rank)

    def alpha_of(self, module: str) -> float:
        """The alpha with which `alpha / rank` is the scale of a module's adapter."""
        alpha = _by_module(self.alphas, module, self.alpha)
        return alpha * math.sqrt(self.rank_of(module)) if self.rank_stabilised else alpha

    def names(self, module: str) -> bool:
        """Whether PEFT adapts the module; of a pattern, that is assumed."""
        if _is_listed(self.excluded, module):
            return False
        if self.targets is None or module in self.targets:
            return True
        return _is_listed(self.targets, module) and self._is_in_layers(module)

    def parameters_named(self, name: str, legal: Iterable[str]) -> list[str]:
        """Those of the `legal` tensors that one of `parameters` names."""
        return [each for each in legal if _is_listed(frozenset([name]), each)]

    def _is_in_layers(self, module: str) -> bool:
        if self.layers is None:
            return True
        parts = module.split(".")
        numbers = (
            int(number)
            for place, (before, number) in enumerate(pairwise(parts[:-1]))
            if number.isdecimal() and number.isascii() and len(number) < _DIGITS
            # Without a list's name, PEFT looks for one after another name.
            if (before in self.layer_lists if self.layer_lists else place > 0)
        )
        return next(numbers, None) in self.layers


def peft_settings(config: Mapping[str, Any], where: object) -> PeftSettings:
    """The settings of the adapters in the directory `where`. ConversionError naming every field
    with which they are of another kind.
    """
    problems = [
        f"{use.name}={shown(use.value)}: {use.why}"
        for use in peft_uses(config)
        if use.outcome == REFUSED
    ]
    if problems:
        raise ConversionError(
            f"the adapters in {where} cannot be read:\n  " + "\n  ".join(problems)
        )
    layers, lists = config.get("layers_to_transform"), config.get("layers_pattern") or []
    targets = config.get("target_modules")
    excluded = config.get("exclude_modules")
    return PeftSettings(
        rank=config["r"],
        alpha=float(config["lora_alpha"]),
        dropout=float(config.get("lora_dropout") or 0.0),
        rank_stabilised=bool(config.get("use_rslora")),
        model=config.get("base_model_name_or_path"),
        revision=config.get("revision"),
        targets=frozenset(targets) if isinstance(targets, list) else None,
        excluded=frozenset(excluded if isinstance(excluded, list) else ()),
        layers=None if layers in (None, []) else frozenset(_listed(layers)),
        layer_lists=frozenset(_listed(lists)),
        parameters=tuple(config.get("target_parameters") or ()),
        has_head=bool(config.get("modules_to_save")),
        of_head=bool(config.get("modules_to_save")) or config.get("task_type") in _OF_HEADS,
        ranks=config.get("rank_pattern") or {},
        alphas={name: float(a) for name, a in (config.get("alpha_pattern") or {}).items()},
    )


def peft_uses(config: Mapping[str, Any]) -> Iterator[FieldUse]:
    """What becomes of each field, in the file's order; of those that have to be there also if they
    are not.
    """
    for name in dict.fromkeys((*config, *_NEEDED)):
        value = config.get(name)
        if name in _APPLIED:
            problem = _APPLIED[name](value)
            yield FieldUse(name, value, REFUSED if problem else TRANSLATED, problem)
        elif name in _IGNORED:
            yield FieldUse(name, value, IGNORED_FIELD, _IGNORED[name])
        elif value in _PLAIN:
            yield FieldUse(name, value, IGNORED_FIELD, "it has no effect with this value")
        else:
            yield FieldUse(name, value, REFUSED, _REMEDIES.get(name, _UNKNOWN))


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _is_listed(names: frozenset[str], module: str) -> bool:
    """Whether the module's path, or what follows a dot of it, is among the names."""
    while module:
        if module in names:
            return True
        module = module.partition(".")[2]
    return False


def _by_module(values: Mapping[str, Number], module: str, default: Number) -> Number:
    for name, value in values.items():
        whole = name.startswith("^")
        if module == name.removeprefix("^") or (not whole and module.endswith(f".{name}")):
            return value
    return default


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and -_MOST < value < _MOST


def _kind(value: Any) -> str:
    return "" if value == "LORA" else "only 'LORA' is read: " + _MERGED


def _task(value: Any) -> str:
    if value in (None, "CAUSAL_LM", *_OF_HEADS):
        return ""
    return "adapters of other models than 'CAUSAL_LM', 'SEQ_CLS', 'TOKEN_CLS' are not supported"


def _start(value: Any) -> str:
    if any(value is each or (isinstance(each, str) and value == each) for each in _STARTS):
        return ""
    return "it changes the base: save them with path_initial_model_for_weight_conversion first"


def _rank(value: Any) -> str:
    return "" if type(value) is int and 0 < value < _MOST else "must be a whole number, 1 or more"


def _number(value: Any) -> str:
    return "" if _is_number(value) else "must be a number"


def _dropout(value: Any) -> str:
    return "" if value is None or (_is_number(value) and 0 <= value < 1) else "must be in 0 .. 1"


def _flag(value: Any) -> str:
    return "" if value in (None, False, True) else "must be true or false"


def _name(value: Any) -> str:
    return "" if value is None or isinstance(value, str) else "must be a name"


def _targets(value: Any) -> str:
    if value is None:
        return "PEFT adapts modules of its own choice then, and no others: write the modules out"
    return _modules(value)


def _modules(value: Any) -> str:
    if value is None or isinstance(value, str):
        return ""
    named = isinstance(value, list) and all(isinstance(each, str) for each in value)
    return "" if named else "must be names of modules, or a pattern"


def _parameters(value: Any) -> str:
    named = isinstance(value, list) and all(isinstance(each, str) for each in value)
    return "" if value is None or named else "must be names of parameters"


def _in_full(value: Any) -> str:
    if not value or (isinstance(value, list) and all(each in _HEADS for each in value)):
        return ""
    return "of modules that they come with, only a scalar head is read: " + _MERGED


def _excluded(value: Any) -> str:
    if isinstance(value, str) and value:
        return "a pattern is not read here: list the modules by name, or leave it out"
    return _modules(value)


def _layers(value: Any) -> str:
    numbers = [] if value is None else _listed(value)
    return "" if all(type(each) is int for each in numbers) else "must be numbers of layers"


def _literal(value: Any) -> str:
    names = [] if value is None else [*value] if isinstance(value, Mapping) else _listed(value)
    if all(isinstance(name, str) and _LITERAL.fullmatch(name) for name in names):
        return ""
    return (
        "patterns are not read here: write the modules out by name, or by the ends of their paths"
    )


def _ranks(value: Any) -> str:
    values = value.values() if isinstance(value, Mapping) else () if value is None else (None,)
    return _literal(value) or next(filter(None, map(_rank, values)), "")


def _alphas(value: Any) -> str:
    values = value.values() if isinstance(value, Mapping) else () if value is None else (None,)
    return _literal(value) or next(filter(None, map(_number, values)), "")


_APPLIED: Mapping[str, Callable[[Any], str]] = {
    "peft_type": _kind,
    "r": _rank,
    "lora_alpha": _number,
    "lora_dropout": _dropout,
    "alpha_pattern": _alphas,
    "base_model_name_or_path": _name,
    "exclude_modules": _excluded,
    "init_lora_weights": _start,
    "layers_pattern": _literal,
    "layers_to_transform": _layers,
    "modules_to_save": _in_full,
    "rank_pattern": _ranks,
    "revision": _name,
    "target_modules": _targets,
    "target_parameters": _parameters,
    "task_type": _task,
    "use_rslora": _flag,
}
"""What is wrong with the value of each field that is applied; "" for nothing."""
_NEEDED = ("peft_type", "r", "lora_alpha", "target_modules")
