"""Fills this rank's parameters from a Hugging Face checkpoint, or marks them as unfilled. All names
come from the table.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

import torch

from megatron_policy.converters.formats.hf_files import HfReader
from megatron_policy.converters.rows import fill_shard
from megatron_policy.converters.table import Entry, Table
from megatron_policy.errors import CheckpointError, ConversionError
from megatron_policy.parallel.topology import Placement

Held = list[tuple[Entry, torch.Tensor]]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""The dtypes of parameters in training, by their name in the configuration."""

# The mark is a NaN with every bit set, which no arithmetic makes: computed NaNs have one bit of
# the fraction set. After a cast from bfloat16 to float32 the mark's upper half is left.
_SAME_WIDTH = {2: torch.int16, 4: torch.int32}
_HALF = 2  # bytes
_SHOWN = 20
_PIECE = 2**24  # elements that are checked at a time, to limit memory use


def held_entries(chunks: Sequence[torch.nn.Module], table: Table, place: Placement) -> Held:
    """Each parameter and persistent buffer of `chunks` with its table entry, in table order;
    ConversionError unless they match one to one.
    """
    held: Held = []
    moe = table.architecture.moe
    experts = None if moe is None else place.experts(moe.experts)
    for index, chunk in enumerate(chunks):
        layers = place.layers(index)
        entries = table.entries_of(
            layers, place.holds_embedding(index), place.holds_head(index), experts
        )
        offsets = (layers.start if len(layers) else 0, experts.start if experts else 0)
        parameters = {canonical_name(name, *offsets): p for name, p in _weights(chunk)}
        shapes = {name: tuple(p.shape) for name, p in parameters.items()}
        table.check_megatron(shapes, place.topology.tp, entries, expert_tp=place.topology.expert_tp)
        held += [(entry, parameters[entry.megatron]) for entry in entries]
    return held


def _weights(chunk: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, and the persistent buffers (those in the state dict), which belong to the model
    as well.
    """
    seen: set[int] = set()
    for path, module in chunk.named_modules():  # one walk: models have very many modules
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            passing = tensor is None or name in module._non_persistent_buffers_set
            if not passing and id(tensor) not in seen:
                seen.add(id(tensor))
                yield f"{path}.{name}" if path else name, tensor


@torch.no_grad()
def load_parameters(
    held: Held, reader: HfReader, table: Table, place: Placement, seed: int = 0
) -> None:
    """Copy this rank's slices straight from the mapped files into its parameters, casting on copy.
    What the table says is fresh is drawn from `seed`, alike on all ranks that hold it.

    ConversionError unless the files hold exactly the table's tensors, as plain floats. Copies that
    a tied checkpoint can include are compared with their originals; each rank compares its share.
    """
    topology = place.topology
    table.check_hf(reader.shapes, reader.dtypes)
    reader.check_copies(table.copies(), topology.rank(place.coords), topology.world_size)
    for entry, parameter in held:
        if entry.hf[0] in table.fresh:
            # In fp32 in host memory, so that layouts and devices agree.
            generator = torch.Generator().manual_seed(seed)
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.data.copy_(drawn * table.fresh[entry.hf[0]])
            continue
        fill_shard(
            entry.row,
            table.architecture,
            parameter.data,
            [reader.part(name) for name in entry.hf],
            *place.shard_of(entry.row),
        )
        if parameter.dtype == torch.float16 and not parameter.isfinite().all():
            raise ConversionError(
                f"{', '.join(entry.hf)} has a weight that float16 cannot hold, or that is not "
                "finite: set policy.precision to bfloat16 or float32"
            )


def widen(held: Held) -> Held:
    """The same, with fp32 memory where the row keeps its dtype whatever the model's precision; to
    be called before anything else refers to parameters' memory.
    """
    for entry, parameter in held:
        if entry.row.keeps_dtype:
            parameter.data = parameter.data.float()
    return held


@torch.no_grad()
def mark_unfilled(held: Held) -> None:
    """Fill all these floats with a NaN mark, so that none can pass for a weight until it is
    written.
    """
    for _, parameter in held:
        assert parameter.is_floating_point(), "only floats have a mark"
        parameter.data.view(_SAME_WIDTH[parameter.itemsize]).fill_(-1)


def refuse_unfilled(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """CheckpointError, naming them, if any element of these tensors is still as `mark_unfilled`
    left it, or was copied from one that is. A computed NaN passes.
    """
    missing = [name for name, tensor in tensors if _has_mark(tensor.detach())]
    if missing:
        further = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        raise CheckpointError(
            f"nothing was loaded into {', '.join(missing[:_SHOWN])}{further}, or not into all of "
            "it: the checkpoint does not hold the whole model. Load another checkpoint"
        )


def _has_mark(tensor: torch.Tensor) -> bool:
    # Compare the two bytes with each element's exponent: the last two, on little-endian machines.
    step = tensor.itemsize // _HALF
    halves = tensor.reshape(-1).view(torch.int16)[step - 1 :]
    return any(bool((piece[::step] == -1).any()) for piece in halves.split(_PIECE * step))


# Transformer Engine fuses a norm into the linear layer after it, and names its weight there.
_FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_bias": "input_layernorm.bias",
    "self_attention.in_proj.layer_norm_weight": "input_layernorm.weight",
    "mixer.in_proj.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
    "mlp.linear_fc1.layer_norm_bias": "pre_mlp_layernorm.bias",
}
# Its grouped experts hold their parameters side by side.
_GROUPED = re.compile(r"mlp\.experts\.(linear_fc[12])\.(weight|bias)(\d+)")
_EXPERT_NAME = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.+)")
_LAYER_NAME = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_MTP_LAYER_NAME = re.compile(r"mtp_block\.(layers\.\d+\.transformer_layer\.)(.+)")


def canonical_name(name: str, layer_offset: int, expert_offset: int = 0) -> str:
    """The table's name for a built model's parameter; the offsets are the chunk's first layer and
    the rank's first expert of a layer.
    """
    while name.startswith("module."):
        name = name.removeprefix("module.")
    if of_layer := _LAYER_NAME.fullmatch(name):
        number = int(of_layer.group(1)) + layer_offset
        return f"decoder.layers.{number}.{_within_layer(of_layer.group(2), expert_offset)}"
    if of_mtp := _MTP_LAYER_NAME.fullmatch(name):
        return f"mtp.{of_mtp.group(1)}{_within_layer(of_mtp.group(2), expert_offset)}"
    return re.sub(r"^mtp_block\.", "mtp.", name)


def _within_layer(rest: str, expert_offset: int) -> str:
    rest = _GROUPED.sub(r"mlp.experts.local_experts.\3.\1.\2", rest)
    if of_expert := _EXPERT_NAME.fullmatch(rest):
        expert = int(of_expert.group(1)) + expert_offset
        rest = f"mlp.experts.local_experts.{expert}.{of_expert.group(2)}"
    return _FUSED_NORMS.get(rest, rest)
