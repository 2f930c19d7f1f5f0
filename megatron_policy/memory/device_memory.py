"""Moves a policy's parameters, gradients and optimizer state between device and host, as its memory
states require.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from megatron_policy.device import is_accelerated, release_cached, synchronize
from megatron_policy.errors import RefitError, TransitionError
from megatron_policy.memory.pinned_pool import PinnedMemoryPool, PoolSlice
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


Resize = Callable[[torch.UntypedStorage, int], object]
"""Sets a storage's size in bytes; RuntimeError if there is not enough memory."""


@dataclass(frozen=True)
class _Emptied:
    """A storage without memory, and its content; None if the content is not needed."""

    storage: torch.UntypedStorage
    nbytes: int
    copy: PoolSlice | None


class StorageOffloader:
    """The emptied storages of one kind. Their copies are in `pool`; without one they come back as
    zeros.

    If a call fails half-way, each storage is either on the device or offloaded, and the same call
    continues from there.
    """

    def __init__(
        self, pool: PinnedMemoryPool | None, resize: Resize = torch.UntypedStorage.resize_
    ) -> None:
        self._pool, self._resize = pool, resize
        self._emptied: deque[_Emptied] = deque()

    @property
    def nbytes(self) -> int:
        """Bytes that the emptied storages had."""
        return sum(each.nbytes for each in self._emptied)

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory kept for copies, in use or for reuse."""
        return 0 if self._pool is None else self._pool.nbytes

    def empty(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Copy each storage's content to the host and free its memory."""
        try:
            for storage in storages:
                nbytes = storage.nbytes()
                region = None if self._pool is None else self._pool.take(nbytes)
                for piece, part in _pairs(region or (), storage):
                    piece.copy_(part, non_blocking=True)
                self._emptied.append(_Emptied(storage, nbytes, region))
                storage.resize_(0)
        finally:
            synchronize()

    def refill(self) -> None:
        """Restore every emptied storage's memory and content, in the order they were emptied."""
        arrived: list[PoolSlice] = []
        try:
            while self._emptied:
                self._restore(self._emptied[0])
                arrived.append(self._emptied.popleft().copy or ())
        finally:
            synchronize()
            if self._pool is not None and not self._emptied:
                self._pool.reset()
            elif self._pool is not None:
                for region in arrived:
                    self._pool.release(region)

    def _restore(self, emptied: _Emptied) -> None:
        storage = emptied.storage
        assert storage.nbytes() == 0, "somebody else has given an emptied storage memory"
        self._resize(storage, emptied.nbytes)
        try:
            if emptied.copy is None:
                _bytes_of(storage).zero_()
            for piece, part in _pairs(emptied.copy or (), storage):
                part.copy_(piece, non_blocking=True)
        except BaseException:
            storage.resize_(0)
            raise


def _pairs(
    region: PoolSlice, storage: torch.UntypedStorage
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each piece of the region with the part of the storage that it holds."""
    content, start = _bytes_of(storage), 0
    for piece in region:
        yield piece, content[start : start + piece.numel()]
        start += piece.numel()


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
