"""What is reported of plans."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import yaml

from megatron_policy.cli.report import CommandReport, layout_data
from megatron_policy.config.megatron_sections import recompute_keys
from megatron_policy.config.parallel_sizes import keys_of_sizes, parallel_sizes
from megatron_policy.estimate.plan import SearchResult, StepPlan
from megatron_policy.estimate.sizes import show_count, show_gib

SHOWN = 5
"""Plans of a search that are shown."""


def plans_of(found: StepPlan | SearchResult) -> Sequence[StepPlan]:
    """The plan, or all that a search came to, the best first."""
    return found.plans if isinstance(found, SearchResult) else (found,)


def report_plans(
    found: StepPlan | SearchResult, device: str, base: Mapping[str, Any] | None
) -> CommandReport:
    """Report a plan, or the best that a search came to, with the section `policy` that has it: of
    its `base`, or without one the keys of its layout.
    """
    if isinstance(found, SearchResult):
        parts = _found_lines(found, device, base or {})
    else:
        parts = lines(found, device)
    plans = plans_of(found)[:SHOWN]
    return CommandReport(lambda: [_as_data(each, base) for each in plans], parts)


def _as_data(plan: StepPlan, base: Mapping[str, Any] | None) -> dict[str, Any]:
    """A plan as JSON: bytes, seconds and counts."""
    time, topology = plan.time, plan.topology
    return {
        "ranks": topology.world_size,
        "layout": layout_data(topology),
        "recompute": plan.config.megatron_cfg.recomputation,
        "megatron_cfg": policy_section(plan, base or {})["megatron_cfg"],
        "policy": None if base is None else policy_section(plan, base),
        "fits": plan.fits,
        "peak_bytes": plan.peak,
        "usable_bytes": plan.usable,
        "microbatches": plan.schedule.microbatches,
        "stages": list(_stages(plan)),
        "refit_bytes": plan.refit_bytes,
        "host": {
            "reference_bytes": plan.reference_bytes,
            "staging_bytes": plan.staging_bytes,
            "snapshot_bytes": plan.snapshot_bytes,
        },
        "model_flops": time.model_flops,
        "seconds": {
            "overlapped": time.overlapped,
            "serial": time.serial,
            "compute": time.compute,
            "optimizer": time.optimizer,
            **{f"wire_{axis}": seconds for axis, seconds in time.wire.items()},
        },
        "wire_bytes": time.wire_bytes,
        "bubble": time.bubble,
        "balance": time.balance,
        "mfu_at_most": time.mfu(topology.world_size, plan.device),
    }


def lines(plan: StepPlan, device: str) -> Iterator[str]:
    """Layout, memory of each stage's ranks, memory of the host, and time."""
    arch = plan.architecture
    yield (
        f"{arch.num_layers} layers of width {arch.hidden_size} on {plan.topology.world_size} "
        f"{device}: {layout_of(plan)}, recompute {plan.config.megatron_cfg.recomputation}"
    )
    yield _batch_line(plan)
    yield "GiB on each rank, by stage"
    names = "stage layers parameters gradients main moments activations head step peak free"
    cells = [names.split()]
    for number, stage in enumerate(_stages(plan)):
        layers, *sizes = stage.values()
        free = plan.usable - stage["peak_bytes"]
        gib = (f"{size / 2**30:.2f}" for size in (*sizes, free))
        cells.append([str(number), str(layers), *gib])
    yield from _table(cells)
    if any(stage.states.step for stage in plan.stages):
        yield "step: fp32 gradients in the optimizer's step, when no activations are there"
    state = "fits" if plan.fits else "DOES NOT FIT"
    yield (
        f"{state}: {show_gib(plan.peak)} at the peak, of stage {plan.fullest}, in "
        f"{show_gib(plan.usable)} that can be planned with"
    )
    if plan.device.engine_bytes:
        yield f"an engine beside it keeps {show_gib(plan.device.engine_bytes)} of each GPU"
    else:
        yield "an inference engine on the same GPUs would need memory too: --beside-engine GIB"
    yield f"a refit: {show_gib(plan.refit_bytes)} of buffers on each rank, beside its states"
    yield (
        f"host memory of a rank: {show_gib(plan.reference_bytes)} for a reference policy, "
        f"{show_gib(plan.staging_bytes)} for a save in the background, "
        f"{show_gib(plan.snapshot_bytes)} for a refit beside training"
    )
    yield from _time_lines(plan)


def _batch_line(plan: StepPlan) -> str:
    shape = plan.batch_shape
    media = shape.tower.media
    seen = f" with pictures of {media.patches} patches" if media.patches else ""
    seen += f" with {media.frames} frames of sound" if media.frames else ""
    return (
        f"a step: {shape.rows} rows of {shape.length} tokens{seen}, "
        f"{plan.schedule.microbatches} microbatches of {shape.tokens} on each replica"
    )


def _stages(plan: StepPlan) -> Iterator[dict[str, int]]:
    """The layers of each stage, and what its ranks need."""
    for chunks, stage in zip(plan.split.stages, plan.stages, strict=True):
        yield {
            "layers": sum(map(len, chunks)),
            "parameter_bytes": stage.states.parameters,
            "gradient_bytes": stage.states.gradients,
            "main_parameter_bytes": stage.states.main_parameters,
            "moment_bytes": stage.states.moments,
            "activation_bytes": stage.activations,
            "head_bytes": stage.head,
            "step_bytes": stage.states.step,
            "peak_bytes": stage.peak,
        }


