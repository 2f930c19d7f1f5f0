"""Resolves a model's name to a directory: a local one, or a Hugging Face hub repository."""

from __future__ import annotations

import re
from pathlib import Path

from megatron_policy.converters.files.contained import expanded
from megatron_policy.errors import ConfigError

_REPOSITORY = re.compile(r"(?!\.)[\w.-]+(/(?!\.)[\w.-]+)?", re.ASCII)
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken"]


def locate(model: str | Path, files: list[str] | None = None) -> Path:
    """The checkpoint's directory: `model` itself, or that hub repository, fetched if needed.

    `files` are patterns of the file names to fetch from a repository; by default all that are read.
    A name whose first part is a local directory is more likely a typo in a path: the hub is not
    asked, but a cached repository is used. ConfigError when there is neither: immediately for what
    can only be a path, and where the hub cannot be reached.
    """
    path = expanded(model)
    if path.is_dir():
        return path
    if path.exists():
        raise ConfigError(f"model {str(model)!r} is not a directory, but a file")
    is_name = _REPOSITORY.fullmatch(str(model)) is not None
    slip = path.parent != Path() and path.parent.is_dir()
    if slip and not is_name:
        raise ConfigError(
            f"model {str(model)!r} is not a directory: {path.parent} has {_names(path)}"
        )
    if not is_name:
        raise ConfigError(
            f"model {str(model)!r} is not a directory, nor the name of a hub repository"
        )
    from huggingface_hub import snapshot_download

    try:
        fetched = snapshot_download(
            str(model),
            allow_patterns=files or _HUB_FILES,
            ignore_patterns=["*/*"],
            local_files_only=slip,
        )
    except (OSError, ValueError) as error:
        if slip:
            raise ConfigError(
                f"model {str(model)!r} is not a directory: {path.parent} has {_names(path)}. If a "
                f"hub repository is meant, fetch it first: hf download {model}"
            ) from error
        raise no_such_model(model, error) from error
    return Path(fetched)


def no_such_model(model: str | Path, error: Exception) -> ConfigError:
    """The error for a name that is neither a directory nor an available repository."""
    return ConfigError(f"model {str(model)!r} is not a directory here, nor on the hub: {error}")


def _names(beside: Path) -> str:
    names = sorted(path.name for path in beside.parent.iterdir() if path.name[0] != ".")
    return ", ".join(names[:10]) + (", ..." if len(names) > 10 else "") if names else "nothing"
