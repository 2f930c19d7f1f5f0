"""Entry point of the configuration: turns a mapping or YAML into a complete, consistent
PolicyConfig.

Whether a layout fits model and ranks is checked in layout.py.
"""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megatron_policy.config.classify import classify
from megatron_policy.config.composed import compose
from megatron_policy.config.resolve import check, complete
from megatron_policy.config.section import asks_for_nothing, find_differences
from megatron_policy.config.sections import PolicySection
from megatron_policy.errors import ConfigError

_log = logging.getLogger(__name__)


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 200


class PolicyConfig(PolicySection):
    """A policy: model, batch sizes in samples, and one section per concern.

    Create it with `parse` or `from_yaml`. It can be pickled, and
    `PolicyConfig.parse(config.model_dump())` restores it.
    """

    def __repr_args__(self) -> Iterator[tuple[str, Any]]:
        """What differs from the defaults, and from what follows from the other keys."""
        required = [name for name, info in type(self).model_fields.items() if info.is_required()]
        bare = type(self)(**{name: getattr(self, name) for name in required})
        return find_differences(self, complete(bare))

    @classmethod
    def parse(cls, raw: Mapping[str, Any] | PolicyConfig) -> PolicyConfig:
        """Check a host's `policy` section and fill in what follows from other keys.

        Raises ConfigError for unknown keys, wrong types, contradictions, and keys that ask for
        what is not supported.
        """
        if isinstance(raw, PolicyConfig):
            config = raw
        elif isinstance(raw, Mapping):
            classified = classify(raw, cls)
            if classified.ignored:
                _log.info("keys without effect: %s", ", ".join(sorted(classified.ignored)))
            for path, why in classified.warned.items():
                _log.warning("policy.%s has no effect: %s", path, why)
            config = _validate(cls, classified.kept)
            unknown = classified.ignored.keys() & set(config.ignore_unknown_keys)
            if unknown:
                _log.warning("unknown keys, ignored as requested: %s", ", ".join(sorted(unknown)))
        else:
            raise ConfigError(
                f"a policy's configuration must be a mapping, not a {type(raw).__name__}"
            )
        config = complete(config)
        check(config)
        return config

    @classmethod
    def from_yaml(cls, path: str | PathLike[str], overrides: Sequence[str] = ()) -> PolicyConfig:
        """Parse a YAML file: its section `policy`, as in configs/ and in files of NeMo RL, whose
        other sections are not read, or the section's keys alone.

        `overrides` are like "megatron_cfg.tensor_model_parallel_size=2". `defaults` and `${...}`
        need OmegaConf. ConfigError for what `parse` refuses, and for a file that is neither.
        """
        composed = compose(Path(path), overrides)
        if composed.others:
            _log.info("%s: sections that are not read: %s", path, ", ".join(composed.others))
        return cls.parse(composed.policy)


def least_section(
    model_name: str, precision: str, rows: int, megatron: Mapping[str, Any], **others: Any
) -> dict[str, Any]:
    """The section `policy` of a policy under Megatron-Core, with these keys of `megatron_cfg`, that
    takes one row a microbatch and `rows` a step unless `others` say otherwise.
    """
    return {
        "model_name": model_name,
        "precision": precision,
        "train_global_batch_size": rows,
        "train_micro_batch_size": 1,
        **others,
        "megatron_cfg": {"enabled": True, **megatron},
    }


def ignored_keys(raw: Mapping[str, Any]) -> dict[str, str]:
    """The keys of a `policy` mapping that have no effect here: path below `policy` -> reason. First
    those that would change memory, then those that ask for something, then the others.
    """
    found = classify(raw, PolicyConfig)

    def rank(path: str) -> tuple[bool, bool, str]:
        value: Any = raw
        for part in path.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return path not in found.warned, asks_for_nothing(value), path

    return {path: found.ignored[path] for path in sorted(found.ignored, key=rank)}


def _validate(cls: type[PolicyConfig], kept: dict[str, Any]) -> PolicyConfig:
    try:
        return cls.model_validate(kept)
    except ValidationError as error:
        lines = []
        for item in error.errors():
            path = ".".join(str(part) for part in item["loc"])
            if item["type"] == "missing":
                lines.append(f"policy.{path} is missing and has no default: give it a value")
                continue
            message = item["msg"].removeprefix("Value error, ").replace("a valid tuple", "a list")
            lines.append(f"policy.{path}: {message}, not {_show(item['input'])}")
        raise ConfigError("\n".join(lines)) from None


def _show(value: Any) -> str:
    """A value for a message, of bounded length."""
    try:
        return _SHORT.repr(value)
    except ValueError:  # an integer with more digits than Python converts
        return f"a {type(value).__name__} too long to write"
