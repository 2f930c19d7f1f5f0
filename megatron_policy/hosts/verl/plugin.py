"""What `import verl` loads of this package (entry point `verl.plugins`).

With MEGATRON_POLICY_VERL=megatron these engines take the place of verl's own "megatron", whose
configuration stays as it is. Otherwise nothing is imported and nothing changes.
"""

from __future__ import annotations

import logging
import os

SWITCH = "MEGATRON_POLICY_VERL"
_TAKEN = "megatron"
_VENDOR = "nvidia"


def take_over() -> None:
    """Register the engines in the place of verl's own for Megatron."""
    from verl.workers.engine.base import EngineRegistry

    from megatron_policy.device import DEVICE_TYPES
    from megatron_policy.hosts.verl.config import ENGINES

    for kind, engine in ENGINES.items():
        # verl looks for the vendor first, and has registered its own without one.
        register = EngineRegistry.register
        for device in DEVICE_TYPES:
            vendor = None if device == "cpu" else _VENDOR
            register(model_type=kind, backend=_TAKEN, device=device, vendor=vendor)(engine)
    logging.getLogger(__name__).warning(
        "verl's engine 'megatron' is that of megatron_policy here, since %s=%s", SWITCH, _TAKEN
    )


_asked = os.environ.get(SWITCH, "")
# verl drops the exceptions of a plugin, and would go on with its own engine: only an exit ends it.
if _asked not in ("", _TAKEN):
    raise SystemExit(f"{SWITCH} is {_asked!r}; legal: {_TAKEN!r}, or leave it unset")
if _asked:
    try:
        take_over()
    except Exception as error:
        logging.getLogger(__name__).exception("megatron_policy could not take over in verl")
        raise SystemExit(f"{SWITCH}={_TAKEN}: {error!r}") from error
