"""Compares the driver's rank grid with ours."""

from __future__ import annotations

import math
from typing import Any

from megatron_policy.config import PolicyConfig
from megatron_policy.errors import ConfigError

AXES = {
    "pipeline_parallel": "pp",
    "data_parallel": "dp",
    "context_parallel": "cp",
    "tensor_parallel": "tp",
}
"""The host's axes, slowest first, in the order of our rank numbering."""


def check_layout_of_host(annotations: Any, config: PolicyConfig) -> None:
    """ConfigError, naming both, unless the host's `NamedSharding` is the rank grid of this
    configuration. None, or an object without `names` and `layout`, is not compared.
    """
    from megatron_policy.config.layout import topology_of
    from megatron_policy.config.parallel_sizes import parallel_sizes

    if not (hasattr(annotations, "names") and hasattr(annotations, "layout")):
        return
    names, ranks = list(annotations.names), annotations.layout
    found = dict(zip(names, ranks.shape, strict=True))
    topology = topology_of(config, ranks.size)
    ours = {name: getattr(topology, axis) for name, axis in AXES.items()}
    # A missing axis has size 1.
    alike = [name for name in AXES if name in found] == names
    alike = alike and all(found.get(name, 1) == size for name, size in ours.items())
    if not alike or ranks.flatten().tolist() != list(range(math.prod(ours.values()))):
        raise ConfigError(
            f"the driver laid out its ranks as {found} with ranks {ranks.flatten().tolist()}, but "
            f"the configuration asks for {ours} with ranks in that order, the last axis fastest: "
            "make the cluster's size and the parallel sizes in "
            f"{parallel_sizes(config).section} agree"
        )
