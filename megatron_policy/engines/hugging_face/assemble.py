"""Builds a rank's FSDP engine: groups, sharded model, weights, optimizer, head. This module is an
`interfaces.engine.EngineBuilder`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megatron_policy.config import PolicyConfig
from megatron_policy.config.layout import layer_split
from megatron_policy.config.parallel_sizes import (
    Engine,
    engine_of,
    model_copies,
    parallel_sizes,
)
from megatron_policy.config.param_groups import ParamGroups
from megatron_policy.converters.formats.hf_files import HfReader
from megatron_policy.converters.table import Table
from megatron_policy.device import is_accelerated
from megatron_policy.device.timing import Recorder
from megatron_policy.engines.composite import take_surroundings
from megatron_policy.engines.hugging_face.attention import NAME
from megatron_policy.engines.hugging_face.engine import FsdpEngine
from megatron_policy.engines.hugging_face.fsdp1 import Fsdp1
from megatron_policy.engines.hugging_face.head import FusedHead, OwnHead
from megatron_policy.engines.hugging_face.import_paths import refuse_schedule
from megatron_policy.engines.hugging_face.module import (
    Decoder,
    SourceTensors,
    build_module,
    refuse_unmatched,
    sources_of,
)
from megatron_policy.engines.hugging_face.optimizer import FsdpTrainable, GroupOf, make_optimizer
from megatron_policy.engines.hugging_face.process_groups import FsdpGroups, make_groups
from megatron_policy.engines.hugging_face.sharding import Fsdp2, Sharding, split_dimension
from megatron_policy.engines.hugging_face.table import Cut, Shares, sharded_table
from megatron_policy.engines.hugging_face.tensor_plan import plan_of
from megatron_policy.engines.hugging_face.tensor_regions import TensorRegion
from megatron_policy.engines.hugging_face.tensor_split import split
from megatron_policy.engines.hugging_face.text_length import TextLength, untold
from megatron_policy.engines.shared import check_embedder, describe_head, leave_unfilled
from megatron_policy.engines.shell import PictureEmbedder, has_trained
from megatron_policy.errors import ConfigError
from megatron_policy.interfaces.embedder import Embedder, TokenEmbedder
from megatron_policy.memory.pending_reads import PendingReads
from megatron_policy.packing.microbatch import Microbatch
from megatron_policy.parallel.topology import Coords, Placement, Topology
from megatron_policy.weights.load import DTYPES, load_parameters

_log = logging.getLogger(__name__)
_ALIGNMENT_BYTES = 16
"""Of the rows of both factors of torch's grouped products."""
_WHOLE_SEQUENCES = frozenset({"full_attention", "sliding_attention", "mlp", "moe"})
"""Kinds of layers, by transformers' names, whose tokens mix in attention alone."""


def prepare() -> None:
    """Nothing: any number of such policies can be in a process."""


def build(
    config: PolicyConfig,
    table: Table,
    topology: Topology,
    *,
    init_optimizer: bool,
    timeout_s: float,
    source_dtypes: Mapping[str, torch.dtype] | None = None,
) -> FsdpEngine:
    """Build and load this rank's part of the model; see `EngineBuilder`."""
    copies = model_copies(config, topology.world_size)
    module = build_module(config, table.architecture.shell is not None)
    _refuse_mixing(config, module)
    _refuse_masks(config, table, module)
    names = tuple(table.hf_shapes() or source_dtypes or ())
    if not names:  # of a model without a family: those of its checkpoint
        with HfReader(config.model_name) as reader:
            names = tuple(reader.shapes)
    sources = sources_of(module, names, turned=_can_be_turned(table))
    refuse_unmatched(module, sources, names)
    groups = make_groups(topology, copies, timeout_s)
    try:
        engine = _build(
            config, table, topology, groups, module, sources, init_optimizer, source_dtypes
        )
        check_embedder(engine.embedder, table.architecture)
        return engine
    except BaseException:
        groups.close()
        raise


def check_build(config: PolicyConfig, table: Table, topology: Topology) -> None:
    """ConfigError or ConversionError for what `build` refuses for the sake of the configuration,
    the model's class and the number of ranks. Builds the model without memory of its weights.

    The tensors of a model without a family are those of its files: how ranks would cut them is not
    checked.
    """
    module = build_module(config, table.architecture.shell is not None)
    _refuse_mixing(config, module)
    _refuse_masks(config, table, module)
    refuse_schedule(config, make_optimizer(config, [], lambda name: None))
    decoder = Decoder(module)
    _ = decoder.base  # refuses a model without one
    names, tp = tuple(table.hf_shapes()), topology.tp
    if not names:
        if tp > 1:
            plan_of(config.dtensor_cfg, module)
        return
    sources = sources_of(module, names, turned=_can_be_turned(table))
    refuse_unmatched(module, sources, names)
    region: Any = TensorRegion(_Ranks(tp), parallel_sizes(config).sequence_parallel)  # type: ignore[arg-type]
    _tensor_parallel(config, table, region, decoder, sources)
    if engine_of(config) is Engine.FSDP2:
        ranks = topology.world_size // model_copies(config, topology.world_size) // tp
        for name, source in sources.items():
            if source.stacked:
                split_dimension(tuple(module.get_parameter(name).shape), True, ranks)


