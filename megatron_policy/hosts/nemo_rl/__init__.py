"""NeMo RL as a host: its driver starts this package's Megatron worker in place of its own.

Importing it is light, since every Python of a run may do so (see `autoload`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_policy.interfaces.host import Host

__all__ = ["backend", "install"]


def backend() -> Host:
    """NeMo RL, for `find_host("nemo_rl")` and for a NeMo RL that looks its backends up."""
    from megatron_policy.hosts.nemo_rl import redirect
    from megatron_policy.interfaces.host import Host

    return Host("nemo_rl", redirect.OUR_WORKER, install)


def install() -> None:
    """Make the NeMo RL of this process start our worker where it is configured to use Megatron.

    To be called in the driver before it makes a policy; may be called again. ConfigError when
    NeMo RL cannot be imported, or is not built as this package knows it.
    """
    from megatron_policy.hosts.nemo_rl import redirect

    redirect.install()
