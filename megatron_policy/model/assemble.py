"""Puts a rank's policy together: table, layout, groups, chunks, weights, optimizer; does nothing
with it.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_policy.config import PolicyConfig
from megatron_policy.converters.architecture import Architecture, padded_vocab
from megatron_policy.converters.hf_files import HfReader
from megatron_policy.converters.table import Table
from megatron_policy.errors import CheckpointError
from megatron_policy.groups import Groups, make_groups
from megatron_policy.layout import layer_split
from megatron_policy.model.build import build_chunks
from megatron_policy.model.config import transformer_config
from megatron_policy.model.experts import forget_routing, freeze_routers
from megatron_policy.model.load import Held, held_entries, load_parameters, mark_unfilled
from megatron_policy.model.optimizer import Trainable, make_trainable
from megatron_policy.model.readers import Readers
from megatron_policy.model.spec import resolve_implementation
from megatron_policy.topology import Placement, Topology
from megatron_policy.train.fused import HeadShape
from megatron_policy.train.head import Head
from megatron_policy.train.pipeline import Pipeline
from megatron_policy.train.reference import ReferenceWeights

_SHOWN = 5
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Assembly:
    """A rank's place in the layout and everything it holds there."""

    place: Placement
    groups: Groups
    table: Table
    held: Held
    source_dtypes: Mapping[str, torch.dtype]
    precision: torch.dtype
    pipeline: Pipeline
    trainable: Trainable | None
    reference: ReferenceWeights | None
    readers: Readers

    def let_go(self) -> None:
        """Cut what would keep the model, and its process groups with it, when nobody uses it."""
        forget_routing(self.pipeline.chunks)
        if self.trainable is not None:
            self.trainable.let_go()


@contextmanager
def _without_collector() -> Iterator[None]:
    """Pause Python's cycle collector: what is built here stays, and its number alone would send the
    collector through everything that was ever imported.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@_without_collector()
def assemble(
    config: PolicyConfig,
    table: Table,
    topology: Topology,
    *,
    init_optimizer: bool,
    init_reference_model: bool,
    timeout_s: float,
    source_dtypes: Mapping[str, torch.dtype] | None = None,
) -> Assembly:
    """Build and load this rank's part of the model; the default process group must exist and fit
    `topology`.

    With `source_dtypes`, for each HF tensor the dtype in which it is exported, no weights are read:
    parameters and lasting buffers are as `mark_unfilled` leaves them, and main parameters copies.
    CheckpointError if a tensor has no dtype there. There is no reference policy then.
    """
    settings, arch, precision = config.megatron_cfg, table.architecture, DTYPES[config.precision]
    implementation = resolve_implementation(settings.transformer_impl, arch)
    place = Placement(
        topology, topology.coords(dist.get_rank()), layer_split(config, arch, topology)
    )
    groups = make_groups(topology, timeout_s)
    model_config = transformer_config(
        arch,
        settings,
        topology,
        precision,
        implementation,
        variable_lengths=config.dynamic_batching.enabled or config.sequence_packing.enabled,
    )
    built: Any = build_chunks(arch, model_config, place, implementation, config.seed)
    held = held_entries(built, table, place)
    assert source_dtypes is None or not init_reference_model, "a reference is what was read"
    source_dtypes = _fill(config, held, table, place, source_dtypes)
    if settings.freeze_moe_router:
        freeze_routers(built)
    reference = ReferenceWeights([p for _, p in held]) if init_reference_model else None
    readers = Readers()
    chunks, trainable = built, None
    if init_optimizer:
        trainable = make_trainable(
            built,
            model_config,
            settings,
            config.train_global_batch_size,
            topology.dp * topology.cp,
            readers,
            held,
        )
        chunks = trainable.chunks
    last = place.topology.vpp - 1
    head = _head(config, arch, place, groups, built[last]) if place.holds_head(last) else None
    pipeline = Pipeline(tuple(chunks), groups, topology, arch.vocab_size, head)
    parts = (pipeline, trainable, reference, readers)
    return Assembly(place, groups, table, held, source_dtypes, precision, *parts)


def _fill(
    config: PolicyConfig,
    held: Held,
    table: Table,
    place: Placement,
    source_dtypes: Mapping[str, torch.dtype] | None,
) -> Mapping[str, torch.dtype]:
    """Read what is held from the model's own files, or mark it where dtypes are given; the dtypes
    in which it is exported.
    """
    if source_dtypes is None:
        with HfReader(config.model_name) as reader:
            load_parameters(held, reader, table, place)
            return dict(reader.dtypes)
    if unknown := sorted(table.hf_shapes().keys() - source_dtypes.keys()):
        raise CheckpointError(
            f"the checkpoint is of another model than {config.model_name}: it does not know "
            f"{', '.join(unknown[:_SHOWN])}. Set policy.model_name to the model it was saved from"
        )
    mark_unfilled(held)
    return source_dtypes


def _head(
    config: PolicyConfig, architecture: Architecture, place: Placement, groups: Groups, model: Any
) -> Head:
    """The head that the last chunk holds; this rank's slice of it."""
    slice_size = padded_vocab(architecture.vocab_size, groups.tp.size()) // groups.tp.size()
    start = place.coords.tp * slice_size
    shape = HeadShape(
        vocab_start=start,
        real=max(0, min(architecture.vocab_size - start, slice_size)),
        scale=architecture.logit_scale,
        softcap=architecture.logit_softcap,
        temperature=(config.generation and config.generation.temperature) or 1.0,
    )
    overlapped = config.megatron_cfg.distributed_data_parallel_config.overlap_param_gather
    return Head(model, shape, groups.tp, config.logprob_chunk_size, overlapped)
