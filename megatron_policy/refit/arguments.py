"""What callers hand to a refit is refused by its name, before anything is sent or received."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from megatron_policy.errors import ConfigError

_TRANSPORTS = (("plan", "open"), ("begin",), ("deliver",))
_MADE = (
    "a transport that is made: IpcStream(address), a group's transport() or shards(held), "
    "HfDirectory(path), PeftDirectory(path), DeltaDirectory(path), DeltaStream(transport) or "
    "DeltaShards(refits)"
)


def check_transport(value: Any, call: str) -> None:
    """ConfigError unless it is something that weights can be sent to; `call` wants it."""
    check_object(value, call, _MADE, *_TRANSPORTS)


def check_object(value: Any, call: str, takes: str, *kinds: Collection[str]) -> None:
    """ConfigError that says what a `call` takes, unless it is an object, and no class, that has all
    methods of one of these kinds.
    """
    if isinstance(value, type):
        raise ConfigError(f"{call} takes no class, as {value.__name__} is: give {takes}")
    if not any(all(callable(getattr(value, name, None)) for name in kind) for kind in kinds):
        raise ConfigError(f"{call} takes no {type(value).__name__}: give {takes}")


def check_count(value: Any, name: str, least: int = 1) -> None:
    """ConfigError unless it is a whole number, `least` or more."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name} is {value!r:.80}: give a whole number, {least} or more")


def check_group(ip: Any, port: Any, **sizes: Any) -> None:
    """ConfigError unless training rank 0 can listen there; ranks and `sizes` are whole numbers, or
    None where they are not given.
    """
    if not isinstance(ip, str):
        raise ConfigError(f"ip is {ip!r:.80}: give the address where training rank 0 listens")
    for name, size in {"port": port, **sizes}.items():
        if size is not None or name == "port":
            check_count(size, name, 0)
