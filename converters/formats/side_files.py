"""The files of a model's directory besides its weights, and copies of them in every directory that
is written: config, generation settings, and the tokenizer, which is the one that a policy was given
if it was given one.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from megatron_policy.converters.config_fields.quantisation import SECTION, Scheme
from megatron_policy.converters.files.contained import inside
from megatron_policy.converters.files.publishing import copy_file, write_file
from megatron_policy.errors import ConversionError

from .hf_config import CONFIG, scheme_in
from .hf_location import locate
from .hf_names import is_of_tokenizer, side_names
from .hf_overrides import with_overrides, without_quantisation

_log = logging.getLogger(__name__)

MOST_FILES = 10_000
"""More than any model has beside its weights."""
_COMPARED = ("chat_template", "eos_token_id", "pad_token_id", "bos_token_id")


@dataclass(frozen=True)
class SideFiles:
    """The files of a model besides its weights, by their names relative to its directory."""

    copied: Mapping[str, Path]
    """Those that are copied as they are."""
    changed: Mapping[str, bytes]
    """The content of those that describe what is written in other words than the model's."""

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        found = sum(path.stat().st_size for path in self.copied.values())
        return found + sum(map(len, self.changed.values()))

    def content(self, name: str) -> bytes:
        """The content of the file of that name."""
        return self.changed[name] if name in self.changed else self.copied[name].read_bytes()


def side_paths(root: Path) -> dict[str, Path]:
    """Every file of the directory `root` that belongs to its model besides the weights, by its
    relative name; those in folders are among them.

    ConversionError for a link that leads out of the directory, since its target would be copied,
    and for a directory of more than `MOST_FILES` such files.
    """
    return {name: inside(root, name) for name in side_names(_names(root))}


def side_files(model: str | Path, overrides: Mapping[str, Any] | None = None) -> SideFiles:
    """What a directory with weights of `model` needs besides: a directory, or a hub repository as
    `locate` takes it. The weights are not quantised: a config.json that says how they are loses
    that. It has the values of `overrides` in place of its own.
    """
    root = locate(model)
    paths, changed = side_paths(root), dict[str, bytes]()
    if scheme := scheme_in(root):
        changed[CONFIG] = without_quantisation(paths[CONFIG].read_bytes())
        _tell(root, scheme)
    if overrides:
        content = changed.get(CONFIG) or paths[CONFIG].read_bytes()
        changed[CONFIG] = with_overrides(content, overrides)
    return SideFiles({n: path for n, path in paths.items() if n not in changed}, changed)


def write_side_files(files: SideFiles, directory: Path, tokenizer: Any = None) -> None:
    """Write them to `directory`, file by file, with those of `tokenizer` in place of the model's
    own. A tokenizer that cannot be saved is not written: a warning names how it differs.
    """
    is_saved = save_tokenizer(tokenizer, directory)
    for name, path in files.copied.items():
        if not (is_saved and is_of_tokenizer(name)):
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            copy_file(path, directory / name)
    for name, content in files.changed.items():
        write_file(directory / name, content)
    if tokenizer is not None and not is_saved:
        _warn_of_differences(tokenizer, directory)


def save_tokenizer(tokenizer: Any, directory: Path) -> bool:
    """Write the tokenizer's files to `directory`; whether it can be saved. OSError if the disk
    cannot take it.
    """
    save = getattr(tokenizer, "save_pretrained", None)
    if save is None:
        return False
    directory.mkdir(parents=True, exist_ok=True)
    before = set(_names(directory))
    try:
        save(str(directory))
    except OSError:
        raise
    except Exception as error:  # whatever a class of the user's raises
        for name in set(_names(directory)) - before:
            (directory / name).unlink()
        _log.warning("the tokenizer cannot be saved (%s: %s)", type(error).__name__, error)
        return False
    return True


def _names(root: Path) -> Iterator[str]:
    """The relative names of the files below a directory, without hidden ones and what is in folders
    that contain themselves by a link.
    """
    waiting, seen = [("", frozenset([os.path.realpath(root)]))], 0
    while waiting:
        folder, above = waiting.pop()
        try:
            with os.scandir(root / folder) as found:
                entries = list(found)
        except OSError as error:
            raise ConversionError(f"{root / folder} cannot be read: {error.strerror}") from error
        for entry in entries:
            seen += 1
            if seen > MOST_FILES:
                raise ConversionError(
                    f"{root} has more than {MOST_FILES:,} files and folders, which would all be "
                    "copied beside the weights: give a directory that has the model's files alone"
                )
            real = os.path.realpath(entry.path)
            if entry.name.startswith(".") or real in above:
                continue
            if entry.is_dir():
                waiting.append((f"{folder}{entry.name}/", above | {real}))
            elif entry.is_file():
                yield folder + entry.name


def _warn_of_differences(tokenizer: Any, directory: Path) -> None:
    """Say how a tokenizer that is not saved differs from the one in `directory`, if any."""
    if not any(is_of_tokenizer(name) for name in _names(directory)):
        return
    from transformers import AutoTokenizer

    try:
        own = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    except Exception as error:  # the files are the user's, and can raise anything
        why = f"they could not be read to compare them ({type(error).__name__}: {error})"
        _log.warning("the given tokenizer cannot be saved; copies have the model's files: %s", why)
        return
    given = {name: getattr(tokenizer, name, None) for name in _COMPARED}
    differences = [
        f"{name} is {value!r:.60} in it and {getattr(own, name, None)!r:.60} in the files"
        for name, value in given.items()
        if value is not None and value != getattr(own, name, None)
    ]
    if differences:
        _log.warning(
            "the given tokenizer cannot be saved (it has no usable save_pretrained), so copies "
            "have the model's files, which differ: %s",
            "; ".join(differences),
        )


@cache
def _tell(root: Path, scheme: Scheme) -> None:
    """Say once what copies of a quantised checkpoint's config.json lack."""
    _log.warning(
        "%s is quantised to %s; its weights are read and exported as bfloat16, "
        "and copies of its config.json leave %s out",
        root,
        scheme,
        SECTION,
    )
