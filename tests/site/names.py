"""The pages of public names: one for each room of the package, filled from docstrings."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import megatron_policy
from tests.public_api import FILE

FOLDER = "reference/names"
TITLES = {
    "policy": "MegatronPolicy: a policy on each rank",
    "workers": "Policy: a driver under Ray",
    "batch": "Batches",
    "config": "Configuration",
    "interfaces": "Protocols: losses, policies, engines, hosts",
    "refit": "Refits",
    "convert": "Conversion",
    "converters": "Model families",
    "errors": "Errors",
    "hosts": "Hosts and launchers",
    "lm_head": "The head",
    "coordination": "Coordination",
    "device": "Devices",
    "version": "Version",
}
"""What the page of a room is called, in the order of the menu; other rooms follow, by name."""
WITHOUT_FIELDS = "PolicyConfig"
"""Its keys have their own page."""


def public() -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """(module, name, members) of all that tests/public_api.txt lists."""
    module, name, members = "", "", []
    for line in [*FILE.read_text(encoding="utf-8").splitlines(), "end"]:
        if not line.startswith("    ") and name:
            yield module, name, tuple(members)
            name, members = "", []
        if not line.startswith(" "):
            module = line.removeprefix("module ") if line.startswith("module ") else ""
        elif module and line.startswith("    "):
            members.append(re.split(r"[:(]", line.strip())[0])
        elif module:
            name = re.split(r"[(: ]", line.strip().removeprefix("class "))[0]


def room_of(module: str, name: str) -> str:
    """The room whose page has a name; one that the package exports is at home in another module."""
    home = megatron_policy._HOME.get(name, "version") if module == "megatron_policy" else ""
    return home.split(".")[0] or module.split(".")[1]


def shown() -> Mapping[str, dict[str, tuple[str, ...]]]:
    """Each room's names by their full paths, with their members; one that two modules export is
    shown once, as the package's.
    """
    rooms: dict[str, dict[str, tuple[str, ...]]] = {room: {} for room in TITLES}
    for module, name, members in public():
        entries = rooms.setdefault(room_of(module, name), {})
        if all(each.rpartition(".")[2] != name for each in entries):
            entries[f"{module}.{name}"] = members
    return {room: _leads(entries) for room, entries in rooms.items() if entries}


def _leads(entries: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """With the name that a page is for first."""
    first = ("megatron_policy.MegatronPolicy", "megatron_policy.Policy")
    return dict(sorted(entries.items(), key=lambda entry: entry[0] not in first))


def pages() -> Mapping[str, str]:
    """The text of each page, by its path in the site."""
    return {
        f"{FOLDER}/{room}.md": "\n\n".join([f"# {title_of(room)}", *map(_entry, entries)]) + "\n"
        for room, entries in shown().items()
    }


def title_of(room: str) -> str:
    """The title of a room's page."""
    return TITLES.get(room, room)


def _entry(path: str) -> str:
    module, _, name = path.rpartition(".")
    if name == "__version__":
        return "## `__version__`\n\nThe package's version, as a string."
    options = "\n    options:\n      members: [parse, from_yaml]" if name == WITHOUT_FIELDS else ""
    return f"::: {path}{options}\n\n`from {module} import {name}`"