def _can_be_turned(table: Table) -> bool:
    """Whether experts can be in the files with inputs before outputs."""
    moe = table.architecture.moe
    return not table.entries or (moe is not None and moe.inputs_first)


@dataclass(frozen=True)
class _Ranks:
    """The first rank of a group that is not there; it has no collectives."""

    ranks: int

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return self.ranks


def _build(
    config: PolicyConfig,
    table: Table,
    topology: Topology,
    groups: FsdpGroups,
    module: Any,
    sources: Any,
    init_optimizer: bool,
    source_dtypes: Mapping[str, torch.dtype] | None,
) -> FsdpEngine:
    decoder, ranks = Decoder(module), groups.shards.size()
    group_of = _freeze(config, table, module, sources)
    text = TextLength.of(module, config.rope_length, config.max_total_sequence_length)
    region = TensorRegion(groups.batch.tp, parallel_sizes(config).sequence_parallel)
    shares = _tensor_parallel(config, table, region, decoder, sources)
    embedder = _embedder(table, decoder, groups, region)
    choose_experts(decoder.model, DTYPES[config.precision])
    sharding = _shared_out(config, decoder, groups, sources)
    own = sharded_table(decoder, table, sources, sharding, shares)
    weights = Topology(tp=ranks, dp=groups.copies.size())
    coords = Coords(pp=0, dp=groups.copies.rank(), cp=0, tp=groups.shards.rank())
    place = Placement(weights, coords, layer_split(config, table.architecture, topology))
    if source_dtypes is None:
        with HfReader(config.model_name) as reader:
            load_parameters(own.held, reader, own.table, place, config.seed)
            dtypes: Mapping[str, torch.dtype] = dict(reader.dtypes)
    else:
        leave_unfilled(own.held, config, own.table, source_dtypes)
        dtypes = source_dtypes
    trainable = None
    if init_optimizer:
        trainable = FsdpTrainable(config, group_of, own.holdings, own.held, groups, sharding)
    return FsdpEngine(
        place,
        groups,
        own.table,
        own.held,
        dtypes,
        torch.float32,
        decoder,
        sharding,
        embedder,
        _head(config, table, groups, decoder, region),
        trainable,
        PendingReads(),
        Recorder() if trainable is None else trainable.stopwatch.recorder,
        text,
    )


def _freeze(
    config: PolicyConfig, table: Table, module: Any, sources: Mapping[str, SourceTensors]
) -> GroupOf:
    """Let parameters of frozen groups need no gradients. Returns how the group of a parameter is
    found by the name of an HF tensor that makes it.
    """
    groups, entries = ParamGroups.of_policy(config), table.exported()
    found = {name: groups.group_of(entry) for entry in entries for name in entry.hf}
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for name, source in sources.items():
        group = found.get(source.names[0][0])
        if name in parameters and group is not None and group.freeze:
            parameters[name].requires_grad_(False)
    return found.get


def _embedder(table: Table, decoder: Decoder, groups: FsdpGroups, region: TensorRegion) -> Embedder:
    """What embeds tokens within `Decoder.forward`, where FSDP has gathered the weights."""
    text = TokenEmbedder(decoder.model.get_input_embeddings().forward)
    shell = table.architecture.shell
    if shell is None:
        return text

    def place(microbatch: Microbatch, values_BS: torch.Tensor) -> torch.Tensor:
        layout = microbatch.layout
        own_TR = layout.take(values_BS, groups.batch.cp.rank() % layout.ranks)
        own_RT = own_TR.transpose(0, 1).contiguous()
        return own_RT.chunk(region.size, 1)[region.rank] if region.splits_tokens else own_RT

    composite = take_surroundings(decoder.model.base_model)
    return PictureEmbedder(text, shell, composite, place, has_trained(composite))


def _tensor_parallel(
    config: PolicyConfig,
    table: Table,
    region: TensorRegion,
    decoder: Decoder,
    sources: Mapping[str, SourceTensors],
) -> Shares:
    """Cut the model to what a rank of `region` has of it."""
    if region.size == 1:
        return Shares()
    if region.splits_tokens and not table.entries:
        raise ConfigError(
            "policy.dtensor_cfg.sequence_parallel needs a family of this package, and "
            f"{type(decoder.model).__name__} has none: set it to false"
        )
    plan = plan_of(config.dtensor_cfg, decoder.model)
    return split(decoder, plan, sources, region, ends=bool(table.entries))


