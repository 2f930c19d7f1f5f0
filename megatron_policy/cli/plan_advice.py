"""What would fit, of a plan that does not: other layouts, smaller microbatches, more GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from megatron_policy.cli.plan_options import as_overrides
from megatron_policy.cli.plan_report import (
    layout_of,
    layout_options,
    megatron_keys,
    plans_of,
)
from megatron_policy.errors import ConfigError
from megatron_policy.estimate.devices import DeviceFigures
from megatron_policy.estimate.plan import (
    MOST_DEVICES,
    SEARCHED,
    SearchResult,
    StepPlan,
    fewest_devices,
    plan_of,
    search,
)
from megatron_policy.estimate.sizes import show_gib


def advise(
    found: StepPlan | SearchResult,
    base: Mapping[str, Any],
    of_config: bool,
    device: DeviceFigures,
    length: int | None,
) -> Iterator[str]:
    """What to change if nothing fits of the section `base`, which is a CONFIG's or a --model's;
    nothing if something fits.
    """
    plans = plans_of(found)
    if not plans:
        yield "use another --gpus, such as a multiple of 8"
        return
    first, gpus = plans[0], plans[0].topology.world_size
    media = first.batch_shape.tower.media
    if first.fits:
        return
    if isinstance(found, SearchResult):
        yield _explain_causes(first)
    elif others := search(base, first.rows, gpus, device, length, media).fitting:
        yield _describe_layout(others[0], first, base.get("megatron_cfg") or {}, of_config)
    else:
        yield f"no layout that is searched fits on {show_gpus(gpus)}"
    yield from _count_gpus(first, base, of_config, device, length)


def show_gpus(number: int) -> str:
    """A number of GPUs in words."""
    return f"{number:,} GPU{'s' * (number != 1)}"


def _explain_causes(plan: StepPlan) -> str:
    stage = plan.stages[plan.fullest]
    states = stage.states.resident
    if states > plan.usable:
        return (
            f"states alone take {show_gib(states)} on a rank: use more GPUs, or GPUs with more "
            "memory"
        )
    return (
        f"activations take {show_gib(stage.activations)} on a rank beside {show_gib(states)} of "
        "states: use smaller microbatches (--mb-tokens), shorter rows (--seq-len) or more GPUs"
    )


def _describe_layout(
    other: StepPlan, plan: StepPlan, written: Mapping[str, Any], of_config: bool
) -> str:
    """The layout of `other`, which fits, and what to write to have it in place of that of `plan`,
    in whose section megatron_cfg is `written`.
    """
    ways = layout_options(other)
    if of_config:
        new, old = megatron_keys(other), megatron_keys(plan)
        changed = {key: value for key, value in new.items() if old.get(key) != value}
        left_out = [key for key in SEARCHED if written.get(key) is not None and key not in new]
        ways = " ".join(
            [f"'~megatron_cfg.{key}'" for key in left_out]
            + as_overrides({f"megatron_cfg.{key}": value for key, value in changed.items()})
        )
    return (
        f"another layout fits on {show_gpus(plan.topology.world_size)}: {layout_of(other)}, "
        f"recompute {other.config.megatron_cfg.recomputation}; give {ways}"
    )


def _count_gpus(
    plan: StepPlan,
    base: Mapping[str, Any],
    of_config: bool,
    device: DeviceFigures,
    length: int | None,
) -> Iterator[str]:
    """On how many GPUs something fits: more replicas of a CONFIG's layout, or what is searched."""
    media = plan.batch_shape.tower.media

    def holds_replicas(gpus: int) -> bool:
        try:
            return plan_of(plan.config, plan.rows, gpus, device, length, media).fits
        except ConfigError:
            return False

    def has_plan(gpus: int) -> bool:
        return bool(search(base, plan.rows, gpus, device, length, media).fitting)

    ways: list[tuple[str, Callable[[int], bool]]] = [("a plan", has_plan)]
    if of_config:
        ways.insert(0, ("this layout", holds_replicas))
    for what, fits in ways:
        number = fewest_devices(fits, plan.topology.world_size)
        if number is not None:
            yield f"{what} fits on {show_gpus(number)}, the fewest of 2^n and 3 x 2^n"
            return
        yield f"no number of GPUs up to {MOST_DEVICES:,} is enough for {what}"
