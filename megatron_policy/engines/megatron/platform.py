"""Makes stock Megatron-Core usable on this machine."""

from __future__ import annotations

from megatron_policy.device import is_accelerated
from megatron_policy.engines.megatron import cpu_platform, unbound_names


def prepare_platform() -> bool:
    """Make stock Megatron-Core usable on this machine; call it before making groups or models.

    With a GPU this only binds names that a missing Transformer Engine leaves unbound. Without one
    it also applies the patches of `cpu_platform`, once. Returns whether patches are active.
    """
    if not is_accelerated():
        cpu_platform.apply()
    unbound_names.bind()
    return not is_accelerated()