def choose_experts(model: Any, compute: torch.dtype) -> None:
    """Let experts be computed one by one where torch's grouped products, which transformers
    chooses, cannot have their sizes on this rank.
    """
    if getattr(model.config, "_experts_implementation", None) != "grouped_mm":
        return
    sizes = {
        tuple(weight.shape[1:])
        for module in model.modules()
        if hasattr(module, "_apply_gate")  # as transformers marks experts of several ways
        for weight in module.parameters(recurse=False)
        if weight.ndim == 3
    }
    refused = {each for each in sizes if any(n * compute.itemsize % _ALIGNMENT_BYTES for n in each)}
    if refused:
        model.set_experts_implementation("eager")
        _log.warning(
            "experts are computed one by one, which is slow: grouped products need both sizes of "
            "an expert's weights on a rank to be multiples of %d in %s, and here they are %s",
            _ALIGNMENT_BYTES // compute.itemsize,
            str(compute).removeprefix("torch."),
            " and ".join(" x ".join(map(str, each)) for each in sorted(refused)),
        )


def _shared_out(
    config: PolicyConfig, decoder: Decoder, groups: FsdpGroups, sources: Mapping[str, SourceTensors]
) -> Sharding:
    """The decoder, shared out as the configuration says; its layers are recomputed if asked."""
    way, compute = engine_of(config), DTYPES[config.precision]
    fsdp1, fsdp2 = config.fsdp_cfg, config.dtensor_cfg
    key, offload = "dtensor_cfg.cpu_offload", fsdp2.cpu_offload
    recompute = fsdp2.activation_checkpointing
    if way is Engine.FSDP1:
        key, offload = "fsdp_cfg.fsdp_offload_enabled", fsdp1.fsdp_offload_enabled
        recompute = fsdp1.activation_checkpointing_enabled
    if offload and is_accelerated():
        raise ConfigError(
            f"policy.{key} is not supported on GPUs: use activation checkpointing, more ranks, or "
            "the memory states between steps"
        )
    if recompute:
        decoder.model.gradient_checkpointing_enable({"use_reentrant": False})
    if way is Engine.FSDP1:
        group = groups.shards if groups.shards.size() > 1 else groups.copies
        return Fsdp1.of(decoder, group, compute, fsdp1.sharding_strategy)
    stacked = [name for name, source in sources.items() if source.stacked]
    return Fsdp2.of(decoder, groups.mesh, compute, offload, stacked)


def _head(
    config: PolicyConfig,
    table: Table,
    groups: FsdpGroups,
    decoder: Decoder,
    region: TensorRegion,
) -> FusedHead | OwnHead:
    """Fused for families, whose tables say how logits come from hidden states."""
    architecture, chunk = table.architecture, config.logprob_chunk_size
    if not table.entries:
        vocab = architecture.vocab_size
        shape = describe_head(config, architecture, 0, vocab)
        given = (vocab, shape.temperature, shape.filters, region, chunk)
        return OwnHead(decoder.model, decoder.base, *given)
    linear = decoder.model.get_output_embeddings()
    assert getattr(linear, "bias", None) is None, "no family's head has a bias"
    first, real, _ = Cut(region.size, 0).share((architecture.vocab_size,), 0, region.rank)
    shape = describe_head(config, architecture, first, real)
    return FusedHead(shape, region.group, chunk, linear, architecture.vocab_size, region)


def _refuse_mixing(config: PolicyConfig, module: Any) -> None:
    """ConfigError where sequences that share a row, or are split over ranks, would mix or lose what
    they need: other layers than attention, and rotary embeddings that know the text's length.
    """
    sizes = parallel_sizes(config)
    keys = {
        "dtensor_cfg.context_parallel_size": sizes.cp > 1,
        "dtensor_cfg.sequence_parallel": sizes.sequence_parallel,
        "sequence_packing": config.sequence_packing.enabled,
        "dynamic_batching": config.dynamic_batching.enabled,
    }
    key, name = next((key for key, asked in keys.items() if asked), None), type(module).__name__
    if (key or config.rope_length == "maximum") and (kind := untold(module)):
        what = f"policy.{key}" if key else "policy.rope_length='maximum'"
        raise ConfigError(
            f"{what} needs a rotary embedding that can be told the length of the text, and that of "
            f"{name}, of type {kind}, cannot: use rope_length='batch' and padded batches without "
            "context parallelism"
        )
    if key in (None, "dynamic_batching"):
        return
    settings = module.config.get_text_config()
    kinds = set(getattr(settings, "layer_types", None) or _WHOLE_SEQUENCES)
    others = sorted(kinds - _WHOLE_SEQUENCES)
    attends = getattr(module, "_supports_attention_backend", False)
    if others or not attends or getattr(module, "_is_stateful", False):
        has = ", ".join(others) or ("a state" if attends else "an attention of its own")
        raise ConfigError(
            f"policy.{key} needs layers that mix tokens in transformers' attention alone, and "
            f"{name} has {has}: use padded or dynamic batches without it"
        )


def _refuse_masks(config: PolicyConfig, table: Table, module: Any) -> None:
    """ConfigError where the tokens of a picture see each other and transformers makes the masks,
    which it makes of text here.
    """
    shell, settings = table.architecture.shell, module.config.get_text_config()
    if shell is not None and shell.both_ways and settings._attn_implementation != NAME:
        key = f"policy.{parallel_sizes(config).section}.attn_implementation"
        raise ConfigError(
            f"{key}={settings._attn_implementation!r} makes masks of text alone, and the tokens of "
            f"a picture of {type(module).__name__} see each other: use 'auto'"
        )
