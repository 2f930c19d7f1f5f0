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
_STARTS = (True, False, "gaussian", "eva", "orthogonal")
"""Ways to draw the first values that leave the base as it is."""
_HEADS = ("classifier", "score")
"""Names under which PEFT looks for a scalar head; models of transformers call it the latter."""
_OF_HEADS = ("SEQ_CLS", "TOKEN_CLS")
"""Tasks of models with a scalar head in place of a language model's."""
Number = TypeVar("Number", int, float)

_ANY = r".*\."
"""What PEFT writes before the names of parameters whose ranks it has added up."""
_LITERAL = re.compile(rf"(\^|{re.escape(_ANY)})?[\w.-]+", re.ASCII)
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

    def find_scale(self, module: str) -> tuple[int, float]:
        """Rank and alpha of a module's adapter; its scale is `alpha / rank`."""
        rank = _look_up(self.ranks, module, self.rank)
        alpha = _look_up(self.alphas, module, self.alpha)
        return rank, alpha * math.sqrt(rank) if self.rank_stabilised else alpha

    def names(self, module: str) -> bool:
        """Whether PEFT adapts the module; of a pattern, that is assumed."""
        if _is_listed(self.excluded, module):
            return False
        if self.targets is None or module in self.targets:
            return True
        return _is_listed(self.targets, module) and self._is_in_layers(module)

    def match_parameters(self, name: str, legal: Iterable[str]) -> list[str]:
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


def read_settings(config: Mapping[str, Any], where: object) -> PeftSettings:
    """The settings of the adapters in the directory `where`. ConversionError naming every field
    with which they are of another kind.
    """
    problems = [
        f"{use.name}={shown(use.value)}: {use.why}"
        for use in classify_fields(config)
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
        layers=None if layers in (None, []) else frozenset(_as_list(layers)),
        layer_lists=frozenset(_as_list(lists)),
        parameters=tuple(config.get("target_parameters") or ()),
        has_head=bool(config.get("modules_to_save")),
        of_head=bool(config.get("modules_to_save")) or config.get("task_type") in _OF_HEADS,
        ranks=config.get("rank_pattern") or {},
        alphas={name: float(a) for name, a in (config.get("alpha_pattern") or {}).items()},
    )


def classify_fields(config: Mapping[str, Any]) -> Iterator[FieldUse]:
    """Classify each field of an `adapter_config.json`, in its order; required fields are reported
    even when absent.
    """
    for name in dict.fromkeys((*config, *_NEEDED)):
        value = config.get(name)
        checks = [(is_legal, why) for names, is_legal, why in _CHECKS if name in names.split()]
        if checks:
            is_null = value is None and name not in _NEEDED
            wrong = (why for is_legal, why in checks if not (is_null or is_legal(value)))
            problem = next(wrong, "")
            yield FieldUse(name, value, REFUSED if problem else TRANSLATED, problem)
        elif name in _IGNORED:
            yield FieldUse(name, value, IGNORED_FIELD, _IGNORED[name])
        elif value in _PLAIN:
            yield FieldUse(name, value, IGNORED_FIELD, "it has no effect with this value")
        else:
            yield FieldUse(name, value, REFUSED, _REMEDIES.get(name, _UNKNOWN))


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _is_listed(names: frozenset[str], module: str) -> bool:
    """Whether the module's path, or what follows a dot of it, is among the names."""
    while module:
        if module in names:
            return True
        module = module.partition(".")[2]
    return False


def _look_up(values: Mapping[str, Number], module: str, default: Number) -> Number:
    for name, value in values.items():
        whole, end = name.startswith("^"), name.removeprefix(_ANY)
        if module == name.removeprefix("^") or (not whole and module.endswith(f".{end}")):
            return value
    return default


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and -_MOST < value < _MOST


def _is_rank(value: Any) -> bool:
    return type(value) is int and 0 < value < _MOST


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _are_literal(value: Any) -> bool:
    names = [*value] if isinstance(value, Mapping) else _as_list(value)
    return all(isinstance(name, str) and _LITERAL.fullmatch(name) for name in names)


def _have(values: Any, is_legal: Callable[[Any], bool]) -> bool:
    return isinstance(values, Mapping) and all(map(is_legal, values.values()))


_A_NUMBER, _A_RANK = "must be a number", "must be a whole number, 1 or more"
_TASKS = ("CAUSAL_LM", *_OF_HEADS)
_CHECKS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("peft_type", lambda v: v == "LORA", "only 'LORA' is read: " + _MERGED),
    ("r", _is_rank, _A_RANK),
    ("lora_alpha", _is_number, _A_NUMBER),
    ("lora_dropout", lambda v: _is_number(v) and 0 <= v < 1, "must be in 0 .. 1"),
    (
        "alpha_pattern layers_pattern rank_pattern",
        _are_literal,
        "patterns are not read here: write the modules out by name, or by the ends of their paths",
    ),
    ("layers_pattern", lambda v: not isinstance(v, Mapping), "must be names of lists of layers"),
    ("alpha_pattern", lambda v: _have(v, _is_number), _A_NUMBER),
    ("rank_pattern", lambda v: _have(v, _is_rank), _A_RANK),
    ("base_model_name_or_path revision", lambda v: isinstance(v, str), "must be a name"),
    (
        "target_modules",
        lambda v: v is not None,
        "PEFT adapts modules of its own choice then, and no others: write the modules out",
    ),
    (
        "exclude_modules",
        lambda v: not (isinstance(v, str) and v),
        "a pattern is not read here: list the modules by name, or leave it out",
    ),
    (
        "exclude_modules target_modules",
        lambda v: isinstance(v, str) or _are_names(v),
        "must be names of modules, or a pattern",
    ),
    ("target_parameters", _are_names, "must be names of parameters"),
    (
        "init_lora_weights",
        lambda v: any(v is each or (isinstance(each, str) and v == each) for each in _STARTS),
        "it changes the base: save them with path_initial_model_for_weight_conversion first",
    ),
    (
        "layers_to_transform",
        lambda v: all(type(each) is int for each in _as_list(v)),
        "must be numbers of layers",
    ),
    (
        "modules_to_save",
        lambda v: not v or (isinstance(v, list) and all(each in _HEADS for each in v)),
        "of modules that they come with, only a scalar head is read: " + _MERGED,
    ),
    (
        "task_type",
        lambda v: v in _TASKS,
        "adapters of other models than 'CAUSAL_LM', 'SEQ_CLS', 'TOKEN_CLS' are not supported",
    ),
    ("use_rslora", lambda v: v in (False, True), "must be true or false"),
)
"""The fields that are applied: names, whether a value is legal, and what is wrong with others."""
_NEEDED = ("peft_type", "r", "lora_alpha", "target_modules")
"""Fields that have to be there; all others can also be null."""
