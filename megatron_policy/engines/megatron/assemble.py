"""Builds a rank's Megatron-Core engine: groups, chunks, weights, optimizer, head. This module is an
`interfaces.engine.EngineBuilder`.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_policy.adapters.base import base_digest
from megatron_policy.adapters.loading import fill_adapters
from megatron_policy.adapters.table import join_adapters
from megatron_policy.adapters.targets import choose_adapters, make_spec
from megatron_policy.config import PolicyConfig
from megatron_policy.config.layout import layer_split
from megatron_policy.config.param_groups import ParamGroups
from megatron_policy.converters.architecture import Architecture, vocab_shard
from megatron_policy.converters.formats.hf_files import HfReader
from megatron_policy.converters.table import Table
from megatron_policy.device.timing import Recorder
from megatron_policy.engines.composite import build_composite, fill_composite
from megatron_policy.engines.megatron.adapters import (
    MegatronAdapters,
    held_adapters,
    install_adapters,
)
from megatron_policy.engines.megatron.build import build_chunks, held_layers, make_embedding
from megatron_policy.engines.megatron.engine import MegatronEngine
from megatron_policy.engines.megatron.head import Head
from megatron_policy.engines.megatron.layer_spec import resolve_implementation
from megatron_policy.engines.megatron.layers.norm import make_replica
from megatron_policy.engines.megatron.layers.recurrent import choose_kernels
from megatron_policy.engines.megatron.layers.replay import RouterChannel
from megatron_policy.engines.megatron.layers.rope import choose_text_length
from megatron_policy.engines.megatron.model_config import transformer_config
from megatron_policy.engines.megatron.mtp import MegatronMtp
from megatron_policy.engines.megatron.pipeline import Pipeline
from megatron_policy.engines.megatron.platform import prepare_platform
from megatron_policy.engines.megatron.process_groups import drop_groups, make_groups
from megatron_policy.engines.megatron.routers import Routers
from megatron_policy.engines.megatron.trainable import freeze, make_trainable
from megatron_policy.engines.shared import check_embedder, describe_head, leave_unfilled
from megatron_policy.engines.shell import PictureEmbedder, has_trained
from megatron_policy.interfaces.embedder import Embedder, TokenEmbedder
from megatron_policy.memory.pending_reads import PendingReads
from megatron_policy.packing.microbatch import Microbatch
from megatron_policy.parallel.groups import Groups
from megatron_policy.parallel.topology import Placement, Topology
from megatron_policy.weights.load import DTYPES, Held, held_entries, load_parameters, widen


def prepare() -> None:
    """Prepare this process for Megatron-Core; see `EngineBuilder`."""
    prepare_platform()


@contextmanager
def _without_collector() -> Iterator[None]:
    """Pause Python's cycle collector. What is built here stays alive, but the number of objects
    would trigger full collections over everything ever imported.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@_without_collector()
def build(
    config: PolicyConfig,
    table: Table,
    topology: Topology,
    *,
    init_optimizer: bool,
    timeout_s: float,
    source_dtypes: Mapping[str, torch.dtype] | None = None,
) -> MegatronEngine:
    """Build and load this rank's part of the model; see `EngineBuilder`."""
    groups = make_groups(topology, timeout_s)
    try:
        engine = _build(config, table, topology, groups, init_optimizer, source_dtypes)
        check_embedder(engine.pipeline.embedder, table.architecture)
        return engine
    except BaseException:
        drop_groups()
        raise


