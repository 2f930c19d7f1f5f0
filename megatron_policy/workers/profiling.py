"""Profiles, and profiler ranges under the host's method names, in a worker and in its driver."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING

from megatron_policy.device.profiling import start_profiling, stop_profiling
from megatron_policy.errors import ConfigError

if TYPE_CHECKING:
    from megatron_policy.policy import MegatronPolicy
    from megatron_policy.policy.profiling import Profile
    from megatron_policy.workers.cluster.group import WorkerGroup


class WorkerProfiling:
    """One rank's range, and its part of a profile."""

    policy: MegatronPolicy
    _profile: tuple[ExitStack, Profile] | None = None

    def start_gpu_profiling(self) -> None:
        """Start a range for a waiting profiler of this process; without a GPU do nothing."""
        start_profiling()

    def stop_gpu_profiling(self) -> None:
        """End that range."""
        stop_profiling()

    def begin_profile(self, folder: str, operations: bool = True) -> None:
        """Open the context of `MegatronPolicy.profile`."""
        stack = ExitStack()
        found = stack.enter_context(self.policy.profile(folder, operations=operations))
        self._profile = stack, found

    def end_profile(self, failed: bool = False) -> Profile | None:
        """Leave that context, after an error if `failed`; then nothing is written. ConfigError if
        none is open.
        """
        if self._profile is None:
            raise ConfigError("end_profile(): no profile is open, call begin_profile() first")
        (stack, found), self._profile = self._profile, None
        if not failed:
            stack.close()
            return found
        error = _FailedElsewhere()
        with suppress(_FailedElsewhere):
            stack.__exit__(_FailedElsewhere, error, None)
        return None


class _FailedElsewhere(Exception):
    """What leaves a worker's context after an error in the driver's."""


class DriverProfiling:
    """All workers' ranges, and a profile of all of them."""

    _workers: WorkerGroup

    def start_gpu_profiling(self) -> None:
        """Start a range for waiting profilers of the workers; without GPUs do nothing."""
        self._workers.run_all("start_gpu_profiling")

    def stop_gpu_profiling(self) -> None:
        """End that range."""
        self._workers.run_all("stop_gpu_profiling")

    @contextmanager
    def profile(
        self, folder: str | os.PathLike[str], *, operations: bool = True
    ) -> Iterator[Profile]:
        """In this context, record what the workers do; see `MegatronPolicy.profile`. `folder` is on
        the workers' nodes: rank 0 writes the summary, each rank its trace.
        """
        from megatron_policy.policy.profiling import Profile

        path = os.path.abspath(os.path.expanduser(folder))
        self._workers.run_all("begin_profile", folder=path, operations=operations)
        profile = Profile.at(path)
        try:
            yield profile
        except BaseException as error:
            try:
                self._workers.run_all("end_profile", failed=True)
            except Exception as failure:  # a worker that died is the error itself
                error.add_note(f"The profile of the workers was not closed: {failure}")
            raise
        profile.take(self._workers.run_all("end_profile")[0])
