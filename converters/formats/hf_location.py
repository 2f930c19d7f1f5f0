"""Resolves a model's name to a directory: a local one, or a Hugging Face hub repository."""

from __future__ import annotations

import glob
import re
from pathlib import Path

from megatron_policy.converters.files.contained import expanded, names_in, nearest
from megatron_policy.errors import ConfigError

from .hf_names import side_names

_REPOSITORY = re.compile(r"(?!\.)[\w.-]+(/(?!\.)[\w.-]+)?", re.ASCII)
SIDE_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py")
"""Patterns of the files without weights; Python files come with some tokenizers, and are copied."""
_HUB_FILES = ["*.safetensors", *SIDE_FILES]
_SHOWN = 10


def locate(model: str | Path, files: list[str] | None = None) -> Path:
    """The checkpoint's directory: `model` itself, or that hub repository, fetched if needed.

    `files` are patterns of the file names to fetch from a repository; by default all that are read.
    The hub is asked for `owner/name` only, and once, within HF_HUB_ETAG_TIMEOUT seconds. A name
    without an owner, whose owner is a local directory, or that nearly is a local path, is more
    likely a typo in one: the hub is not asked, but a cached repository is used. ConfigError when
    there is neither, with what is near: immediately for what can only be a path.
    """
    path = expanded(model)
    if path.is_dir():
        return path
    if path.exists():
        raise ConfigError(f"model {str(model)!r} is not a directory, but a file{instead_of(path)}")
    is_name = _REPOSITORY.fullmatch(str(model)) is not None
    if not is_name:
        raise ConfigError(_not_here(model, path, is_name))
    slip = path.parent == Path() or path.parent.is_dir() or nearest(path, directory=True).is_dir()
    listed = [] if slip else _listed(str(model))
    # Files in folders that do not belong to the model. A pattern with an asterisk would also match
    # slashes.
    names = [] if isinstance(listed, Exception) else listed
    own = set(side_names(names))
    others = [glob.escape(name) for name in names if "/" in name and name not in own]
    unreachable = listed if isinstance(listed, Exception) else None
    from huggingface_hub import snapshot_download

    try:
        fetched = snapshot_download(
            str(model),
            allow_patterns=files or _HUB_FILES,
            ignore_patterns=others,
            local_files_only=slip or unreachable is not None,
        )
    except (OSError, ValueError) as error:
        if slip:
            raise ConfigError(_not_here(model, path, is_name)) from None
        raise _no_such_model(model, unreachable or error) from None
    return Path(fetched)


def _no_such_model(model: str | Path, error: Exception) -> ConfigError:
    """The error for a name that is neither a directory nor an available repository."""
    from huggingface_hub.errors import GatedRepoError, OfflineModeIsEnabled, RepositoryNotFoundError

    said = f"model {str(model)!r} is not a directory here, "
    if isinstance(error, GatedRepoError):
        said += "and on the hub it is gated: ask for access there, then run hf auth login"
    elif isinstance(error, RepositoryNotFoundError):
        said += "and the hub has no such repository, or not for this login (hf auth login)"
    elif isinstance(error, OfflineModeIsEnabled):
        said += "nor in the hub's cache, and HF_HUB_OFFLINE forbids to ask the hub: unset it"
    else:
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        said += (
            f"nor in the hub's cache, and the hub cannot be asked ({why}): give the path of a "
            "directory, or repair the connection"
        )
    return ConfigError(said)


def instead_of(file: Path) -> str:
    """What to give in place of a file where a directory is asked for, after a colon; "" if that is
    not clear.
    """
    if file.suffix in (".yaml", ".yml"):
        return ": `megatron-policy inspect-config` reads configurations"
    beside = names_in(file.parent, directories=False)
    return f": give its directory, {file.parent}" if "config.json" in beside else ""


def _listed(model: str) -> list[str] | Exception:
    """The files of the repository, or why the hub does not have it. Asked once, without retries."""
    from huggingface_hub import HfApi, constants

    try:
        info = HfApi().model_info(model, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except Exception as error:  # the HTTP client's own, which differ between versions of the hub's
        return error
    return [file.rfilename for file in info.siblings or ()]


def _not_here(model: str | Path, path: Path, is_name: bool) -> str:
    """What is wrong with a path that does not exist, with what is near."""
    parent, near = path.parent, nearest(path, directory=True)
    near = nearest(path, directory=False) if near == path else near
    said = f"model {str(model)!r} is not a directory"
    if near != path:
        said += f": did you mean {str(near)!r}?"
    elif not parent.is_dir():
        said += f", nor the name of a hub repository (owner/name): there is no {parent}"
    else:
        where = "this directory" if parent == Path() else str(parent)
        names = names_in(parent, directories=True) or names_in(parent, directories=False)
        has = ", ".join(names[:_SHOWN]) + ", ..." * (len(names) > _SHOWN) or "nothing"
        said += f": {where} has {has}."
    if is_name and path.parent != Path():
        said += f" If a hub repository is meant, fetch it first: hf download {model}"
    elif is_name:
        said += " A hub repository is named owner/name"
    return said
