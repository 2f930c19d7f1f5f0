"""Loads objects that installed packages add through an entry point group; errors name them."""

from __future__ import annotations

from collections.abc import Collection
from importlib.metadata import EntryPoint, entry_points
from typing import TypeVar

from megatron_policy.errors import ConversionError

T = TypeVar("T")


def names(group: str) -> set[str]:
    """The names that installed packages give in an entry point group."""
    return {entry.name for entry in entry_points(group=group)}


def find(group: str, name: str, builtin: Collection[str]) -> EntryPoint | None:
    """The entry point of that name; None if no package has it.

    ConversionError if several packages have it, or if one does and the name is in `builtin`: which
    one counts would depend on the order of the path.
    """
    found = [entry for entry in entry_points(group=group) if entry.name == name]
    if found and name in builtin:
        raise ConversionError(
            f"{described(found[0])} has a built-in name: rename it, or uninstall its package"
        )
    if len(found) > 1:
        raise ConversionError(
            f"{described(found[0])} has the same name as one in {_package(found[1])}: "
            "uninstall one of the two"
        )
    return found[0] if found else None


def load(entry: EntryPoint, kind: type[T]) -> T:
    """The object of an entry point; ConversionError unless it imports and is a `kind`."""
    try:
        value = entry.load()
    except Exception as error:  # importing a third-party package can raise anything
        raise ConversionError(
            f"{described(entry)} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(value, kind):
        raise ConversionError(
            f"{described(entry)} is not a {kind.__name__} but a {type(value).__name__}"
        )
    return value


def described(entry: EntryPoint) -> str:
    """Which entry point of which package, for messages."""
    return f"entry point {entry.name} = {entry.value} ({entry.group}) in {_package(entry)}"


def _package(entry: EntryPoint) -> str:
    if entry.dist is None:
        return "an unnamed package"
    return f"package {entry.dist.metadata['Name']} {entry.dist.version}"
