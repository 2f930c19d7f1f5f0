"""The public interface as text: names, signatures, entry points, options of the commands
with their defaults and help.

`python -m tests.public_api` writes tests/public_api.txt anew; change it on purpose only.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from dataclasses import is_dataclass
from enum import Enum
from functools import cached_property
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import megatron_policy

FILE = Path(__file__).with_name("public_api.txt")
MODULES = {
    "megatron_policy": None,
    "megatron_policy.convert": None,
    "megatron_policy.converters.architecture": ("Architecture", "QkNorm"),
    "megatron_policy.converters.config_fields": ("Fields",),
    "megatron_policy.converters.config_fields.rope_fields": ("take_rope",),
    "megatron_policy.converters.families.shared.dense": (
        "BLOCK",
        "ENDS",
        "architecture",
        "take_attention",
        "take_windows",
    ),
    "megatron_policy.converters.families.shared.experts": (
        "CORRECTION_BIAS",
        "place",
        "routed",
        "shared",
        "take_layers_after_dense",
        "take_sigmoid_moe",
    ),
    "megatron_policy.converters.formats.hf_location": ("locate",),
    "megatron_policy.converters.registry": ("Family",),
    "megatron_policy.converters.rows": ("GateUp", "Qkv", "Role", "Rows", "Vocab", "Whole"),
    "megatron_policy.coordination.rendezvous": ("reserved_port",),
    "megatron_policy.device": ("device_id", "synchronize"),
    "megatron_policy.estimate.timeline": ("read_trace",),
    "megatron_policy.hosts.launch": ("Program", "find", "run"),
    "megatron_policy.hosts.nemo_rl": None,
    "megatron_policy.hosts.nemo_rl.refit": ("cpu_address",),
    "megatron_policy.inference.vllm.engine": ("EXTENSION", "VllmEngine"),
    "megatron_policy.inference.vllm.process": ("EngineProcess",),
    "megatron_policy.inference.vllm.worker": ("RefitExtension", "make_plain"),
    "megatron_policy.inference.vllm.transfer": ("WeightTransfer",),
    "megatron_policy.inference.vllm.weight_patches": ("WeightPatches",),
    "megatron_policy.inference.vllm.weight_source": ("RefitSource",),
    "megatron_policy.interfaces.engine": ("EngineBuilder", "Trainable", "TrainingEngine"),
    "megatron_policy.interfaces.host": ("Host", "find_host"),
    "megatron_policy.lm_head.logprobs": ("vocab_parallel_logprobs",),
    "megatron_policy.monitoring": None,
    "megatron_policy.parallel.topology": ("Topology",),
    "megatron_policy.pictures.timeline": ("draw_timeline",),
    "megatron_policy.refit.delivery": ("Transport", "TransportSession"),
    "megatron_policy.refit.receive.collective": ("CollectiveGroup", "join_collective"),
    "megatron_policy.refit.manifest": ("RefitInfo", "RefitManifest", "ServedModel"),
    "megatron_policy.refit.probe": ("EngineProbe",),
    "megatron_policy.refit.receive.receiver": ("Receiver",),
    "megatron_policy.refit.shards": ("EngineShards", "place_on_grid"),
    "megatron_policy.refit.transports.collective.transport": ("Collective",),
    "megatron_policy.refit.transports.delta_stream": ("DeltaShards", "DeltaStream"),
    "megatron_policy.refit.transports.deltas": ("DeltaDirectory",),
    "megatron_policy.refit.transports.disk": ("HfDirectory",),
    "megatron_policy.refit.transports.ipc.handles": ("IpcHandles",),
    "megatron_policy.refit.transports.ipc.transport": ("IpcStream",),
    "megatron_policy.refit.transports.peft": ("PeftDirectory",),
    "megatron_policy.training.dry_run": ("DryRun",),
    "megatron_policy.workers": ("init_ray",),
}
"""What the documents and examples import, by module; None is all that a module exports."""


def lines() -> Iterator[str]:
    """The interface, a line for each name."""
    for name, wanted in MODULES.items():
        module = importlib.import_module(name)
        yield f"module {name}"
        for member in sorted(wanted or module.__all__):
            yield from _described(member, getattr(module, member))
    yield "entry points"
    found = distribution("megatron-policy").entry_points
    yield from sorted(f"  {each.group}: {each.name} = {each.value}" for each in found)
    yield "commands"
    yield from _commands()


def _described(name: str, value: Any) -> Iterator[str]:
    if not inspect.isclass(value):
        called = _signature(value) if callable(value) else ""
        yield f"  {name}{called}"
        return
    bases = ", ".join(base.__name__ for base in value.__bases__ if base is not object)
    yield f"  class {name}({bases}){_signature(value) if is_dataclass(value) else ''}"
    for member, found in inspect.getmembers(value):
        own = not member.startswith("_") or member == "__init__"
        inherited = [base for base in (object, dict, Exception) if base in value.__mro__]
        if not own or any(member in vars(base) for base in inherited):
            continue
        if _of_this_package(value, member):
            raw = inspect.getattr_static(value, member)
            if isinstance(raw, property | cached_property):
                yield f"    {member}: property"
            elif callable(found):
                yield f"    {member}{_signature(found)}"


def _of_this_package(owner: type, member: str) -> bool:
    """Whether the class that defines the member is this project's."""
    definer = next((base for base in owner.__mro__ if member in vars(base)), owner)
    return definer.__module__.split(".")[0] == megatron_policy.__name__


def _signature(value: Any) -> str:
    """As it is written, but defaults that are not plain values are `...`."""
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return "(...)"
    parameters = [
        each
        if each.default is inspect.Parameter.empty
        or isinstance(each.default, bool | int | float | str | None)
        else each.replace(default=...)
        for each in signature.parameters.values()
    ]
    text = str(signature.replace(parameters=parameters))
    return text.replace("'", "").replace("Ellipsis", "...")


def _commands() -> Iterator[str]:
    from typer.main import get_command

    from megatron_policy.cli import app

    group = get_command(app)
    for name, command in sorted(group.commands.items()):  # type: ignore[attr-defined]
        yield f"  {name}"
        for each in command.params:
            yield f"    {' '.join(each.opts)} ({_default(each)}): {' '.join(each.help.split())}"


def _default(parameter: Any) -> str:
    """What a command takes if the parameter is not given."""
    if parameter.required:
        return "required"
    value = parameter.default
    return f"default {value.value if isinstance(value, Enum) else value}"


def text() -> str:
    """The whole interface."""
    return "\n".join(lines()) + "\n"


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
