"""This package's own driver, `megatron_policy.Policy`, as a host; there is nothing to install."""

from __future__ import annotations

from megatron_policy.interfaces.host import Host


def backend() -> Host:
    """The host through which `Policy` finds its worker."""
    return Host("ray", "megatron_policy.workers.policy.MegatronPolicyWorker", lambda: None)
