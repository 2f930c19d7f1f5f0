"""The config.json of a Hugging Face checkpoint, with the defaults of its transformers class.

Knows no weights and no Megatron-Core.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_policy.errors import ConfigError

from .registry import family_of

_UNREADABLE = (OSError, ValueError, TypeError, RecursionError)
"""What transformers raises over a file that is no config."""


def read_config(model: str | Path) -> dict[str, Any]:
    """Every field of the model's HF config, class defaults included.

    Fields that any transformers model has are left out where they stand at their common default.
    The config of an added family that transformers does not know is taken as it stands in the file.
    ConfigError when there is no such model, or transformers cannot read its config; ConversionError
    for a model_type that neither transformers nor an installed package knows.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

    config = written_config(model)
    kind = config.get("model_type")
    if not isinstance(kind, str):
        raise _unreadable(model, ValueError(f"its model_type is {kind!r}, which names no family"))
    if kind not in CONFIG_MAPPING:
        family_of(kind)  # importing a package that adds the family may tell transformers of it
    if kind in CONFIG_MAPPING:
        try:
            config = AutoConfig.from_pretrained(_source(model)).to_dict()
        except (*_UNREADABLE, KeyError, StrictDataclassError) as error:
            raise _unreadable(model, error) from error
    common = PretrainedConfig().to_dict()
    common.pop("tie_word_embeddings", None)  # says what the model is, so it always counts
    return {name: v for name, v in config.items() if name not in common or v != common[name]}


def written_config(model: str | Path) -> dict[str, Any]:
    """The fields as config.json has them; ConfigError when it is not there or unreadable."""
    path = Path(model).expanduser()
    if path.is_dir() and not (path / "config.json").is_file():
        raise ConfigError(f"{path} has no config.json: it is not a Hugging Face checkpoint")
    from transformers import PretrainedConfig

    try:
        config, _ = PretrainedConfig.get_config_dict(_source(model))
    except _UNREADABLE as error:
        raise _unreadable(model, error) from error
    if not isinstance(config, Mapping):
        raise ConfigError(f"{path / 'config.json'} cannot be read: it is no JSON object")
    return dict(config)


def no_such_model(model: str | Path, error: Exception) -> ConfigError:
    """The error for a name that is neither a directory nor a repository that can be had."""
    return ConfigError(f"model {str(model)!r} is no directory here, nor on the hub: {error}")


def _source(model: str | Path) -> str:
    path = Path(model).expanduser()
    return str(path if path.is_dir() else model)


def _unreadable(model: str | Path, error: Exception) -> ConfigError:
    path = Path(model).expanduser()
    if not path.is_dir():
        return no_such_model(model, error)
    return ConfigError(f"{path / 'config.json'} cannot be read: {error}")
