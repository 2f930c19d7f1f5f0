"""Moves a policy's parameters, gradients and optimizer state between device and host, as its memory
states require.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

import torch

from megatron_policy.device import is_accelerated, release_cached
from megatron_policy.errors import RefitError, TransitionError
from megatron_policy.memory.offloader import Resize, StorageOffloader
from megatron_policy.memory.pinned_pool import PinnedMemoryPool
from megatron_policy.memory.policy_state import PolicyState
from megatron_policy.memory.states import (
    FORWARD,
    STATES,
    Kind,
    MemoryState,
    Requirement,
    Storages,
    list_kinds,
    parse_kinds,
)

Item = TypeVar("Item")

# Gradients first: they need no copy.
_LEAVING = (Kind.GRADIENTS, Kind.OPTIMIZER, Kind.PARAMETERS)


class Holder(Protocol):
    """The owner of the memory: a training engine."""

    def storages(self) -> Storages:
        """The storages that are on the device now, by kind."""

    def forget_gradients(self) -> None:
        """Drop gradients outside the buffers."""

    def manages(self, model: object) -> bool:
        """Whether `model` is one of its modules."""


class DeviceMemory:
    """A policy's memory in one of the named states.

    Storages are emptied and refilled in place, so that every view of them stays valid. Gradients
    are not copied: a training step starts from zeros. The reference policy's weights are not
    managed here: they are always in host memory and share nothing with the device.

    `move` is whether parameters and optimizer state are really moved: by default on a GPU. On the
    CPU there is nothing to gain; the states and their refusals are the same there, and gradients
    are freed. `pool` makes the host memory of one kind; `resize` sets a storage's size in bytes.
    `agree` is collective and raises RefitError if any rank passed it a failure; `settle` waits for
    pending writes to the memory, `still` for concurrent readers.
    """

    def __init__(
        self,
        holder: Holder,
        state: PolicyState | None = None,
        *,
        move: bool | None = None,
        pool: Callable[[], PinnedMemoryPool] = PinnedMemoryPool,
        resize: Resize = torch.UntypedStorage.resize_,
        agree: Callable[[Exception | None], object] = lambda failure: None,
        settle: Callable[[], object] = lambda: None,
        still: Callable[[], object] = lambda: None,
    ) -> None:
        self._holder = holder
        self._agree, self._settle, self._still = agree, settle, still
        moves = is_accelerated() if move is None else move
        self._offloaders = {Kind.GRADIENTS: StorageOffloader(None, resize)}
        if moves:
            self._offloaders |= {
                k: StorageOffloader(pool(), resize) for k in (Kind.OPTIMIZER, Kind.PARAMETERS)
            }
        self._whole = set(Kind)
        self._policy = state or PolicyState()

    @property
    def state(self) -> MemoryState:
        """The state after the last call."""
        return self._policy.memory

    def check(self, operation: str, need: Requirement, *, repairs: bool = False) -> None:
        """See `PolicyState.check`."""
        self._policy.check(operation, need, repairs=repairs)

    def ready(self, operation: str, need: Requirement = FORWARD, *, repairs: bool = False) -> None:
        """`check`, then wait until the parameters are as the last step left them. If the operation
        writes, also wait until no thread reads them.
        """
        self.check(operation, need, repairs=repairs)
        self._settle()
        if need.writes:
            self._still()

    def in_use(self, by: str) -> AbstractContextManager[None]:
        """See `PolicyState.in_use`."""
        return self._policy.in_use(by)

    def during(self, by: str, need: Requirement, items: Iterable[Item]) -> Iterator[Item]:
        """Yield `items` and move nothing until they end; ConfigError if they cannot begin."""
        self.check(by, need)
        with self.in_use(by):
            yield from items

    def enter(self, target: MemoryState) -> None:
        """Go to `target` from any state; no effect if already there.

        ConfigError while something uses the memory, or if this would lose the gradients of an open
        step. TransitionError if there is not enough memory on the receiving side, here or on
        another rank that `agree` reports: `state` then says what is whole here, and a repeated call
        continues.
        """
        self._policy.check_can_enter(target)
        failure: Exception | None = None
        try:
            self._settle()
            self._still()
            self._empty([kind for kind in _LEAVING if kind not in target.holds])
            for kind in Kind:
                if kind in target.holds:
                    if self._bytes_away(kind):
                        self._offloaders[kind].refill()
                    self._whole.add(kind)
        except (RuntimeError, MemoryError) as error:
            failure = error
        self._policy.enter(target if failure is None else target.interrupted(self._whole))
        if failure is None:
            self._check_ceiling()
        why = "" if failure is None else f"{failure}. The policy is {self.state}"
        try:
            # Without it the others would continue and wait for this rank in the next call.
            self._agree(RuntimeError(why) if why else None)
        except RefitError as error:
            why, failure = str(error), failure or error
        if failure is not None:
            raise TransitionError(
                f"the policy could not go to the {target.name} state: {why}. Free memory and "
                "repeat the call: it continues where it stopped"
            ) from failure

    def offload(self, what: str | Iterable[str]) -> None:
        """Move these kinds to the host; the others stay where they are."""
        self.enter(MemoryState.of(self._whole - parse_kinds(what)))

    def onload(self, what: str | Iterable[str]) -> None:
        """Move these kinds to the device; the others stay unchanged where they are: gradients on
        the device keep their content.
        """
        self.enter(MemoryState.of(self._whole | parse_kinds(what)))

    def manages(self, model: object) -> bool:
        """Whether `model` is a module of this policy, wrapped for training or not."""
        return self._holder.manages(model)

    def resident_bytes(self) -> dict[Kind, int]:
        """Bytes on the device now, by kind."""
        found = self._holder.storages()
        return {kind: sum(each.nbytes() for each in found[kind]) for kind in Kind}

    def ceilings(self) -> dict[str, int]:
        """The bytes that each state holds on the device, asserted after every transition.

        The first optimizer step raises them: it makes the optimizer's moments.
        """
        here = self.resident_bytes()
        whole = {kind: here[kind] + self._bytes_away(kind) for kind in Kind}
        return {
            state.name: sum(whole[kind] for kind in Kind if self._stays(kind, state))
            for state in STATES
        }

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory kept for copies, in use or for reuse."""
        return sum(offloader.host_bytes for offloader in self._offloaders.values())

    def _empty(self, leaving: Sequence[Kind]) -> None:
        if Kind.GRADIENTS in leaving:
            self._holder.forget_gradients()
        here = self._holder.storages()
        moving = [kind for kind in leaving if here[kind] and kind in self._offloaders]
        for kind in leaving:
            self._whole.discard(kind)
            if kind in moving:
                self._offloaders[kind].empty(here[kind])
        if moving:
            release_cached()

    def _stays(self, kind: Kind, state: MemoryState) -> bool:
        return kind in state.holds or kind not in self._offloaders

    def _bytes_away(self, kind: Kind) -> int:
        return self._offloaders[kind].nbytes if kind in self._offloaders else 0

    def _check_ceiling(self) -> None:
        here = self.resident_bytes()
        for kind in Kind:
            stays = self._stays(kind, self.state)
            stray = self._bytes_away(kind) if stays else here[kind]
            where = "still in host memory" if stays else "still on the device"
            assert not stray, f"{self.state}, with {stray} bytes of {list_kinds([kind])} {where}"
