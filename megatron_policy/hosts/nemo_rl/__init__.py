"""NeMo RL as a host: its driver starts this package's Megatron worker in place of its own.

The import is cheap, since every Python process of a run may do it (see `autoload`).
Read `redirect.py` first, then `worker.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_policy.interfaces.host import Host

__all__ = ["backend", "install"]


def backend() -> Host:
    """NeMo RL as a host, for `find_host("nemo_rl")` and for a NeMo RL that looks up backends."""
    from megatron_policy.hosts.nemo_rl import redirect
    from megatron_policy.interfaces.host import Host

    return Host("nemo_rl", redirect.OUR_WORKER, install)


def install(workers: str | None = None) -> None:
    """Make the NeMo RL of this process start our worker where it is configured to use Megatron and,
    with `workers="all"`, where it is configured to use DTensor (`policy.dtensor_cfg`). Without
    `workers` the variable MEGATRON_POLICY_WORKERS says which.

    Call it in the driver before it makes a policy; repeated calls are harmless, and leave out
    nothing that an earlier one has asked for. ConfigError if NeMo RL cannot be imported, or has a
    structure that this package does not know.
    """
    from megatron_policy.hosts.nemo_rl import redirect

    redirect.install(workers)
