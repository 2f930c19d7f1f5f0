"""`plan --refit --machine`: what a refit from shards to shards moves over a machine's links."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from megatron_policy.errors import ConfigError
from megatron_policy.estimate.devices import NODE, DeviceFigures
from megatron_policy.estimate.sizes import show_size
from megatron_policy.refit.links import NETWORK, NVLINK, LinkLoad, LinkTraffic, Machine

_KEYS = ("gpus_per_node", "nvlink_GBps", "network_GBps")


def parse_machine(
    figures: str | None, device: DeviceFigures | None, shared: bool
) -> Machine | None:
    """The machine of `gpus_per_node=8,nvlink_GBps=450,network_GBps=50`, where what is not given is
    that of nodes of the `device`; None without both. ConfigError for anything else.
    """
    if figures is None and device is None:
        if shared:
            raise ConfigError("--shared-nodes needs --machine, or --gpu, which says what a node is")
        return None
    found: dict[str, float] = {}
    if device is not None:
        known = NODE, device.node_link / 1e9, device.network_link / 1e9
        found = dict(zip(_KEYS, known, strict=True))
    if figures is not None:
        found |= _parse_figures(figures)
    if missing := [key for key in _KEYS if key not in found]:
        raise ConfigError(
            f"--machine {figures}: {', '.join(missing)} not given: give all of {', '.join(_KEYS)}, "
            "or --gpu, whose figures stand for the others"
        )
    gpus, nvlink, network = (found[key] for key in _KEYS)
    return Machine(int(gpus), nvlink * 1e9, network * 1e9, shared)


def _parse_figures(figures: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for key, _, figure in (each.partition("=") for each in figures.split(",")):
        try:
            value = float(figure)
        except ValueError:
            value = math.nan
        counts = key != _KEYS[0] or figure.isdecimal()
        if key not in _KEYS or key in found or not counts or not 0 < value < math.inf:
            raise ConfigError(
                f"--machine {figures}: give {', '.join(_KEYS)}, each once and above 0, as in "
                "gpus_per_node=8,nvlink_GBps=450,network_GBps=50"
            )
        found[key] = value
    return found


def show_links(traffic: LinkTraffic | None) -> Iterator[str]:
    """Describe what goes over each kind of link, in which rounds, and what takes the longest."""
    if traffic is None:
        return
    machine, most = traffic.machine, traffic.engine_ranks
    totals = f"{show_size(traffic.totals[NVLINK])} over NVLink"
    totals += f" and {show_size(traffic.totals[NETWORK])} over the network"
    yield (
        f"  trainers and engine on nodes{' of their own' * (not machine.shared)} of "
        f"{machine.gpus_per_node} GPU{'s' * (machine.gpus_per_node > 1)}: {totals}, in "
        f"{traffic.rounds} of {most} round{'s' * (most > 1)}"
    )
    for kind, links in traffic.busiest.items():
        over = "the network" if kind == NETWORK else kind
        yield f"  at most over {over}: {', '.join(map(_describe, links))}"
    if traffic.busiest_nodes is not None:
        yield f"  at most between nodes: {', '.join(map(_describe, traffic.busiest_nodes))}"
    slowest = traffic.bottleneck
    yield (
        f"  at least {traffic.bound_time(slowest):.3g} s: {_name(slowest)}, "
        f"{show_size(slowest.nbytes)} at {show_size(int(traffic.rate(slowest.kind)))}/s"
    )


def links_as_data(traffic: LinkTraffic | None) -> dict[str, Any]:
    """The same as JSON, by the key `links`."""
    if traffic is None:
        return {}
    slowest = traffic.bottleneck
    both = (*traffic.busiest.items(), ("node", traffic.busiest_nodes or ()))
    return {
        "links": {
            "nvlink_bytes": traffic.totals[NVLINK],
            "network_bytes": traffic.totals[NETWORK],
            "busiest": {
                kind.lower(): {
                    "sender" if link.sends else "receiver": {
                        "name": link.owner,
                        "bytes": link.nbytes,
                    }
                    for link in links
                }
                for kind, links in both
            },
            "rounds": traffic.rounds,
            "bottleneck": _name(slowest),
            "seconds_at_least": traffic.bound_time(slowest),
        }
    }


def _name(link: LinkLoad) -> str:
    return f"{link.owner}'s {link.kind}"


def _describe(link: LinkLoad) -> str:
    return f"{link.owner} {'sends' if link.sends else 'receives'} {show_size(link.nbytes)}"
