"""`inspect-config`: checks that a configuration fits its model and ranks, and shows who
holds what.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megatron_policy.cli.failures import one_line_errors
from megatron_policy.cli.options import AsJson, Overrides, PolicyFile
from megatron_policy.cli.report import show

if TYPE_CHECKING:
    from megatron_policy.cli.config_report import CheckedConfig


def inspect_config(
    path: PolicyFile,
    overrides: Overrides = None,
    world_size: Annotated[
        int | None, typer.Option(min=1, help="Number of ranks; the fewest possible if not given.")
    ] = None,
    ignored: Annotated[
        bool, typer.Option("--ignored", help="List the keys without effect, and why.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check a configuration against its model, and show which rank holds what and what fits.

    CONFIG can be a whole file of NeMo RL: `defaults` and interpolations need OmegaConf.
    """
    from megatron_policy.cli.config_report import report_config

    with one_line_errors(as_json):
        show(report_config(_check(path, overrides or [], world_size), ignored), as_json)


def _check(path: Path, overrides: list[str], world_size: int | None) -> CheckedConfig:
    from megatron_policy.cli.config_report import (
        CheckedConfig,
        fewest_ranks,
        nearest_world_sizes,
    )
    from megatron_policy.config import PolicyConfig, ignored_keys
    from megatron_policy.config.adapters import model_tables
    from megatron_policy.config.composed import compose
    from megatron_policy.config.layout import checked_topology
    from megatron_policy.errors import ConfigError

    composed = compose(path, overrides)
    config = PolicyConfig.parse(composed.policy)
    table, trained = model_tables(config)
    ranks = world_size or fewest_ranks(config)
    try:
        topology = checked_topology(config, table.architecture, ranks)
    except ConfigError as error:
        if world_size is None:
            raise
        near = nearest_world_sizes(config, table.architecture, world_size)
        raise ConfigError(f"{error}{near}") from error
    if not config.megatron_cfg.enabled:
        from megatron_policy.engines.hugging_face.assemble import check_build

        check_build(config, table, topology)
    unused = ignored_keys(composed.policy)
    return CheckedConfig(config, trained, topology, composed.others, unused, world_size is None)
