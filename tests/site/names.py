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

TASKS: Mapping[str, tuple[str, ...]] = {
    "Train": (
        "train",
        "dry_run",
        "begin_train_step",
        "train_microbatch",
        "finish_train_step",
        "abort_train_step",
    ),
    "Score": (
        "logprobs",
        "get_logprobs",
        "reference_logprobs",
        "get_reference_policy_logprobs",
        "reference",
        "use_reference_model",
        "entropy",
        "get_entropy",
        "topk_logits",
        "get_topk_logits",
        "values",
        "get_values",
        "score",
    ),
    "Generate": ("generate", "prepare_for_generation", "finish_generation"),
    "Export, and refit engines": (
        "export_hf",
        "export_peft",
        "export",
        "refit",
        "prepare_refit_info",
        "prepare_info_for_collective",
        "init_collective",
        "get_refit_secret",
        "broadcast_weights_for_collective",
        "stream_weights_via_ipc_zmq",
        "get_refit_addresses",
        "prepare_weights_for_ipc",
        "get_weights_ipc_handles",
        "get_refit_manifest",
    ),
    "Save and resume": (
        "save_checkpoint",
        "finalize_async_save",
        "load_checkpoint",
        "get_load_report",
    ),
    "Share the device": (
        "prepare_for_training",
        "finish_training",
        "prepare_for_lp_inference",
        "finish_inference",
        "offload_before_refit",
        "offload_after_refit",
        "offload_to_cpu",
        "get_free_memory_bytes",
    ),
    "Watch": (
        "summary",
        "report",
        "write_metrics",
        "profile",
        "start_gpu_profiling",
        "stop_gpu_profiling",
    ),
    "Look inside": ("named_parameters", "decoder_layers", "groups", "worker_group"),
    "End": ("shutdown",),
}
"""The methods of both policies by what they are for, the first ones first; a further method is
among other names."""
OTHER = "Other names"
CLASS_ALONE = """\
      members: []
      inherited_members: false
      merge_init_into_class: true"""
GROUPED = ("megatron_policy.MegatronPolicy", "megatron_policy.Policy")
"""The classes whose page shows their methods by task."""


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
    return dict(sorted(entries.items(), key=lambda entry: entry[0] not in GROUPED))


def pages() -> Mapping[str, str]:
    """The text of each page, by its path in the site."""
    return {
        f"{FOLDER}/{room}.md": "\n\n".join(
            [f"# {title_of(room)}", *(_entry(path, members) for path, members in entries.items())]
        )
        + "\n"
        for room, entries in shown().items()
    }


def title_of(room: str) -> str:
    return TITLES.get(room, room)


def by_task(members: tuple[str, ...]) -> dict[str, list[str]]:
    """The methods of a policy by what they are for; all of them, each once."""
    tasks = {task: [name for name in names if name in members] for task, names in TASKS.items()}
    known = {name for names in tasks.values() for name in names}
    tasks[OTHER] = [name for name in members if name not in known]
    return {task: names for task, names in tasks.items() if names}


def _by_task(path: str, members: tuple[str, ...]) -> str:
    """A policy's class: a table of its tasks, its constructor and attributes, then the methods."""
    module, _, name = path.rpartition(".")
    tasks = by_task(members)
    rows = [
        f"| {task} | {', '.join(f'[`{each}`](#{path}.{each})' for each in names)} |"
        for task, names in tasks.items()
    ]
    parts = [
        "\n".join(["| to | methods |", "| --- | --- |", *rows]),
        f"::: {path}\n    options:\n{CLASS_ALONE}",
        f"`from {module} import {name}`",
    ]
    for task, names in tasks.items():
        parts.append(f"### {task}: `{name}`")
        parts += [f"::: {path}.{each}\n    options:\n      heading_level: 4" for each in names]
    return "\n\n".join(parts)


def _entry(path: str, members: tuple[str, ...]) -> str:
    if path in GROUPED:
        return _by_task(path, members)
    module, _, name = path.rpartition(".")
    if name == "__version__":
        return "## `__version__`\n\nThe package's version, as a string."
    options = "\n    options:\n      members: [parse, from_yaml]" if name == WITHOUT_FIELDS else ""
    return f"::: {path}{options}\n\n`from {module} import {name}`"