def _time_lines(plan: StepPlan) -> Iterator[str]:
    time, ranks = plan.time, plan.topology.world_size
    yield (
        f"a step takes at least {time.overlapped:.3g} s if all overlaps, {time.serial:.3g} s if "
        f"nothing does: compute {time.compute:.3g}, optimizer {time.optimizer:.3g}"
        + "".join(f", {axis} {seconds:.3g}" for axis, seconds in time.wire.items() if seconds)
    )
    sent = ", ".join(f"{axis} {show_count(n)}B" for axis, n in time.wire_bytes.items() if n)
    yield f"sent by the busiest rank: {sent or 'nothing'}"
    mfu = time.mfu(ranks, plan.device)
    yield (
        f"model FLOPs {show_count(time.model_flops)}, MFU at most {mfu:.0%} "
        f"if nothing overlaps; bubble {time.bubble:.1%}, balance of stages {time.balance:.0%}"
    )


def _found_lines(found: SearchResult, device: str, base: Mapping[str, Any]) -> Iterator[str]:
    """The best plans that fit and the section of the first, or the smallest that do not."""
    plans = found.fitting or found.too_large
    if not plans:
        yield "no legal layout: the number of GPUs does not divide into one"
        return
    ranks = plans[0].topology.world_size
    if found.fitting:
        total = len(found.plans)
        yield f"{len(found.fitting)} of {total} plans fit on {ranks} {device}; the best"
    else:
        yield f"none of {len(plans)} plans fits on {ranks} {device}; the smallest"
    cells = [["tp", "pp", "vpp", "cp", "ep", "dp", "recompute", "GiB", "least", "serial", "mainly"]]
    for plan in plans[:SHOWN]:
        at, time = plan.topology, plan.time
        sizes = map(str, (at.tp, at.pp, at.vpp, at.cp, at.ep, at.dp))
        times = (f"{time.overlapped:.3g}", f"{time.serial:.3g}", dearest(plan))
        cells.append(
            [*sizes, plan.config.megatron_cfg.recomputation, f"{plan.peak / 2**30:.1f}", *times]
        )
    yield from _table(cells)
    if not found.fitting:
        yield _batch_line(plans[0])
        return
    yield "times are bounds in seconds: `least` if all overlaps, `serial` if nothing does"
    yield from lines(plans[0], device)
    yield f"to ask for it again: {layout_options(plans[0])}"
    section = {"policy": policy_section(plans[0], base)}
    yield f"a CONFIG that has it, with --gpus {ranks}:"
    yield from yaml.safe_dump(section, sort_keys=False).splitlines()


def dearest(plan: StepPlan) -> str:
    """What costs most beside the model's own operations, and its share of the serial time."""
    time = plan.time
    ideal = time.model_flops / (plan.topology.world_size * plan.device.bf16_flops)
    costs = {f"{axis} traffic": seconds for axis, seconds in time.wire.items()}
    costs["bubble, balance, recompute"] = time.compute - ideal
    costs["optimizer"] = time.optimizer
    name = max(costs, key=lambda each: costs[each])
    return f"{name} {costs[name] / time.serial:.0%}"


def layout_of(plan: StepPlan) -> str:
    """The sizes of all axes that are used."""
    at = plan.topology
    text = " x ".join(f"{axis} {getattr(at, axis)}" for axis in ("tp", "cp", "dp", "pp"))
    text += f", {at.vpp} chunks a stage" if at.vpp > 1 else ""
    return text + (f", experts ep {at.ep} x etp {at.expert_tp}" if plan.architecture.moe else "")


def megatron_keys(plan: StepPlan) -> dict[str, Any]:
    """The keys of `megatron_cfg` by which the plan differs from others of a search."""
    sizes = asdict(parallel_sizes(plan.config)) | {"etp": plan.topology.expert_tp}
    if not plan.architecture.moe:
        sizes |= {"ep": None, "etp": None}
    how = recompute_keys(plan.config.megatron_cfg.recomputation)
    return {"enabled": True, **keys_of_sizes(sizes), **how}


def policy_section(plan: StepPlan, base: Mapping[str, Any]) -> dict[str, Any]:
    """The section `policy` of `base` with the layout of the plan."""
    return {**base, "megatron_cfg": {**base.get("megatron_cfg", {}), **megatron_keys(plan)}}


def layout_options(plan: StepPlan) -> str:
    """The options of `plan --model` that ask for this plan."""
    at, last = plan.topology, parallel_sizes(plan.config).last_layers
    axes = ("tp", "pp", "vpp", "cp", "dp", *(("ep",) if plan.architecture.moe else ()))
    options = [f"--{axis} {getattr(at, axis)}" for axis in axes if getattr(at, axis) > 1]
    if at.expert_tp != at.tp:
        options.append(f"--etp {at.expert_tp}")
    if last is not None:
        options.append(f"--last-layers {last}")
    options.append(f"--recompute {plan.config.megatron_cfg.recomputation}")
    return " ".join(options)


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = zip(row, widths, strict=True)
        yield "  " + "  ".join(cell.rjust(width) for cell, width in cells).rstrip()
