"""Where Megatron-Core's sharded checkpoints (`torch_dist`) keep each parameter: keys and axes.

Follows `sharded_state_dict` of Megatron-Core's models.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from megatron_policy.converters.architecture import Architecture, Mamba2, Mla, Moe, Recurrence
from megatron_policy.converters.rows import Sections
from megatron_policy.converters.rows.blocks import Shape
from megatron_policy.converters.table import Entry, Table

# Transformer Engine fuses a norm into the linear layer after it, which names it in the checkpoint.
_FUSED = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
    "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
    "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
}
_LAYER = re.compile(r"^(decoder\.layers\.\d+\.|mtp\.layers\.\d+\.transformer_layer\.)")
_LAST_NORM = "decoder.final_layernorm."
"""Which models with Mamba2 layers call otherwise in Megatron-Core."""
_EXPERT = re.compile(r"(?<=mlp\.experts\.)local_experts\.\d+\.")
OPTIMIZER_STATE = "optimizer.state."
"""What the keys of an optimizer's state begin with. It has nothing of layers that are frozen."""

_OTHERS = re.compile(r"(chained_\d+\.)?optimizer\.|rng_state|rerun_state_machine")
"""Keys of a training checkpoint that are not weights."""


@dataclass(frozen=True)
class KeyedSlice:
    """A parameter in a tensor of the checkpoint: `tensor[lead]`, with leading dimensions `axes`."""

    key: str
    lead: Shape = ()
    axes: Shape = ()
    sections: tuple[tuple[str, int], ...] = ()
    """Names and rows of what has tensors of its own in place of one of the whole parameter."""

    def divide(self, shape: Shape) -> Iterator[tuple[str, int, Shape]]:
        """Of each tensor with a part of the parameter, which has that shape: its key, the first row
        of the parameter that it has, and the part's shape.
        """
        if not self.sections:
            yield self.key, 0, shape
        first = 0
        for name, rows in self.sections:
            yield f"{self.key}.{name}", first, (rows, *shape[1:])
            first += rows


def written(entry: Entry, arch: Architecture) -> tuple[KeyedSlice, ...]:
    """Where to write an entry's parameter: more than one place if layer specs use different names.

    Megatron-Core's local spec and its Transformer Engine spec agree on most names; a norm that
    only one of them fuses into the linear layer is written under both. Adapters, which some layers
    can lack, are never stacked.
    """
    if entry.adapts:
        return (KeyedSlice(entry.megatron),)
    return tuple(_place(entry, name, arch, arch.uniform_layers) for name in _spellings(entry, arch))


def readable(entry: Entry, arch: Architecture) -> Iterator[KeyedSlice]:
    """Where an entry's parameter can be: layers or experts stacked or not, norms fused or not."""
    if entry.adapts:
        yield KeyedSlice(entry.megatron)
        return
    name = _within_layer(entry)
    for spelling in dict.fromkeys((*_spellings(entry, arch), name, _fused(name, entry, arch))):
        yield _place(entry, spelling, arch, stacked=True)
        if entry.layer is not None:
            yield _place(entry, spelling, arch, stacked=False)
        if entry.expert is not None:
            number = f"mlp.experts.experts.{entry.expert}."
            alone = _EXPERT.sub("", spelling).replace("mlp.experts.", number)
            yield KeyedSlice(_spell_prefix(entry, arch) + alone)


def extra_states(table: Table) -> tuple[str, ...]:
    """Names of the objects that layer specs ask for in addition to the parameters.

    Covers every module of a layer, even those that do not ask: a missing one fails the load.
    """
    arch = table.architecture
    names: dict[str, None] = {}
    for part in table.exported():
        entry = part.saved
        if entry.adapts or not entry.megatron.startswith(("decoder.", "mtp.")):
            continue
        for place in written(entry, arch):
            names[_state(place.key.rpartition(".")[0], place)] = None
        if _prefix(entry) and entry.expert is None:
            attention = _place(entry, "self_attention.core_attention", arch, arch.uniform_layers)
            names[_state(attention.key, attention)] = None
    return tuple(names)


def not_weights(keys: Iterable[str]) -> set[str]:
    """The keys of a training checkpoint that belong to the optimizer or to counters."""
    return {key for key in keys if _OTHERS.match(key)}


def _spellings(entry: Entry, arch: Architecture) -> tuple[str, ...]:
    name = _within_layer(entry)
    fused = _fused(name, entry, arch)
    if name.startswith(_LAST_NORM) and arch.find_part(Mamba2) is not None:
        return (name, name.replace(_LAST_NORM, "decoder.final_norm."))
    if entry.layer is None or fused == name:
        return (name,)
    layer = arch.find_layer(entry.layer)
    latent = isinstance(layer.mixer, Mla)
    if name.startswith("self_attention."):  # norms of queries and keys, fused in MLA
        return (name, fused) if latent else (name,)
    experts = name.startswith("pre_mlp") and isinstance(layer.feed, Moe)
    return (fused, name) if latent or experts else (fused,)


def _fused(name: str, entry: Entry, arch: Architecture) -> str:
    norm = next((norm for norm in _FUSED if name.startswith(norm)), None)
    if norm is None:
        return name
    mixer = None if entry.layer is None else arch.find_layer(entry.layer).mixer
    if norm == "input_layernorm." and isinstance(mixer, Recurrence):
        return f"{mixer.first}.layer_norm_{name.removeprefix(norm)}"
    return _FUSED[norm] + name.removeprefix(norm)


def _within_layer(entry: Entry) -> str:
    return _LAYER.sub("", entry.megatron, count=1)


def _prefix(entry: Entry) -> str:
    """What precedes the parameter's name within its decoder layer; empty if it is in none."""
    found = _LAYER.match(entry.megatron)
    return found.group() if found else ""


def _spell_prefix(entry: Entry, arch: Architecture) -> str:
    """The same in checkpoints, where layers of one part each have a layer for either part of what
    predicts further tokens.
    """
    prefix = _prefix(entry)
    if not (prefix.startswith("mtp.") and arch.has_single_parts):
        return prefix
    part = int("mlp" in entry.megatron.removeprefix(prefix))
    return prefix.replace("transformer_layer.", f"mtp_model_layer.layers.{part}.")


def _place(entry: Entry, name: str, arch: Architecture, stacked: bool) -> KeyedSlice:
    prefix = _spell_prefix(entry, arch)
    if not prefix:
        return KeyedSlice(name)
    stacked = stacked and prefix.startswith("decoder.")
    lead, axes = ((entry.layer or 0,), (arch.num_layers,)) if stacked else ((), ())
    if entry.expert is not None:
        assert arch.moe is not None
        name = _EXPERT.sub("experts.", name)
        lead, axes = (*lead, entry.expert), (*axes, arch.moe.experts)
    key = ("decoder.layers." if stacked else prefix) + name
    # Those of a projection and of a convolution.
    sections = entry.row.name_rows(arch) if isinstance(entry.row, Sections) else ()
    return KeyedSlice(key, lead, axes, sections)


def _state(module: str, place: KeyedSlice) -> str:
    """The name of a module's object, with its shard index and count, as in Megatron-Core."""
    index, total = (".".join(map(str, shape)) for shape in (place.lead or (0,), place.axes or (1,)))
    return f"{module}._extra_state/shard_{index}_{total}"
