"""Finds hosts by name among the installed entry points."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from megatron_policy.errors import ConfigError

GROUP = "megatron_policy.hosts"

OWN = {
    "nemo_rl": "megatron_policy.hosts.nemo_rl:backend",
    "ray": "megatron_policy.hosts.own_driver:backend",
}
"""The hosts of this package itself, for a checkout that is not installed."""

_WITHOUT_COMMAND = {
    "verl": "verl takes this package's engine by its own configuration: run python -m "
    "verl.trainer.main_ppo 'hydra.searchpath=[pkg://megatron_policy.hosts.verl.conf]' "
    "model_engine=megatron_policy ..., see docs/verl.md"
}
"""What to do with frameworks that need no host of this kind."""


@dataclass(frozen=True)
class Host:
    """A framework that starts this policy's workers.

    `worker` is the full name, `module.Class`, of a Ray actor class. `install` makes the framework
    in this process start it instead of its own, and can be called again.
    """

    name: str
    worker: str
    install: Callable[[], None]

    def actor_class(self) -> Any:
        """The class behind `worker`."""
        module, _, name = self.worker.rpartition(".")
        return getattr(importlib.import_module(module), name)


def find_host(name: str) -> Host:
    """The host registered under `name` in the entry-point group `megatron_policy.hosts`.

    An entry point names a function without arguments that returns a `Host`. ConfigError if there is
    none of that name, or it returns something else.
    """
    own = {name: EntryPoint(name, value, GROUP) for name, value in OWN.items()}
    points = own | {point.name: point for point in entry_points(group=GROUP)}
    if name not in points:
        known = f"there is no host {name!r}; known hosts: {', '.join(sorted(points))}"
        raise ConfigError(_WITHOUT_COMMAND.get(name, known))
    host = points[name].load()()
    if not isinstance(host, Host):
        raise ConfigError(
            f"the host {name!r} ({points[name].value}) is a {type(host).__name__}; its entry point "
            "must name a function that returns a megatron_policy.interfaces.host.Host"
        )
    return host
