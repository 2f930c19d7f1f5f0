"""NIXL as a mover: over UCX, which takes what connects two machines, RDMA or TCP."""

from __future__ import annotations

import base64
import json
import logging
import time
import uuid
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_policy.errors import RefitError
from megatron_policy.extras import require

_OPTIONS = {"engine_config": "TLS=^cma"}
"""For UCX. It would write into another process of the machine through the kernel, by address: also
where the memory was released, and something else is by now. Through a connection it does not.
"""
_WATCH_S, _PAUSE_S = 0.2, 2e-4
_HOST = "DRAM"


class NixlMover:
    """Moves bytes between processes of any machines, by agents that open ports of their own."""

    def __init__(self, nbytes: int, timeout_s: float, watch: Callable[[], object]) -> None:
        """MissingPackageError without NIXL, RefitError if it cannot be used here."""
        nixl = require("nixl")
        logging.getLogger("nixl").setLevel(logging.WARNING)  # it tells of itself on stdout
        self._timeout_s, self._watch = timeout_s, watch
        self.memory = torch.empty(nbytes, dtype=torch.uint8)
        try:
            settings = nixl.nixl_agent_config(backends=[])
            self._agent = nixl.nixl_agent(uuid.uuid4().hex, settings)
            self._agent.create_backend("UCX", _OPTIONS)
            self._agent.register_memory(self._list(self.memory.data_ptr(), nbytes, ("",)), _HOST)
            known = base64.b64encode(self._agent.get_agent_metadata()).decode()
        except Exception as error:
            raise RefitError(f"NIXL cannot be used here: {_describe(error)}") from error
        self.description = json.dumps([known, self.memory.data_ptr(), nbytes]).encode()
        self._others: dict[bytes, tuple[str, int, int]] = {}

    def write(self, to: bytes, chunk: Tensor, at: int) -> NixlWriting:
        agent, count = self._agent, chunk.numel()
        if to not in self._others:
            self._others[to] = self._reach(to)
        name, address, nbytes = self._others[to]
        check_bounds(at, count, nbytes)
        try:
            own, other = self._list(chunk.data_ptr(), count), self._list(address + at, count)
            own, other = (agent.get_xfer_descs(each, _HOST) for each in (own, other))
            handle = agent.initialize_xfer("WRITE", own, other, name)
            return NixlWriting(agent, handle, agent.transfer(handle), self._timeout_s, self._watch)
        except Exception as error:
            raise RefitError(f"NIXL cannot write to the engine: {_describe(error)}") from error

    def close(self) -> None:
        self._others.clear()
        # Its memory is released after it: a write that was given up may still read that.
        self._agent = None
        self.memory = self.memory.new_empty(0)

    def _reach(self, to: bytes) -> tuple[str, int, int]:
        """The other agent's name, and where its memory is."""
        try:
            known, address, nbytes = json.loads(to)
            name = self._agent.add_remote_agent(base64.b64decode(known))
            return name.decode(), int(address), int(nbytes)
        except Exception as error:
            raise RefitError(f"NIXL cannot reach the engine: {_describe(error)}") from error

    @staticmethod
    def _list(address: int, nbytes: int, more: tuple[str, ...] = ()) -> list[Any]:
        return [(address, nbytes, 0, *more)]


class NixlWriting:
    """A transfer of an agent."""

    def __init__(
        self,
        agent: Any,
        handle: Any,
        state: str,
        timeout_s: float,
        watch: Callable[[], object],
    ) -> None:
        self._agent, self._handle, self._state = agent, handle, state
        self._timeout_s, self._watch = timeout_s, watch

    def wait(self) -> None:
        began = looked = time.monotonic()
        try:
            while self._state == "PROC":
                time.sleep(_PAUSE_S)
                self._state = self._agent.check_xfer_state(self._handle)
                if (now := time.monotonic()) > began + self._timeout_s:
                    raise RefitError(f"the engine was not written to within {self._timeout_s:g} s")
                if now > looked + _WATCH_S:
                    self._watch()
                    looked = now
            if self._state != "DONE":
                raise RefitError(f"NIXL could not write to the engine: its state is {self._state}")
            self._handle.release()
        except RefitError:
            raise
        except Exception as error:
            raise RefitError(f"NIXL could not write to the engine: {_describe(error)}") from error
        finally:
            self._agent = self._handle = None


def check_bounds(at: int, nbytes: int, size: int) -> None:
    """RefitError unless there is room for so many bytes from `at` on in memory of that size."""
    if not 0 <= at <= size - nbytes:
        raise RefitError(
            f"{nbytes:,} bytes from {at:,} on do not fit into the engine's {size:,}: use the same "
            "version of megatron-policy on both sides"
        )


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
