"""Saves and restores every source of random numbers of this process: Python's, numpy's, torch's,
the device's, and those of a training engine.

The bytes contain only plain values and torch tensors, so that reading them runs no code.
"""

from __future__ import annotations

import io
import pickle
import random
from collections.abc import Callable, Iterable, Mapping
from hashlib import blake2b
from typing import Any, Protocol, cast

import numpy as np
import torch

from megatron_policy.device import random_state, set_random_state
from megatron_policy.errors import CheckpointError

_FORMAT = 1
_DIGEST_BYTES = 16
_ENGINE = "megatron."  # the first engine's name, fixed by existing files
_UNREADABLE = (RuntimeError, ValueError, KeyError, EOFError, pickle.UnpicklingError)
"""What torch raises for bytes that it did not write."""


class EngineRandom(Protocol):
    """A training engine's own generators."""

    def random_states(self) -> dict[str, torch.Tensor]:
        """Their states by name."""

    def set_random_states(self, states: Mapping[str, torch.Tensor]) -> None:
        """Set them to what `random_states` returned."""


def capture(engine: EngineRandom, generators: Mapping[str, torch.Generator]) -> bytes:
    """The states of Python's, numpy's and torch's global generators, the device's, the engine's,
    and of `generators` by name; the generators are not advanced.

    The bytes begin with a digest of the rest.
    """
    buffer = io.BytesIO()
    torch.save(_states(engine, generators), buffer)
    content = buffer.getvalue()
    return _digest(content) + content


def remember(engine: EngineRandom) -> Callable[[], None]:
    """A function that resets every source of this process to its current state; cheap enough for
    every step.
    """
    python, arrays, host = random.getstate(), np.random.get_state(), torch.get_rng_state()
    device, own = random_state(), engine.random_states()

    def restore_all() -> None:
        random.setstate(python)
        np.random.set_state(arrays)
        torch.set_rng_state(host)
        if device is not None:
            set_random_state(device)
        engine.set_random_states(own)

    return restore_all


def restore(
    content: bytes, engine: EngineRandom, generators: Mapping[str, torch.Generator]
) -> str | None:
    """Set every source to what `capture` saved; the next numbers are those drawn after it.

    Returns None, or the reason why this process cannot continue them, if its sources differ
    (another device, other names): then nothing is changed. CheckpointError for bytes that are
    damaged or of a newer format.
    """
    states = parse(content)
    if why := _mismatch(states, _states(engine, generators)):
        return why
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    if "device" in states:
        set_random_state(states["device"])
    engine.set_random_states(_named(states, _ENGINE))
    for name, state in _named(states, "generator.").items():
        generators[name].set_state(state)
    return None


def _states(engine: EngineRandom, generators: Mapping[str, torch.Generator]) -> dict[str, Any]:
    version, words, gauss = random.getstate()
    # numpy's annotation allows a dict, which only `legacy=False` returns.
    name, keys, *rest = cast(tuple[Any, ...], np.random.get_state())
    states = {
        "format": _FORMAT,
        "python": [version, list(words), gauss],
        "numpy": [name, keys.tolist(), *rest],
        "torch": torch.get_rng_state(),
    }
    device = random_state()
    if device is not None:
        states["device"] = device
    states |= {f"{_ENGINE}{name}": state for name, state in engine.random_states().items()}
    return states | {f"generator.{name}": each.get_state() for name, each in generators.items()}


def _named(states: Mapping[str, Any], prefix: str) -> dict[str, torch.Tensor]:
    return {n.removeprefix(prefix): each for n, each in states.items() if n.startswith(prefix)}


def parse(content: bytes) -> dict[str, Any]:
    """The states in the bytes; CheckpointError if they are damaged or of a newer format."""
    digest, rest = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    if digest != _digest(rest):
        raise CheckpointError(
            f"the saved random state ({len(content)} bytes) is corrupt: its digest does not "
            "match. Load another checkpoint, or copy this one again"
        )
    try:
        states: dict[str, Any] = torch.load(io.BytesIO(rest), weights_only=True)
        found = states["format"]
    except _UNREADABLE as error:
        raise CheckpointError(
            f"the saved random state cannot be read with torch {torch.__version__}: {error}. "
            "Load it with the version that the checkpoint names"
        ) from error
    if found != _FORMAT:
        raise CheckpointError(
            f"the saved random state has format {found}, which this version cannot read: it "
            f"reads format {_FORMAT}. Load it with a newer one"
        )
    return states


def _mismatch(saved: Mapping[str, Any], own: Mapping[str, Any]) -> str | None:
    """Why `saved` cannot replace `own`, or None if it can."""
    if missing := own.keys() - saved.keys():
        return f"the checkpoint has no random state for {_list(missing)}, which this run uses"
    if unknown := saved.keys() - own.keys():
        return f"the checkpoint has random state for {_list(unknown)}, which this run does not use"
    torches = {name: each for name, each in own.items() if isinstance(each, torch.Tensor)}
    other = [name for name, each in torches.items() if saved[name].shape != each.shape]
    other += ["numpy"] if saved["numpy"][0] != own["numpy"][0] else []
    other += ["python"] if saved["python"][0] != own["python"][0] else []
    return (
        f"the checkpoint's random state comes from a different kind of: {_list(other)}"
        if other
        else None
    )


def _list(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


def _digest(content: bytes) -> bytes:
    return blake2b(content, digest_size=_DIGEST_BYTES).digest()
