"""What a policy is, in a few lines: model, layout, precision, optimizer, batches, memory, versions.

Only reads; the lines are at most 80 columns wide.
"""

from __future__ import annotations

import math
import platform
import textwrap
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version

from megatron_policy.adapters.targets import add_adapters
from megatron_policy.config import PolicyConfig
from megatron_policy.config.batching import batching_of
from megatron_policy.config.layout import layer_split
from megatron_policy.config.notes import notes_of
from megatron_policy.config.parallel_sizes import Engine, engine_of
from megatron_policy.converters.architecture import Architecture
from megatron_policy.device import is_accelerated, memory_info
from megatron_policy.device.profiling import device_name
from megatron_policy.estimate.memory import (
    BatchShape,
    StageMemory,
    kernels_of,
    longest_row,
    stage_memory,
)
from megatron_policy.estimate.sizes import show_count, show_size
from megatron_policy.estimate.states import ModelRows
from megatron_policy.interfaces.engine import TrainingEngine
from megatron_policy.memory.device_memory import DeviceMemory
from megatron_policy.parallel.topology import Topology
from megatron_policy.version import VERSION

WIDTH = 80
_LABEL = 12
_STAGES = 8
"""Stages that are listed."""
_PACKAGES = ("torch", "transformers", "ray")


def estimate_memory(
    config: PolicyConfig, engine: TrainingEngine, topology: Topology
) -> StageMemory | None:
    """What this rank needs in a step over rows of full length, as far as it can be estimated: of
    Megatron-Core's engine.
    """
    if engine_of(config) is not Engine.MEGATRON_CORE:
        return None
    arch = engine.table.architecture
    rows = ModelRows.of(add_adapters(config, engine.table))
    shape = BatchShape.of(config, longest_row(config, arch))
    kernels = kernels_of(config, arch, is_accelerated())
    stage, trained = engine.place.coords.pp, engine.trainable is not None
    return stage_memory(config, rows, topology, shape, stage, kernels, trained)


def summarize(
    config: PolicyConfig,
    engine: TrainingEngine,
    topology: Topology,
    memory: DeviceMemory,
    reference_bytes: int,
    closed: bool = False,
) -> str:
    """The lines, as one rank sees them; the first says whether the policy is `closed`."""
    here, packages = memory_info(), {name: _version(name) for name in _PACKAGES}
    others = "".join(f", {name} {found}" for name, found in packages.items() if found is not None)
    named: tuple[tuple[str, Iterable[str]], ...] = (
        ("state", ["shut down: this is what it was; make a new policy"] * closed),
        ("model", _model(config, engine)),
        ("parameters", _parameters(engine)),
        ("layout", _layout(config, engine, topology)),
        ("engine", _engine(config)),
        ("precision", _precision(config)),
        ("optimizer", _optimizer(config, engine)),
        ("batches", _batches(config, engine.table.architecture, topology)),
        ("memory", _memory(config, engine, topology, memory, reference_bytes)),
        ("note", notes_of(config, engine.table)),
        ("device", [f"{device_name()}, {show_size(here.free)} free of {show_size(here.total)}"]),
        ("versions", [f"megatron-policy {VERSION}{others}, Python {platform.python_version()}"]),
    )
    wrapped: list[str] = []
    for label, lines in named:
        for number, text in enumerate(lines):
            wrapped += textwrap.wrap(
                text,
                WIDTH,
                initial_indent=f"{'' if number else label:<{_LABEL}}",
                subsequent_indent=" " * _LABEL,
                break_on_hyphens=False,
            )
    return "\n".join(wrapped)


def _model(config: PolicyConfig, engine: TrainingEngine) -> Iterator[str]:
    arch = engine.table.architecture
    experts = "" if arch.moe is None else f", {arch.moe.experts} experts"
    head = "" if arch.head is None else ", with a scalar head"
    yield (
        f"{engine.table.family}: {arch.num_layers} layers of width {arch.hidden_size}, "
        f"{arch.mixer.num_attention_heads} heads{experts}, vocabulary of {arch.vocab_size}{head}"
    )
    yield f"from {config.model_name}"
    if config.reference_model_name is not None:
        yield f"reference {config.reference_model_name}"


def _parameters(engine: TrainingEngine) -> Iterator[str]:
    arch = engine.table.architecture
    own = (entry.row for entry in engine.table.entries if entry.row.owns and entry.row.learnt)
    total = sum(math.prod(row.local_shape(arch, 1)) for row in own)
    here = sum({id(each): each.numel() for entry, each in engine.held if entry.row.learnt}.values())
    yield f"{show_count(total)} in all, {show_count(here)} on this rank"
    if engine.adapters is not None:
        held = sum(each.numel() for _, each in engine.adapters.held)
        yield f"adapters: {show_count(held)} on this rank; nothing else is trained"


