"""The root module that FSDP shards: a transformers model whose forward pass ends in what is made of
its hidden states, while the weights of its head are there.

Shapes: T positions that this context-parallel rank computes, R rows of them, D model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import Shard

from megatron_policy.device import current_device, is_accelerated
from megatron_policy.errors import ConfigError

Embed = Callable[[torch.Tensor], torch.Tensor]
"""From tokens `[R, T]` to what the model's code is to take for their embedding."""
Finish = Callable[[torch.Tensor], torch.Tensor]
"""From hidden states `[T, R, D]` to what a forward pass returns."""


class Decoder(torch.nn.Module):
    """A causal language model of transformers without its logits."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    @property
    def base(self) -> Any:
        """The module that makes hidden states: what the model makes logits of. ConfigError if the
        model's class has none apart from its head.
        """
        base = self.model.get_decoder()
        if base is None or base is self.model:
            raise ConfigError(
                f"{type(self.model).__name__} has no decoder apart from its head, so its hidden "
                "states cannot be read: this model cannot be trained here"
            )
        return base

    def forward(
        self,
        tokens_RT: torch.Tensor,
        positions_RT: torch.Tensor,
        embed: Embed,
        finish: Finish,
        cache: Any = None,
    ) -> torch.Tensor:
        """What `finish` makes of the hidden states. `cache` is one of transformers, or None.

        The model is given the tokens, not their embedding: some read them in other places too.
        """
        with _computing(self.model.get_input_embeddings(), embed):
            output = self.base(
                input_ids=tokens_RT,
                position_ids=positions_RT,
                # Without one, transformers looks for packed sequences, and waits for the device.
                attention_mask=None if cache is not None else torch.ones_like(tokens_RT),
                past_key_values=cache,
                use_cache=cache is not None,
            )
        return finish(output.last_hidden_state.transpose(0, 1))

    @property
    def layers(self) -> list[torch.nn.Module]:
        """The layers of the decoder, in order: of the lists of modules, the one with most."""
        lists = [m for m in self.model.modules() if isinstance(m, torch.nn.ModuleList)]
        inner = {id(m) for each in lists for m in each.modules() if m is not each}
        outer = [list(each) for each in lists if id(each) not in inner]
        return max(outer, key=len)


@contextmanager
def _computing(module: torch.nn.Module, forward: Embed) -> Iterator[None]:
    """In this context `module` computes `forward` in place of what it computes itself."""
    own = vars(module).pop("forward", None)
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if own is not None:
            module.forward = own


def shard(
    decoder: Decoder,
    mesh: DeviceMesh,
    compute: torch.dtype,
    offload: bool,
    stacked: Collection[str],
) -> None:
    """Let FSDP cut the parameters over `mesh`, layer by layer, compute in dtype `compute`, and sum
    gradients, which are fp32. Their memory is then made, with undefined values. `stacked` are the
    names of parameters that are stacks of HF tensors.
    """
    policy = MixedPrecisionPolicy()
    if compute != torch.float32:
        policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    offloading = CPUOffloadPolicy(pin_memory=is_accelerated()) if offload else OffloadPolicy()
    aliases = _aliases(decoder)
    ranks = mesh.size(mesh.ndim - 1)
    stacks = {id(decoder.model.get_parameter(name)) for name in stacked}
    for module in (*decoder.layers, decoder):
        fully_shard(
            module,
            mesh=mesh,
            mp_policy=policy,
            offload_policy=offloading,
            shard_placement_fn=lambda p: Shard(split_dimension(p.shape, id(p) in stacks, ranks)),
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


def _aliases(
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
