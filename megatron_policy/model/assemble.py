"""Puts a rank's policy together: table, layout, groups, chunks, weights, optimizer; does nothing
with it.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_policy.config import PolicyConfig
from megatron_policy.converters.architecture import padded_vocab
from megatron_policy.converters.hf_files import HfReader
from megatron_policy.converters.table import Table
from megatron_policy.groups import Groups, make_groups
from megatron_policy.layout import layer_split
from megatron_policy.model.build import build_chunks
from megatron_policy.model.config import transformer_config
from megatron_policy.model.experts import freeze_routers
from megatron_policy.model.load import Held, held_entries, load_parameters
from megatron_policy.model.optimizer import Trainable, make_trainable
from megatron_policy.model.spec import resolve_implementation
from megatron_policy.topology import Placement, Topology
from megatron_policy.train.pipeline import Pipeline
from megatron_policy.train.reference import ReferenceWeights

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Assembly:
    """A rank's place in the layout and everything it holds there."""

    place: Placement
    groups: Groups
    table: Table
    held: Held
    source_dtypes: Mapping[str, torch.dtype]
    pipeline: Pipeline
    trainable: Trainable | None
    reference: ReferenceWeights | None


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
) -> Assembly:
    """Build and load this rank's part of the model; the default process group must exist and fit
    `topology`.
    """
    settings, arch = config.megatron_cfg, table.architecture
    implementation = resolve_implementation(settings.transformer_impl, arch)
    place = Placement(
        topology, topology.coords(dist.get_rank()), layer_split(config, arch, topology)
    )
    groups = make_groups(topology, timeout_s)
    model_config = transformer_config(
        arch, settings, topology, DTYPES[config.precision], implementation
    )
    chunks: Any = build_chunks(arch, model_config, place, implementation, config.seed)
    held = held_entries(chunks, table, place)
    with HfReader(config.model_name) as reader:
        load_parameters(held, reader, table, place)
        source_dtypes = dict(reader.dtypes)
    if settings.freeze_moe_router:
        freeze_routers(chunks)
    reference = ReferenceWeights([p for _, p in held]) if init_reference_model else None
    trainable = None
    if init_optimizer:
        trainable = make_trainable(
            chunks,
            model_config,
            settings,
            config.train_global_batch_size,
            topology.dp * topology.cp,
        )
        chunks = trainable.chunks
    pipeline = Pipeline(
        chunks=tuple(chunks),
        groups=groups,
        topology=topology,
        vocab_size=arch.vocab_size,
        padded_vocab_size=padded_vocab(arch.vocab_size, topology.tp),
        length_multiple=length_multiple(config, topology),
        temperature=(config.generation and config.generation.temperature) or 1.0,
    )
    return Assembly(place, groups, table, held, source_dtypes, pipeline, trainable, reference)


def length_multiple(config: PolicyConfig, topology: Topology) -> int:
    """What sequence lengths are padded to: the caller's wish, and under sequence parallelism a
    multiple of `tp`.
    """
    wanted = config.make_sequence_length_divisible_by
    needed = topology.tp if config.megatron_cfg.sequence_parallel else 1
    return math.lcm(wanted, needed)
