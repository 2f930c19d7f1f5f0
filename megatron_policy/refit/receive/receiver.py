"""What an inference engine imports to receive weights: it imports neither Megatron-Core nor Ray,
and works with any engine.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron_policy.coordination.timeouts import DEFAULT_TIMEOUT_S, checked_timeout
from megatron_policy.refit.arguments import check_object
from megatron_policy.refit.manifest import (
    RefitManifest,
    ServedModel,
    StagedVersion,
    parse_info,
)
from megatron_policy.refit.receive.assembler import (
    Begin,
    EngineState,
    Finish,
    Load,
    WeightAssembler,
)


class Receiver:
    """Receives weights for one engine, refit after refit, over any transport.

    Weights that are incomplete, older than the engine's, damaged, or of another model are refused:
    the method raises RefitError, and so does the trainer. No method waits longer than `timeout_s`
    seconds for the other side, and each can be called again after a failure.
    """

    def __init__(
        self,
        load: Load,
        *,
        begin: Begin = lambda: None,
        finish: Finish = lambda: None,
        ready: Callable[[int], object] = lambda step: None,
        expected: Mapping[str, Sequence[Any]] | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        staged: bool = True,
    ) -> None:
        """`load` is called with [(Hugging Face name, tensor), ...] and must copy them: the memory
        is reused when it returns. It raises if it cannot load them. `begin` is called before it is
        given the first of a set, also if the set before was never completed; `finish` when a set is
        complete and loaded, before the trainer hears that it was accepted. Both may raise too. With
        `staged`, `ready` is called with the step of a set that is complete and checked, before
        `begin`: it may wait, while the engine computes with the weights it has, and a RefitError
        leaves it with them.

        `expected` is what the trainer's `prepare_refit_info` returned: {name: (shape, dtype, ...)}
        and its `model`.
        With `staged`, all weights are staged until they are checked, and `load` is called once; a
        second copy of the weights stays until `release`. Without it, `load` is called piece by
        piece as weights arrive, and a refit that fails half-way leaves the engine `mixed`.
        """
        self.timeout_s = checked_timeout(timeout_s)
        calls = {"load": load, "begin": begin, "finish": finish, "ready": ready}
        for name, call in calls.items():
            check_object(call, f"Receiver({name}=...)", "a function", ("__call__",))
        info = None if expected is None else parse_info(expected)
        self._engine = EngineState(load, begin, finish, info, staged, ready=ready)
        self._unfinished: WeightAssembler | None = None

    @property
    def step(self) -> int | None:
        """Optimizer step of the weights that were accepted last; None before the first.

        Can be set: to None if the trainer has gone back to an older checkpoint.
        """
        return self._engine.step

    @step.setter
    def step(self, step: int | None) -> None:
        self._engine.step = step

    @property
    def mixed(self) -> bool:
        """Whether the engine may hold weights of several steps: `load` was called, and the refit
        was not completed. The next complete refit fixes it.
        """
        return self._engine.mixed

    def mark_mixed(self) -> None:
        """Make `mixed` true until the next complete refit: a probe has found that the engine does
        not compute with what it was sent.
        """
        self._engine.mixed = True

    @property
    def model(self) -> ServedModel | None:
        """What the trainer says of the model whose weights are being loaded, or were loaded last:
        `hf_config_overrides`, and the scale and modules of `adapters`. None before the first.
        """
        return self._engine.model

    @property
    def version(self) -> StagedVersion:
        """The chain of deltas that the staged weights are of, and their number in it; None if they
        are of none.
        """
        return self._engine.version

    def assembler(self, algorithm: str | None = None) -> WeightAssembler:
        """The assembler of one refit, for a transport; see `WeightAssembler` for `algorithm`."""
        return WeightAssembler(self._engine, algorithm)

    def release(self) -> None:
        """Free what is kept between refits; the next refit allocates it again."""
        self._engine.kept.clear()
        self._engine.version = None
        self._unfinished = None

    # Each transport is imported on use: an engine need not install what the others need.

    def receive_ipc_stream(self, address: str) -> RefitManifest:
        """Receive one refit from a trainer here that binds `ipc://<path>` (`IpcStream`)."""
        from megatron_policy.refit.receive.ipc import receive_stream

        return receive_stream(self.assembler(), address, self.timeout_s)

    def receive_ipc_handles(self, handles: Mapping[str, Any], device_id: str | None = None) -> None:
        """Receive some weights of a refit: what `IpcHandles.weights` returned on this machine.

        `device_id` chooses among several devices; None: this process's own device.
        """
        from megatron_policy.refit.receive.ipc import receive_handles

        unfinished, self._unfinished = self._unfinished, None  # an error discards it
        self._unfinished = receive_handles(unfinished, self.assembler, handles, device_id)

    def finish_ipc(self, manifest: RefitManifest) -> RefitManifest:
        """End a refit by `receive_ipc_handles`: check all that arrived, and load it."""
        takes = "the manifest of the trainer's IpcHandles"
        check_object(manifest, "finish_ipc()", takes, ("check", "encode"))
        unfinished, self._unfinished = self._unfinished, None
        return (unfinished or self.assembler()).finish(manifest)

    def receive_collective(self, group: Any) -> RefitManifest:
        """Receive one refit from a trainer in the same process group."""
        takes = "what join_collective has returned"
        check_object(group, "receive_collective()", takes, ("receive",))
        received: RefitManifest = group.receive(self.assembler(), self.timeout_s)
        return received

    def receive_directory(self, path: str | os.PathLike[str]) -> RefitManifest:
        """Receive one refit from a directory that a trainer has published."""
        from megatron_policy.refit.receive.disk import receive_directory

        return receive_directory(self.assembler, path)

    def receive_deltas(
        self, path: str | os.PathLike[str], *, wait: bool = False, found: str | None = None
    ) -> int:
        """Receive what a trainer has published in a `DeltaDirectory` since the last call, or whole
        weights and what was published since them; returns the step. Nothing is loaded if there is
        nothing new, unless it is to `wait` for that: RefitError if nothing comes in `timeout_s`
        seconds. ConfigError without `staged`: deltas change weights that were staged.

        `found` is what `find_deltas` has returned, where several ranks of an engine are to take the
        same version.
        """
        from megatron_policy.refit.receive.disk import receive_deltas

        wait_s = self.timeout_s if wait else 0.0
        return receive_deltas(self._engine, self.assembler, path, wait_s, found)