def _layout(config: PolicyConfig, engine: TrainingEngine, topology: Topology) -> Iterator[str]:
    arch = engine.table.architecture
    axes = " x ".join(f"{axis} {getattr(topology, axis)}" for axis in ("tp", "cp", "dp", "pp"))
    plural = "s" * (topology.world_size > 1)
    experts = "" if arch.moe is None else f", experts ep {topology.ep} x etp {topology.expert_tp}"
    yield f"{topology.world_size} rank{plural} = {axes}{experts}"
    if topology.pp == 1:
        return
    ranks = topology.world_size // topology.pp
    for stage, chunks in enumerate(layer_split(config, arch, topology).stages[:_STAGES]):
        layers = " and ".join(f"{chunk.start}-{chunk.stop - 1}" for chunk in chunks)
        first, last = stage * ranks, (stage + 1) * ranks - 1
        which = f"rank {first}" if first == last else f"ranks {first}-{last}"
        yield f"stage {stage}: {which}, layers {layers}"
    if topology.pp > _STAGES:
        yield f"and {topology.pp - _STAGES} more stages"


def _engine(config: PolicyConfig) -> Iterator[str]:
    engine = engine_of(config)
    if engine is not Engine.MEGATRON_CORE:
        yield f"transformers' modules under {engine.name}"
        return
    core = _version("megatron-core") or "(version not known)"
    te = _version("transformer-engine")
    with_te = f", Transformer Engine {te}" if te is not None else ", without Transformer Engine"
    yield f"Megatron-Core {core}{with_te}"


def _precision(config: PolicyConfig) -> Iterator[str]:
    megatron = config.megatron_cfg
    text: str = config.precision
    if engine_of(config) is Engine.MEGATRON_CORE:
        text += ", fp32 main parameters" if config.precision != "float32" else ""
        in_fp32 = megatron.distributed_data_parallel_config.grad_reduce_in_fp32
        text += f", gradients reduced in {'float32' if in_fp32 else config.precision}"
    yield text


def _optimizer(config: PolicyConfig, engine: TrainingEngine) -> Iterator[str]:
    if engine.trainable is None:
        yield "none: this policy is not trained"
        return
    rate, decay = engine.trainable.lr, engine.trainable.weight_decay
    if engine_of(config) is not Engine.MEGATRON_CORE:
        name = "torch.optim.AdamW" if config.optimizer is None else config.optimizer.name
        yield f"{name}, learning rate {rate:g} now, weight decay {decay:g}"
        return
    own, schedule = config.megatron_cfg.optimizer, config.megatron_cfg.scheduler
    spread = ", spread over data-parallel ranks" if own.use_distributed_optimizer else ""
    yield f"{own.optimizer}{spread}, weight decay {decay:g}, gradients clipped to {own.clip_grad:g}"
    style, warmup = schedule.lr_decay_style, schedule.lr_warmup_iters
    course = f"constant at {own.lr:g}"
    if style != "constant":
        course = f"{style} from {own.lr:g} to {own.min_lr:g} by iteration {schedule.lr_decay_iters}"
    start = f" after {warmup} iterations of warm-up" if warmup else ""
    yield f"learning rate {rate:g} now, {course}{start}"


def _batches(config: PolicyConfig, arch: Architecture, topology: Topology) -> Iterator[str]:
    rows = config.train_global_batch_size
    ranks = f" over {topology.dp} data-parallel ranks" if topology.dp > 1 else ""
    wanted = batching_of(config, training=True)
    if wanted.kind == "padded":
        size = f"{config.train_micro_batch_size}, padded"
    else:
        size = f"{wanted.tokens} tokens, {wanted.kind}"
    yield f"{rows} rows a step{ranks}, in microbatches of {size}"
    yield f"a row has at most {longest_row(config, arch)} tokens"


def _memory(
    config: PolicyConfig,
    engine: TrainingEngine,
    topology: Topology,
    memory: DeviceMemory,
    reference_bytes: int,
) -> Iterator[str]:
    here = memory.resident_bytes()
    parts = ", ".join(f"{kind} {show_size(size)}" for kind, size in here.items())
    yield f"{show_size(sum(here.values()))} on this rank's device: {parts}"
    if reference_bytes:
        yield f"{show_size(reference_bytes)} of the reference's weights on the host"
    expected = estimate_memory(config, engine, topology)
    if expected is not None and engine.trainable is not None:
        most = expected.activations + expected.head
        yield (
            f"{show_size(expected.peak)} expected at a step's peak: states "
            f"{show_size(expected.states.resident)}, activations and head {show_size(most)}"
        )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
