"""FSDP1's way to share out a decoder: torch's `FullyShardedDataParallel`, which makes one flat
parameter of each layer and gives ranks consecutive elements of it.

Torch has no public names for what a rank holds of a parameter; this file is the only one that knows
the private ones.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp._common_utils import HandleTrainingState, TrainingState

from megatron_policy.device import current_device
from megatron_policy.engines.hugging_face.module import Decoder
from megatron_policy.engines.hugging_face.sharding import Split, persistent_buffers

_WRAPPED = "_fsdp_wrapped_module."
"""What torch puts into the names of parameters below a wrapped module."""


@dataclass(frozen=True)
class Fsdp1:
    """See `Sharding`. A `root` that is not `sharded` has copies of all parameters on all ranks."""

    root: Any
    decoder: Decoder
    group: dist.ProcessGroup
    sharded: bool
    splits: dict[int, Split]
    """Of each parameter, by its id."""

    @classmethod
    def of(
        cls,
        decoder: Decoder,
        group: dist.ProcessGroup,
        compute: torch.dtype,
        strategy: str,
    ) -> Fsdp1:
        """Let the ranks of `group` share out the parameters, layer by layer, by a strategy of torch
        (`full_shard`, `shard_grad_op` or `no_shard`), compute in dtype `compute`, and sum
        gradients, which are fp32. Their memory is made, with undefined values.
        """
        sharded = strategy != "no_shard" and group.size() > 1
        precision = None
        if compute != torch.float32:
            precision = MixedPrecision(
                param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=True
            )
        layers = {id(layer) for layer in decoder.layers if _owns_its_weights(layer, decoder)}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # docs/fsdp.md says what to use instead
            wrap = partial(
                FullyShardedDataParallel,
                process_group=group,
                sharding_strategy=ShardingStrategy[strategy.upper() if sharded else "NO_SHARD"],
                mixed_precision=precision,
                device_id=current_device(),
                use_orig_params=True,
                param_init_fn=_Memory(),
            )
            # With a policy torch would do the same in a closure that calls itself, and keeps the
            # group until Python's collector finds it.
            for name, module in list(decoder.named_modules()):
                if id(module) in layers:
                    parent, _, child = name.rpartition(".")
                    setattr(decoder.get_submodule(parent), child, wrap(module))
            root = wrap(decoder)
        own = cls(root, decoder, group, sharded, {})
        for unit in own.units():
            unit._gradient_predivide_factor = unit._gradient_postdivide_factor = 1.0
            own.splits.update(_find_splits(unit._handle.flat_param, group.size() if sharded else 1))
        return own

    def units(self) -> Iterator[Any]:
        """Torch's modules that have a flat parameter."""
        units: Any = FullyShardedDataParallel.fsdp_modules(self.root)
        return (unit for unit in units if unit._handle is not None)

    @property
    def rank(self) -> int:
        return self.group.rank() if self.sharded else 0

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        model = self.decoder.model
        for name, parameter in model.named_parameters(remove_duplicate=False):
            yield name.replace(_WRAPPED, ""), parameter
        for name, buffer in persistent_buffers(model):
            yield name.replace(_WRAPPED, ""), buffer

    def split_of(self, tensor: torch.Tensor, stacked: bool) -> Split:
        return self.splits.get(id(tensor)) or Split(tuple(tensor.shape))

    @contextmanager
    def adding_gradients(self, wanted: bool) -> Iterator[None]:
        """See `Sharding`. Without shards, torch reduces all of a gradient again with what a
        backward pass adds to it: what there is before is set aside.
        """
        if self.sharded or not wanted:
            yield
            return
        parameters = list(self.decoder.parameters())
        before = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, gradient in zip(parameters, before, strict=True):
                if parameter.grad is None:
                    parameter.grad = gradient
                elif gradient is not None:
                    parameter.grad.add_(gradient)

    def reshard(self) -> None:
        for unit in self.units():
            handle = unit._handle
            # A forward pass that has raised leaves these.
            unit.training_state = TrainingState.IDLE
            handle._training_state = HandleTrainingState.IDLE
            handle.reshard(self.sharded)
            handle.post_reshard()
            handle._prefetched = False
            handle._post_forward_index = None
        # Torch empties this list of units after a backward pass only.
        self.root._exec_order_data.handles_post_forward_order.clear()

    def forget_gradients(self) -> None:
        for unit in self.units():
            unit._handle._reset_flat_param_grad_info_if_needed()


class _Memory:
    """Gives parameters on the meta device memory, once each, in whatever modules they are."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[torch.nn.Parameter, torch.nn.Parameter]] = {}

    def __call__(self, module: torch.nn.Module) -> None:
        for name, old in module._parameters.items():
            if old is None or not old.is_meta:
                continue
            if id(old) not in self._made:
                memory = torch.empty_like(old, device=current_device())
                # The old one is kept, so that its id is not used again.
                self._made[id(old)] = old, torch.nn.Parameter(memory, old.requires_grad)
            module._parameters[name] = self._made[id(old)][1]


def _owns_its_weights(layer: torch.nn.Module, decoder: Decoder) -> bool:
    """Whether no other module has parameters of this layer: a flat parameter has them alone."""
    own = {id(module) for module in layer.modules()}
    mine = {id(parameter) for parameter in layer.parameters()}
    others = (module for module in decoder.modules() if id(module) not in own)
    return not any(id(p) in mine for module in others for p in module._parameters.values())


def _find_splits(flat: Any, ranks: int) -> Iterator[tuple[int, Split]]:
    """How so many ranks hold each parameter of a flat one."""
    each, own = flat.numel() if ranks > 1 else 0, iter(zip(flat._params, flat._shapes, strict=True))
    ends = accumulate(flat._numels_with_padding)
    for end, elements, pads in zip(
        ends, flat._numels_with_padding, flat._is_padding_mask, strict=True
    ):
        if pads:
            continue
        parameter, shape = next(own)
        start, ranges = end - elements, None
        if ranks > 1:
            # Of the elements of the flat one that each rank has, those of this parameter.
            edges = [min(max(n * each - start, 0), elements) for n in range(ranks + 1)]
            ranges = tuple(pairwise(edges))
        yield id(parameter), Split(tuple(shape), None, ranges)
