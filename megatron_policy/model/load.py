"""Fills this rank's parameters from a Hugging Face checkpoint: an executor of the table, with no
names of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from megatron.core.models.gpt import GPTModel

from megatron_policy.converters.hf_files import HfReader
from megatron_policy.converters.rows import fill_shard
from megatron_policy.converters.table import Entry, Table, canonical_name
from megatron_policy.topology import Placement

Held = list[tuple[Entry, torch.Tensor]]


def held_entries(chunks: Sequence[GPTModel], table: Table, place: Placement) -> Held:
    """Each parameter and lasting buffer of `chunks` with its table entry, in table order;
    ConversionError unless they match one to one.
    """
    held: Held = []
    for index, chunk in enumerate(chunks):
        layers = place.layers(index)
        entries = table.entries_of(
            layers, first=place.holds_embedding(index), last=place.holds_head(index)
        )
        offset = layers.start if len(layers) else 0
        parameters = {canonical_name(name, offset): p for name, p in _weights(chunk)}
        shapes = {name: tuple(p.shape) for name, p in parameters.items()}
        table.check_megatron(shapes, place.topology.tp, entries)
        held += [(entry, parameters[entry.megatron]) for entry in entries]
    return held


def _weights(chunk: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, and the buffers that belong to the model as they do: those that a state dict
    keeps.
    """
    yield from chunk.named_parameters()
    for path, module in chunk.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{path}.{name}", buffer


def held_layers(
    chunks: Sequence[GPTModel], place: Placement
) -> Iterator[tuple[int, torch.nn.Module]]:
    """The decoder layers of `chunks` by global number."""
    for index, chunk in enumerate(chunks):
        yield from zip(place.layers(index), chunk.decoder.layers, strict=True)


@torch.no_grad()
def load_parameters(held: Held, reader: HfReader, table: Table, place: Placement) -> None:
    """Copy this rank's slices straight from the mapped files into its parameters, casting on the
    way.

    ConversionError unless the files hold exactly the table's tensors, as plain floats; copies that
    a tied checkpoint may ship are compared with what they copy, each rank its share.
    """
    topology, coords = place.topology, place.coords
    table.check_hf(reader.shapes, reader.dtypes)
    reader.check_copies(table.copies(), topology.rank(coords), topology.world_size)
    for entry, parameter in held:
        fill_shard(
            entry.row,
            table.architecture,
            parameter.data,
            [reader.part(name) for name in entry.hf],
            coords.tp,
            topology.tp,
        )