def _build(
    config: PolicyConfig,
    table: Table,
    topology: Topology,
    groups: Groups,
    init_optimizer: bool,
    source_dtypes: Mapping[str, torch.dtype] | None,
) -> MegatronEngine:
    settings, arch, precision = config.megatron_cfg, table.architecture, DTYPES[config.precision]
    implementation = resolve_implementation(settings.transformer_impl, arch, settings.peft.enabled)
    coords = topology.coords(dist.get_rank())
    place = Placement(topology, coords, layer_split(config, arch, topology))
    given = (arch, settings, topology, precision, implementation)
    varying = config.dynamic_batching.enabled or config.sequence_packing.enabled
    model_config = transformer_config(*given, variable_lengths=varying, split=place.split)
    built, composite = _chunks(config, arch, model_config, place, implementation)
    of_adapters = choose_adapters(config, table)
    installed = install_adapters(built, table, of_adapters, place, model_config, settings.peft)
    everything = widen(held_entries(built, join_adapters(table, of_adapters), place))
    held = [pair for pair in everything if not pair[0].adapts]
    source_dtypes, base = _fill(config, held, table, place, source_dtypes)
    adapters = None
    if of_adapters is not None:
        own, head_of_base = held_adapters(everything, of_adapters)
        spec = make_spec(config, base, table.overrides)
        dtypes = fill_adapters(own, of_adapters, place, config, spec)
        values = (own, dtypes, spec, head_of_base)
        adapters = MegatronAdapters(of_adapters, *values, *installed)
    param_groups = ParamGroups.of(settings)
    freeze(everything, param_groups)
    pending_reads = PendingReads()
    chunks, trainable = built, None
    if init_optimizer:
        routers = Routers.of(held_layers(built, place), arch, settings, groups.pp)
        size = config.train_global_batch_size
        wrapped = (everything, arch, place, routers, param_groups)
        trainable = make_trainable(built, model_config, settings, size, pending_reads, *wrapped)
        chunks = trainable.chunks
    last = place.topology.vpp - 1
    head = _head(config, arch, place, groups, built[last]) if place.holds_head(last) else None
    embedder = _embedder(built, arch, groups, composite)
    pipeline = Pipeline(
        tuple(chunks),
        tuple(place.layers(chunk) for chunk in range(topology.vpp)),
        groups,
        topology,
        arch.vocab_size,
        embedder,
        head,
        RouterChannel.of(groups, arch, settings.sequence_parallel),
        MegatronMtp.of(built[last], head, embedder, settings, groups.cp),
        Recorder() if trainable is None else trainable.stopwatch.recorder,
    )
    parts = (pipeline, trainable, pending_reads, adapters)
    return MegatronEngine(place, groups, table, held, source_dtypes, precision, *parts)


def _chunks(
    config: PolicyConfig,
    architecture: Architecture,
    model_config: TransformerConfig,
    place: Placement,
    implementation: str,
) -> Any:
    """Megatron-Core's chunks, whose rotary embeddings know which length of text counts, and whose
    recurrences whether kernels compute them; and the composite model around them, if there is one.
    """
    if config.rope_length == "row" or architecture.attachments:
        model_config.apply_rope_fusion = False  # the fused kernel turns all rows alike
    built = build_chunks(architecture, model_config, place, implementation, config.seed)
    choose_kernels(built, config.megatron_cfg.recurrence_impl)
    choose_text_length(built, config.rope_length, config.max_total_sequence_length)
    if architecture.shell is None:
        return built, None
    composite, names = build_composite(config), dict(architecture.shell.tensors)
    for chunk in built:
        if chunk.pre_process:
            # It has parameters on the stage with the embedding, and belongs to it.
            fill_composite(composite, partial(make_replica, chunk.config), names)
            chunk.embedding.shell = composite
    return built, composite


def _embedder(
    built: list[Any], architecture: Architecture, groups: Groups, composite: torch.nn.Module | None
) -> Embedder:
    text = TokenEmbedder(make_embedding(built, architecture))
    if architecture.shell is None or composite is None:
        return text

    def place(microbatch: Microbatch, values_BS: torch.Tensor) -> torch.Tensor:
        layout, split = microbatch.layout, built[0].config.sequence_parallel
        own_TR = layout.take(values_BS, groups.cp.rank() % layout.ranks)
        return own_TR.chunk(groups.tp.size())[groups.tp.rank()] if split else own_TR

    return PictureEmbedder(text, architecture.shell, composite, place, has_trained(composite))


def _fill(
    config: PolicyConfig,
    held: Held,
    table: Table,
    place: Placement,
    source_dtypes: Mapping[str, torch.dtype] | None,
) -> tuple[Mapping[str, torch.dtype], str]:
    """Read the held parameters from the model's own files, or mark them unfilled if dtypes are
    given. Returns the dtypes in which they are exported, and their digest if adapters need it.
    """
    if source_dtypes is None:
        with HfReader(config.model_name) as reader:
            load_parameters(held, reader, table, place, config.seed)
            adapted = config.megatron_cfg.peft.enabled
            digest = base_digest(reader, table.architecture, table.overrides) if adapted else ""
            dtype = reader.dtypes[table.entries[0].hf[0]]
            return dict(reader.dtypes) | dict.fromkeys(table.fresh, dtype), digest
    leave_unfilled(held, config, table, source_dtypes)
    return source_dtypes, ""


def _head(
    config: PolicyConfig, architecture: Architecture, place: Placement, groups: Groups, model: Any
) -> Head:
    """This rank's slice of the head, which the last chunk holds."""
    shard = vocab_shard(architecture.vocab_size, place.coords.tp, place.topology.tp)
    shape = describe_head(config, architecture, shard.first, shard.real)
    overlapped = config.megatron_cfg.distributed_data_parallel_config.overlap_param_gather
    return Head(shape, groups.tp, config.logprob_chunk_size, model, overlapped)
