"""How ranks share out a decoder: what the engine needs of it, and FSDP2's way. `fsdp1.py` has the
other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard

from megatron_policy.converters.rows.blocks import Ranges, Shape
from megatron_policy.device import current_device, is_accelerated
from megatron_policy.engines.hugging_face.module import Decoder
from megatron_policy.errors import ConfigError


class Split(NamedTuple):
    """A tensor of the model as ranks hold it between them: equal parts along `dim`, or consecutive
    elements of the flat one, or all of it each.
    """

    shape: Shape
    dim: int | None = None
    ranges: Ranges | None = None


class Sharding(Protocol):
    """A decoder whose parameters are shared out. This rank has its parts of them in the parameters
    themselves whenever no forward or backward pass runs.
    """

    @property
    def root(self) -> Any:
        """The module to call in place of the decoder."""

    @property
    def rank(self) -> int:
        """This rank among those that hold the model between them."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Parameters, at every place of each, and persistent buffers by their names in the model.
        The parameters stay the same objects.
        """

    def split_of(self, tensor: torch.Tensor, stacked: bool) -> Split:
        """How ranks hold one of `tensors`, which is a stack of HF tensors or not."""

    def adding_gradients(self, wanted: bool) -> AbstractContextManager[None]:
        """In this context, run one forward and backward pass: what it makes is reduced and added to
        the gradients that there are. Not `wanted`: there is no backward pass.
        """

    def reshard(self) -> None:
        """Drop the unsharded weights that a forward pass without a backward pass leaves: the next
        one must not find them, the shards can change before.
        """

    def forget_gradients(self) -> None:
        """Give back the memory of gradients, which parameters no longer have."""


def persistent_buffers(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Those that are in the state dict, by name."""
    for path, each in module.named_modules():
        for name, buffer in each._buffers.items():
            if buffer is not None and name not in each._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name, buffer


@dataclass(frozen=True)
class Fsdp2:
    """See `Sharding`: by torch's `fully_shard`, each parameter along one of its dimensions."""

    root: Decoder
    mesh: DeviceMesh

    @classmethod
    def of(
        cls,
        decoder: Decoder,
        mesh: DeviceMesh,
        compute: torch.dtype,
        offload: bool,
        stacked: Collection[str],
    ) -> Fsdp2:
        """Let FSDP cut the parameters over `mesh`, layer by layer, compute in dtype `compute`, and
        sum gradients, which are fp32. Their memory is then made, with undefined values. `stacked`
        are the names of parameters that are stacks of HF tensors.
        """
        policy = MixedPrecisionPolicy()
        if compute != torch.float32:
            policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
        offloading = CPUOffloadPolicy(pin_memory=is_accelerated()) if offload else OffloadPolicy()
        aliases = _find_aliases(decoder)
        ranks = mesh.size(mesh.ndim - 1)
        stacks = {id(decoder.model.get_parameter(name)) for name in stacked}
        for module in (*decoder.layers, decoder):
            fully_shard(
                module,
                mesh=mesh,
                mp_policy=policy,
                offload_policy=offloading,
                shard_placement_fn=lambda p: Shard(
                    split_dimension(p.shape, id(p) in stacks, ranks)
                ),
            )
        device = torch.device("cpu") if offload else current_device()
        buffers = [(m, name, b) for m in decoder.modules() for name, b in m._buffers.items()]
        decoder.to_empty(device=device)
        for module, name, buffer in buffers:
            module._buffers[name] = None if buffer is None else buffer.to(current_device())
        for module, name, owner, original in aliases:
            module._parameters[name] = owner._parameters[original]
        for module in decoder.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                # gloo has no other reduction.
                module.set_force_sum_reduction_for_comms(True)
        return cls(decoder, mesh)

    @property
    def rank(self) -> int:
        return self.mesh.get_local_rank(self.mesh.ndim - 1)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.root.model.named_parameters(remove_duplicate=False)
        yield from persistent_buffers(self.root.model)

    def split_of(self, tensor: torch.Tensor, stacked: bool) -> Split:
        shape = tuple(tensor.shape)
        if not isinstance(tensor, DTensor):
            return Split(shape)
        ranks = self.mesh.size(self.mesh.ndim - 1)
        return Split(shape, split_dimension(shape, stacked, ranks))

    def adding_gradients(self, wanted: bool) -> AbstractContextManager[None]:
        """See `Sharding`: FSDP2 does so itself."""
        return nullcontext()

    def reshard(self) -> None:
        sharded: Any = self.root
        sharded.reshard()

    def forget_gradients(self) -> None:
        """See `Sharding`: nothing else has them."""


def split_dimension(shape: tuple[int, ...], stacked: bool, ranks: int) -> int:
    """The dimension along which `ranks` split a parameter: stacks along one of theirs, so that
    every rank has a part of each HF tensor. ConfigError if a stack cannot be split.
    """
    if not stacked:
        return 0
    for dim in range(1, len(shape)):
        if shape[dim] % ranks == 0:
            return dim
    raise ConfigError(
        f"{ranks} ranks cannot split experts of {' x '.join(map(str, shape[1:]))} weights evenly: "
        "use a number of ranks that divides one of these sizes, or dp_replicate_size"
    )


def _find_aliases(
    decoder: torch.nn.Module,
) -> list[tuple[torch.nn.Module, str, torch.nn.Module, str]]:
    """Each further place of a parameter that is in several, with its first place: memory is made
    for each place.
    """
    first: dict[int, tuple[torch.nn.Module, str]] = {}
    found = []
    for module in decoder.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) in first:
                found.append((module, name, *first[id(parameter)]))
            first.setdefault(id(parameter), (module, name))
    return found
