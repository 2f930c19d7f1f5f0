"""Every number of a configuration: what no number of its kind can be is refused by its path."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Annotated, Any, Union, get_args, get_origin

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from megatron_policy.config import PolicyConfig
from megatron_policy.config.keys import KEYS
from megatron_policy.config.section import Nested, Section
from megatron_policy.errors import ConfigError
from tests.pure.test_config import minimal

INFINITE = float("inf")
NO_NUMBERS = [
    True,
    False,
    np.bool_(True),
    INFINITE,
    -INFINITE,
    float("nan"),
    "inf",
    "-inf",
    "nan",
    "1e400",
]
OVERFLOWING = [1e300, -1e300, "1e300", 10**39, -(10**39)]


def kinds(annotation: Any) -> Iterator[tuple[type, bool]]:
    """The types of number that a field of this annotation can be, and whether there are several."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from kinds(get_args(annotation)[0])
    elif origin in (Union, types.UnionType):
        for member in get_args(annotation):
            yield from kinds(member)
    elif origin is tuple:
        yield from ((kind, True) for kind, _ in kinds(get_args(annotation)[0]))
    elif annotation in (int, float):
        yield annotation, False


def numbers(section: type[Section], prefix: str = "") -> Iterator[tuple[str, type, bool]]:
    for name, info in section.model_fields.items():
        rule = KEYS.get(prefix + name)
        if isinstance(rule, Nested) and rule.section:
            yield from numbers(rule.section, f"{prefix}{name}.")
        yield from ((prefix + name, *kind) for kind in kinds(info.annotation))


NUMBERS = list(numbers(PolicyConfig))
INTEGERS = {path for path, kind, _ in NUMBERS if kind is int}


def parse(path: str, value: Any, several: bool = False) -> PolicyConfig:
    """The least configuration with this number."""
    raw = minimal(**{"generation": {"max_new_tokens": 4}, "megatron_cfg.train_iters": 100})
    *sections, name = path.split(".")
    at = raw
    for section in sections:
        at = at.setdefault(section, {})
    at[name] = [value] if several else value
    return PolicyConfig.parse(raw)


def test_the_walk_sees_the_numbers_of_every_section() -> None:
    paths = {path for path, _, _ in NUMBERS}
    assert len(paths) == len(NUMBERS) > 50
    assert paths >= {
        "refit_timeout_s",
        "generation.temperature",
        "generation.stop_token_ids",
        "generation.top_k",
        "megatron_cfg.optimizer.lr",
        "megatron_cfg.optimizer.clip_grad",
        "megatron_cfg.scheduler.lr_warmup_init",
        "megatron_cfg.tensor_model_parallel_size",
        "dynamic_batching.train_mb_tokens",
    }


@pytest.mark.parametrize(("path", "kind", "several"), NUMBERS, ids=[path for path, *_ in NUMBERS])
def test_what_is_no_number_of_its_kind_is_refused_by_its_path(
    path: str, kind: type, several: bool
) -> None:
    for value in [*NO_NUMBERS, *OVERFLOWING, *([1.5, "1.5", "1e3"] if kind is int else [])]:
        with pytest.raises(ConfigError, match=rf"policy\.{path}(\.0)?: .*, not "):
            parse(path, value, several)
            pytest.fail(f"{path} takes {value!r}")


@given(st.sampled_from(NUMBERS), st.floats(), st.booleans())
def test_a_number_that_is_taken_is_the_one_that_was_given(
    number: tuple[str, type, bool], value: float, as_text: bool
) -> None:
    path, kind, several = number
    try:
        config = parse(path, str(value) if as_text else value, several)
    except ConfigError:
        return
    found: Any = config
    for name in path.split("."):
        found = getattr(found, name)
    found = found[0] if several else found
    if not (found is None and (path.endswith(("top_k", "capacity_factor")) or "recompute" in path)):
        assert type(found) is kind and found == value


@pytest.mark.parametrize(
    ("path", "values"),
    [
        ("megatron_cfg.optimizer.lr", [0, 1, 5e-6, "5e-6", 1e-300]),
        ("megatron_cfg.optimizer.adam_eps", [1e-8, 1e-15, "1e-8"]),
        ("megatron_cfg.optimizer.clip_grad", [0, 1, 1e9]),
        ("generation.temperature", [0, 0.0, 1e-6, 0.6, 1, 1.5, 1e6]),
        ("generation.top_k", [None, -1, 0, 1, 50]),
        ("generation.top_p", [1, 1.0, "0.95", 1e-9]),
        ("generation.min_p", [0, 0.0, 0.05, 1]),
        ("refit_timeout_s", [0.05, 1, 120, 86400, 1e6]),
        ("refit_buffer_size_gb", [1e-6, 0.5, 4]),
        ("train_global_batch_size", [1, 8.0, "512", 2**31 - 1]),
        ("seed", [0, 42, 2**32 - 1]),
    ],
)
def test_what_hosts_and_people_write_is_taken(path: str, values: list[Any]) -> None:
    for value in values:
        parse(path, value)


@pytest.mark.parametrize("text", ["5e-6", "5.0e-06", "5E-6"])
def test_a_number_that_yaml_reads_as_text_is_the_number(text: str) -> None:
    config = parse("megatron_cfg.optimizer.lr", yaml.safe_load(text))
    assert config.megatron_cfg.optimizer.lr == 5e-6


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("megatron_cfg.tensor_model_parallel_size", True, "a number, not a boolean, not True"),
        ("megatron_cfg.optimizer.lr", INFINITE, "finite number, not inf"),
        ("megatron_cfg.optimizer.lr", 1e300, r"lie between 0 and 1e\+06, not 1e\+300"),
        ("megatron_cfg.optimizer.adam_eps", 1e-300, r"lie between 1.2e-38 and 1e\+06, not 1e-300"),
        ("generation.temperature", INFINITE, "finite number, not inf"),
        (
            "generation.temperature",
            1e-9,
            r"0, the likeliest token, or lie between 1e-06 and 1e\+06",
        ),
        ("refit_timeout_s", INFINITE, "finite number, not inf"),
        ("refit_timeout_s", 1e300, r"lie between 0.001 and 1e\+06, not 1e\+300"),
        ("checkpoint_timeout_s", 1e-9, r"lie between 0.001 and 1e\+06, not 1e-09"),
        ("seed", 2**32, "less than or equal to 4294967295"),
        ("generation.top_k", True, "a number, not a boolean"),
        ("generation.top_k", -2, "greater than 0, not -2"),
        ("generation.top_k", 2.5, "valid integer"),
        ("generation.top_p", 0, "greater than 0, not 0"),
        ("generation.top_p", 1.01, "less than or equal to 1, not 1.01"),
        ("generation.top_p", float("nan"), "finite number, not nan"),
        ("generation.min_p", -0.1, "greater than or equal to 0, not -0.1"),
        ("generation.min_p", 2, "less than or equal to 1, not 2"),
        ("generation.min_p", "some", "valid number"),
        ("generation.filter_logprobs", "perhaps", "valid boolean"),
        ("generation.stop_token_ids", [3, True], "a number, not a boolean"),
    ],
)
def test_a_refusal_says_what_can_be_given(path: str, value: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"policy\.{path}.*: .*{said}"):
        parse(path, value)


@pytest.mark.parametrize("path", ["max_grad_norm", "megatron_cfg.optimizer.clip_grad"])
@pytest.mark.parametrize("value", [INFINITE, "inf", ".inf"])
def test_no_limit_of_the_norm_is_said_to_be_zero(path: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{path}: .*0 means that there is no limit"):
        parse(path, value)
