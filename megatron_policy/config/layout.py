"""Checks that a configuration fits ranks and model before any process starts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from megatron_policy.config.batching import batching_of
from megatron_policy.config.parallel_sizes import Engine, engine_of, parallel_sizes, read_layout
from megatron_policy.errors import ConfigError
from megatron_policy.parallel.topology import LayerSplit, Topology

if TYPE_CHECKING:
    from megatron_policy.config import MegatronConfig, PolicyConfig
    from megatron_policy.converters.architecture import Architecture, Moe


SMALLEST_BUCKET_BYTES = 4096
"""Of a rank's share of a refit's bucket."""

_LOAD_BALANCING = ("none", "aux_loss", "seq_aux_loss", "global_aux_loss")


def topology_of(config: PolicyConfig, world_size: int) -> Topology:
    """The grid of `world_size` ranks; the data-parallel size is what the other axes leave.

    Raises ConfigError, naming legal sizes, when the ranks do not divide.
    """
    sizes = parallel_sizes(config)
    tp, pp, cp = sizes.tp, sizes.pp, sizes.cp
    replica = tp * cp * pp * sizes.replicas
    if world_size < 1 or world_size % replica:
        factors = {sizes.tp_key: tp, "context_parallel_size": cp}
        if sizes.section == "policy.megatron_cfg":
            factors["pipeline_model_parallel_size"] = pp
        else:
            factors["dp_replicate_size"] = sizes.replicas
        ranks = "1 rank does" if world_size == 1 else f"{world_size} ranks do"
        raise ConfigError(
            f"{ranks} not hold whole replicas of the model, each "
            f"{' x '.join(f'{key}={size}' for key, size in factors.items())} = {replica} ranks: "
            f"start {replica}, {2 * replica}, {3 * replica}, ... ranks, or make these sizes smaller"
        )
    _check_expert_ranks(world_size // pp, sizes.ep, sizes.etp, tp)
    return Topology(
        tp=tp,
        cp=cp,
        ep=sizes.ep,
        dp=world_size // (tp * cp * pp),
        pp=pp,
        vpp=sizes.vpp,
        etp=sizes.etp,
    )


def _check_expert_ranks(stage: int, ep: int, etp: int | None, tp: int) -> None:
    """ConfigError, naming legal sizes, unless experts split over the `stage` ranks of a stage."""
    shards = tp if etp is None else etp
    if not stage % (ep * shards):
        return
    what = "as many as tensor_model_parallel_size" if etp is None else "expert_tensor_parallel_size"
    legal = [size for size in range(1, stage + 1) if stage % (size * shards) == 0]
    fix = f"use one of {legal}"
    if not legal:
        sizes = [size for size in range(1, stage + 1) if stage % (ep * size) == 0]
        sizes = sizes or [size for size in range(1, stage + 1) if stage % size == 0]
        fix = f"set expert_tensor_parallel_size to one of {sizes}"
    raise ConfigError(
        f"policy.megatron_cfg.expert_model_parallel_size={ep} x {shards} ({what}) does not divide "
        f"the {stage} ranks of a pipeline stage: {fix}, or start another number of ranks"
    )


def mtp_layers(megatron: MegatronConfig) -> int:
    """The layers for multi-token prediction that the model has under this configuration."""
    layers = megatron.mtp_num_layers
    return min(layers, 1) if megatron.mtp_use_repeated_layer else layers


def checked_topology(
    config: PolicyConfig, architecture: Architecture, world_size: int, *, planned: bool = False
) -> Topology:
    """The grid of `world_size` ranks, after `check_layout`."""
    topology = topology_of(config, world_size)
    check_layout(config, architecture, topology, planned=planned)
    return topology


def check_layout(
    config: PolicyConfig, architecture: Architecture, topology: Topology, *, planned: bool = False
) -> None:
    """Raise ConfigError listing, with legal values, where configuration, model and ranks do not
    fit. `planned` says that a driver may share out batches, unequally if it has to.
    """
    problems = []
    if config.router_replay.enabled and architecture.moe is None:
        problems.append(
            "policy.router_replay.enabled=true needs a model with experts, and this one has none: "
            "set it to false"
        )
    for training in (True, False):
        problems += _refusals(batching_of, config, training)
    refused = _refusals(check_bucket, config.refit_bucket_bytes, topology)
    problems += [f"policy.refit_bucket_bytes: {each}" for each in refused]
    if engine_of(config) is Engine.MEGATRON_CORE:
        problems += _check_tensor_parallel(config, architecture, topology)
        problems += _check_context_parallel(architecture, topology)
        problems += _check_experts(config, architecture, topology)
        problems += _check_routers(config, architecture)
        try:
            split = layer_split(config, architecture, topology)
        except ConfigError as error:
            problems.append(f"policy.megatron_cfg: {error}")
        else:
            problems += _check_recomputation(config, split)
            deep = 0 if architecture.shell is None else architecture.shell.deep
            if (first := len(split.stages[0][0])) < deep:
                problems.append(
                    f"features of pictures are added to the outputs of the first {deep} layers, "
                    f"but the first model chunk has {first}: give it {deep} or more "
                    "(num_layers_in_first_pipeline_stage), or use fewer stages or virtual stages"
                )
    rows = config.train_global_batch_size
    if pads(config):
        problems += _refusals(microbatches, rows, config.train_micro_batch_size, topology)
    elif not planned:
        problems += _refusals(equal_share, rows, topology)
    if problems:
        raise ConfigError("\n".join(problems))


def pads(config: PolicyConfig) -> bool:
    """Whether microbatches have a number of rows, which must then divide global batches, rather
    than a number of tokens.
    """
    return not (config.dynamic_batching.enabled or config.sequence_packing.enabled)


def _refusals(check: Callable[..., object], *values: object) -> Iterator[str]:
    """The message of a check that refuses these values."""
    try:
        check(*values)
    except ConfigError as error:
        yield str(error)


def equal_share(global_batch_size: int, topology: Topology) -> int:
    """Rows of a global batch on each data-parallel rank, where no driver plans them.

    Raises ConfigError, naming the nearest legal sizes, unless they are equal.
    """
    share, left = divmod(global_batch_size, topology.dp)
    if left:
        below = share * topology.dp
        legal = " or ".join(str(size) for size in (below, below + topology.dp) if size)
        raise ConfigError(
            f"global batch size {global_batch_size} (train_global_batch_size, or gbs) is not a "
            f"multiple of {topology.dp} data-parallel ranks, each of which gets as many rows: use "
            f"{legal}. Only `Policy`, this package's driver under Ray, shares out other sizes"
        )
    return share


def check_bucket(bucket_bytes: int, topology: Topology) -> None:
    """ConfigError unless every rank's share of a refit's bucket has a sensible size."""
    least = SMALLEST_BUCKET_BYTES * topology.gather_block
    if bucket_bytes < least:
        raise ConfigError(
            f"a refit bucket of {bucket_bytes} bytes is too small: give {least} or more "
            f"({SMALLEST_BUCKET_BYTES} for each rank that can have a share)"
        )


def microbatches(global_batch_size: int, micro_batch_size: int, topology: Topology) -> int:
    """Microbatches of `micro_batch_size` rows per data-parallel rank and optimizer step.

    Raises ConfigError, naming the nearest legal global batch sizes, unless everything divides.
    """
    unit = micro_batch_size * topology.dp
    round_ = microbatch_round(topology)
    step = unit * round_
    if global_batch_size % step or not global_batch_size:
        stages = f" x {round_} interleaved pipeline stages" if round_ > 1 else ""
        below = global_batch_size // step * step
        legal = " or ".join(str(size) for size in (below, below + step) if size)
        raise ConfigError(
            f"global batch size {global_batch_size} (train_global_batch_size, or gbs) is not "
            f"a multiple of micro batch size {micro_batch_size} (train_micro_batch_size, or mbs) "
            f"x {topology.dp} data-parallel ranks{stages} = {step}: use {legal}"
        )
    return global_batch_size // unit


def microbatch_round(topology: Topology) -> int:
    """What a rank's number of microbatches must be a multiple of: the interleaved schedule runs
    whole rounds of one microbatch per stage.
    """
    return topology.pp if topology.vpp > 1 else 1


def layer_split(config: PolicyConfig, architecture: Architecture, topology: Topology) -> LayerSplit:
    """Which layers each stage and chunk holds: what the configuration says, or else as many in all,
    or, where layers have one part each, such that chunks have equally much to compute. ConfigError
    if there is no such split.
    """
    sizes, stages = parallel_sizes(config), (topology.pp, topology.vpp)
    if sizes.layout is not None:
        counts, _ = read_layout(sizes.layout)
        if sum(counts) != architecture.num_layers:
            raise ConfigError(
                f"pipeline_model_parallel_layout has {sum(counts)} layers (t), but the model has "
                f"{architecture.num_layers}: give it as many"
            )
        return LayerSplit.of_chunks(counts, topology.pp)
    ends, chunks = (sizes.first_layers, sizes.last_layers), topology.pp * topology.vpp
    balanced = architecture.has_single_parts and topology.pp > 1 and ends == (None, None)
    if balanced and chunks <= architecture.num_layers:
        costs = architecture.cost_layers(config.megatron_cfg.mtp_num_layers)
        return LayerSplit.balance(costs, *stages)
    return LayerSplit.of(architecture.num_layers, *stages, *ends)


def _check_recomputation(config: PolicyConfig, split: LayerSplit) -> Iterator[str]:
    """Report numbers of layers to recompute that exceed a model chunk or do not divide it."""
    number, method = config.megatron_cfg.recompute_num_layers, config.megatron_cfg.recompute_method
    counts = sorted({len(chunk) for stage in split.stages for chunk in stage})
    if number is None:
        return
    asked = f"policy.megatron_cfg.recompute_num_layers={number}"
    held = " or ".join(map(str, counts))
    if method == "block" and number > counts[-1]:
        yield (
            f"{asked} is more than the layers of each model chunk, which has {held}: use 1 to "
            f"{counts[-1]}"
        )
    elif method == "uniform" and (common := math.gcd(*counts)) % number:
        legal = [size for size in range(1, common + 1) if common % size == 0]
        yield (
            f"{asked} does not divide the layers of each model chunk, which has {held}: use one of "
            f"{legal}"
        )


def _check_tensor_parallel(
    config: PolicyConfig, architecture: Architecture, topology: Topology
) -> Iterator[str]:
    tp, parts = topology.tp, architecture.parts.values()
    splits = dict.fromkeys(split for part in parts for split in part.splits)
    if not all(split.allows(tp) for split in splits):
        most = min(split.number for split in splits if split.multiples is None)
        legal = [size for size in range(1, most + 1) if all(split.allows(size) for split in splits)]
        plain: dict[str, list[str]] = {}
        others = []
        for count, what, multiples in (split for split in splits if not split.allows(tp)):
            if multiples is None:
                plain.setdefault(what, []).append(str(count))
            else:
                rule = "neither divides nor is a multiple of" if multiples else "does not divide"
                others.append(f"{rule} {count} {what}")
        divided = " and ".join(f"{' and '.join(each)} {what}" for what, each in plain.items())
        reasons = [f"does not divide {divided}"] * bool(plain) + others
        yield (
            f"policy.megatron_cfg.tensor_model_parallel_size={tp} {', or '.join(reasons)}: use one "
            f"of {legal}"
        )
    if config.megatron_cfg.sequence_parallel and tp == 1:
        yield (
            "policy.megatron_cfg.sequence_parallel=true splits sequences over tensor-parallel "
            "ranks: set tensor_model_parallel_size to 2 or more, or sequence_parallel to false"
        )


def _check_context_parallel(architecture: Architecture, topology: Topology) -> Iterator[str]:
    """Report ranks that cannot share the heads of parts that exchange tokens for heads."""
    tp, cp = topology.tp, topology.cp
    splits = [split for part in architecture.parts.values() for split in part.context_splits]
    failing = [split for split in splits if not split.allows(tp * cp)]
    if cp == 1 or not failing or not all(split.allows(tp) for split in splits):
        return
    most = min(split.number for split in splits if split.multiples is None) // tp
    legal = [n for n in range(1, most + 1) if all(split.allows(tp * n) for split in splits)]
    counts = " and ".join(f"{number} {what}" for number, what, _ in failing)
    yield (
        f"policy.megatron_cfg.context_parallel_size={cp} with tensor_model_parallel_size={tp} "
        f"shares {counts} among {tp * cp} ranks, which do not divide them: use one of {legal}"
    )


def _check_experts(
    config: PolicyConfig, architecture: Architecture, topology: Topology
) -> Iterator[str]:
    """Report sizes that do not divide the experts, and what Megatron-Core splits over
    tensor-parallel ranks only conditionally, or not at all.
    """
    moe, ep, etp = architecture.moe, topology.ep, topology.expert_tp
    if moe is None:
        if ep > 1:
            yield (
                f"policy.megatron_cfg.expert_model_parallel_size={ep} needs a model with experts, "
                "and this one has none: use 1"
            )
    else:
        if moe.experts % ep:
            legal = [size for size in range(1, moe.experts + 1) if moe.experts % size == 0]
            yield (
                f"policy.megatron_cfg.expert_model_parallel_size={ep} does not divide the "
                f"{moe.experts} experts of a layer: use one of {legal}"
            )
        key = "policy.megatron_cfg.expert_tensor_parallel_size"
        default = "" if topology.etp else " (not set, so it is tensor_model_parallel_size)"
        if etp > 1 and moe.mlp_bias:
            yield (
                f"{key}={etp}{default} does not fit experts with biases, which Megatron-Core "
                "cannot split: set it to 1"
            )
        elif moe.ffn_hidden_size % etp:
            width = moe.ffn_hidden_size
            legal = [size for size in range(1, min(width, 128) + 1) if width % size == 0]
            yield (
                f"{key}={etp}{default} does not divide the {width} feed-forward channels of an "
                f"expert: use one of {legal}"
            )
    parts = reversed([*architecture.parts.values()])
    present = " and ".join(filter(None, (part.needs_sequence_parallel for part in parts)))
    if topology.tp > 1 and present and not config.megatron_cfg.sequence_parallel:
        yield (
            f"policy.megatron_cfg.tensor_model_parallel_size={topology.tp} with {present} needs "
            "policy.megatron_cfg.sequence_parallel=true: set it"
        )


def _check_routers(config: PolicyConfig, architecture: Architecture) -> Iterator[str]:
    """Report settings of an expert router that are not supported."""
    megatron, moe = config.megatron_cfg, architecture.moe
    if moe is None:
        return
    kind = megatron.moe_router_load_balancing_type
    coefficient = megatron.moe_aux_loss_coeff
    if kind in (None, "none"):
        if coefficient:
            yield (
                f"policy.megatron_cfg.moe_aux_loss_coeff={coefficient} has no effect without a "
                "load balancing loss: set moe_router_load_balancing_type to one of "
                f"{', '.join(map(repr, _LOAD_BALANCING[1:]))}, or leave the coefficient out"
            )
    elif kind not in _LOAD_BALANCING:
        yield (
            f"policy.megatron_cfg.moe_router_load_balancing_type={kind!r} is not supported: use "
            f"one of {', '.join(map(repr, _LOAD_BALANCING))}"
        )
    elif coefficient is None and moe.aux_loss_coeff is None:
        yield (
            f"policy.megatron_cfg.moe_router_load_balancing_type={kind!r} needs a coefficient, and "
            "the model's config.json has none: set moe_aux_loss_coeff (1e-3, for example)"
        )
    yield from _check_expert_bias(megatron, moe)
    factor = megatron.moe_expert_capacity_factor
    if factor == 0:
        yield (
            "policy.megatron_cfg.moe_expert_capacity_factor=0 leaves experts without tokens: use a "
            "larger number, or null to drop none"
        )
    if megatron.moe_pad_expert_input_to_capacity and factor is None:
        yield (
            "policy.megatron_cfg.moe_pad_expert_input_to_capacity=true pads to a capacity: set "
            "moe_expert_capacity_factor, or leave it out"
        )
    if megatron.moe_router_dtype not in (None, "fp32", "fp64"):
        yield (
            f"policy.megatron_cfg.moe_router_dtype={megatron.moe_router_dtype!r} is not a "
            "router precision: use 'fp32' or 'fp64', or null for the model's"
        )


def _check_expert_bias(megatron: MegatronConfig, moe: Moe) -> Iterator[str]:
    """Report a correction bias that is switched against the model, where that would count."""
    at, enabled = (
        "policy.megatron_cfg.moe_router_enable_expert_bias",
        megatron.moe_router_enable_expert_bias,
    )
    if enabled is False and moe.correction_bias:
        yield f"{at}=false drops the correction biases that the model has: leave it out"
    if enabled and megatron.moe_router_bias_update_rate and not moe.correction_bias:
        yield (
            f"{at}=true trains correction biases, which the model does not have: its checkpoints "
            "and inference engines have no place for them and would route without them; leave it "
            "out, or set moe_router_bias_update_rate to 0"
        )
