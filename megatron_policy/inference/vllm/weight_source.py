"""A policy's weights as vLLM's own trainer engines take them: the methods of its `WeightSource`,
over the plan of a refit. Read `transfer.py` for a transfer that also checks what has arrived.

This file imports nothing of vLLM: its trainer engines ask for methods, not for a class.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Collection, Generator, Iterator, Sequence
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor

from megatron_policy.coordination.operation import REFITS
from megatron_policy.errors import ConfigError, RefitError
from megatron_policy.refit.buffers import Buffer, BufferSlice
from megatron_policy.refit.exporter import Exporter
from megatron_policy.refit.plan import RefitPlan, RefitTensor

Held = Literal["all", "rank 0", "stage"]
"""Which ranks get which tensors: every rank all of them (vLLM's `ipc`), rank 0 all and the others
none (`nccl`), or each the tensors of its own pipeline stage (`sharded_rdt`)."""

Pair = tuple[str, Tensor | None]

_NUMBERED = re.compile(r"(?P<words>(?:[^.]*\.)*?)(?P<number>\d+)(?=\.|$)")


class SyncClient(Protocol):
    """vLLM's control plane as its trainer engines see it (`VLLMWeightSyncClient`)."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Set the engine's workers up, once."""

    def start_weight_update(self) -> None:
        """Begin an update."""

    def update_weights(self, update_info: Any) -> None:
        """One part of an update; returns when every worker has carried it out."""

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """End an update, whose weights are of that version."""


class TrainerEngine(Protocol):
    """What is used of vLLM's `TrainerWeightTransferEngine`."""

    def send_weights(self) -> None:
        """Send what its source yields; every rank calls it."""


class RefitSource:
    """One rank's end of a policy's weights, for a trainer engine of vLLM; every rank has one.

    `metadata`, `groups` and `held_names` are read off the plan: nothing moves, and no rank waits
    for another. Each iteration is one refit, of all ranks together. A tensor is assembled when it
    is asked for, in memory of its own: beside the exchange's bucket there is only what the engine
    keeps. The ranks agree before the last tensor is handed out: none has it unless every rank has
    gathered everything.
    """

    def __init__(
        self, exporter: Exporter, *, held: Held = "all", dtype: torch.dtype | None = None
    ) -> None:
        """`exporter` is the policy's. Tensors have the dtypes that its engines get, or `dtype`.
        ConfigError for another `held`.
        """
        if held not in get_args(Held):
            raise ConfigError(f"held={held!r}; legal: {', '.join(map(repr, get_args(Held)))}")
        self._exporter, self._held = exporter, held
        self._round: _Round | None = None
        self._sending, self._step = False, 0
        whole = exporter.plan(dtype=dtype)
        sent = [tensor.name for tensor in whole.tensors]
        groups = group_by_layer(sent)
        # Experts that are spread over other ranks come last in a plan, but with their layer here:
        # an engine keeps what it has of a layer until it has all of it.
        one = sent == [name for group in groups for name in group]
        parts = [None] if one else [tuple(group) for group in groups]
        plans = [exporter.plan(names=names, dtype=dtype) for names in parts]
        self._tensors = [tensor for plan in plans for tensor in plan.tensors]
        self._groups = group_by_layer([tensor.name for tensor in self._tensors])
        if held == "stage":
            plans = [exporter.plan(names=n, own_stage=True, dtype=dtype) for n in parts]
        elif held == "rank 0" and exporter.topology.block_of(exporter.rank) != 0:
            plans = []  # a replica of the ranks that gather
        self._plans: Sequence[RefitPlan] = plans

    def metadata(self) -> list[RefitTensor]:
        """Name, dtype and shape of every tensor of the model, alike on all ranks, in the order of
        the iteration.
        """
        return list(self._tensors)

    def held_names(self) -> Collection[str] | None:
        """The names of what this rank hands out; None for all."""
        if self._held == "stage":
            stage = self._exporter.coords.pp
            return [tensor.name for tensor in self._tensors if tensor.stage == stage]
        return None if self._held == "all" or self._exporter.rank == 0 else []

    def groups(self) -> list[list[str]]:
        """The names by layer, of those layers of which this rank holds something."""
        held = self.held_names()
        mine = None if held is None else set(held)
        return [list(g) for g in self._groups if mine is None or not mine.isdisjoint(g)]

    def __iter__(self) -> Iterator[Pair]:
        """One refit: every name of `groups` with its tensor, or with None if this rank does not
        hold it. Collective: ranks that hold nothing iterate too. RefitError, on every rank, if any
        failed, or leaves early.
        """
        current = self._begin()
        try:
            # Not `yield from`: in `send`, a rank that leaves this still helps the others.
            while (pair := current.next()) is not None:
                yield pair
                del pair
        finally:
            if not self._sending:
                current.close()

    def iter_groups(self) -> Iterator[tuple[list[str], list[Tensor | None]]]:
        """The same by layer: names, and tensors."""
        pairs = iter(self)
        for group in self.groups():
            names, tensors = zip(*(next(pairs) for _ in group), strict=True)
            yield list(names), list(tensors)
            del tensors
        assert next(pairs, None) is None  # on a rank that holds nothing, this is its part

    def send(self, engine: TrainerEngine, step: int) -> None:
        """Have a trainer engine, whose source this is, send the weights as they are after `step`
        optimizer steps. Collective: RefitError on every rank if any failed, before, during or after
        its iteration; the policy is unharmed. A rank whose engine gives up still gathers, without
        memory for tensors, since the others need its shards.
        """
        self._round, self._sending, self._step = None, True, step
        failure: Exception | None = None
        try:
            engine.send_weights()
        except Exception as error:
            traceback.clear_frames(error.__traceback__)  # would keep tensors alive
            failure = error
        except BaseException:
            if self._round is not None:
                self._round.close()
            raise
        finally:
            self._sending = False
        current, self._round = self._round or self._begin(), None
        if not current.over:
            early = "the trainer engine has not asked for all weights"
            current.drain(failure or RefitError(early))
        if not current.agreed:  # on any rank: the reason has been raised in the iteration
            assert failure is not None
            raise REFITS.wrap(failure) from failure
        self._exporter.begin()
        self._exporter.agree(failure)

    def check(self, client: SyncClient) -> CheckedClient:
        """A client for the trainer engine in place of `client`: see `CheckedClient`."""
        return CheckedClient(client, self)

    def version(self) -> str:
        """The version of what was iterated last, its step; RefitError if that is not complete."""
        if self._round is None or not self._round.agreed:
            raise RefitError("an update may not be finished: not every rank has sent its weights")
        return str(self._step)

    def _begin(self) -> _Round:
        held = self.held_names()
        names = [name for group in self.groups() for name in group]
        self._round = _Round(
            self._exporter, self._plans, names, None if held is None else frozenset(held)
        )
        return self._round


class CheckedClient:
    """A client that finishes an update only when all ranks have agreed that they have gathered
    everything, and then gives it the step as its version.
    """

    def __init__(self, client: SyncClient, source: RefitSource) -> None:
        self._client, self._source = client, source
        self.init_weight_transfer_engine = client.init_weight_transfer_engine
        self.start_weight_update = client.start_weight_update
        self.update_weights = client.update_weights

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """See `SyncClient`; RefitError if the update is not complete."""
        version = self._source.version()
        self._client.finish_weight_update(weight_version or version)


class _Round:
    """One refit of all ranks as this rank takes part in it. `over`: it has ended, for all ranks;
    `agreed`: well.
    """

    def __init__(
        self,
        exporter: Exporter,
        plans: Sequence[RefitPlan],
        names: Sequence[str],
        held: Collection[str] | None,
    ) -> None:
        self.over = self.agreed = False
        self._exporter, self._plans, self._names, self._held = exporter, plans, names, held
        self._failure: Exception | None = None
        exporter.begin()
        self._steps = self._run()

    def next(self) -> Pair | None:
        """The next name and tensor; None at the end."""
        return next(self._steps, None)

    def drain(self, failure: Exception) -> None:
        """Take part to the end without tensors; RefitError, with this failure, on all ranks."""
        self._failure = failure
        for _ in self._steps:
            pass

    def close(self) -> None:
        """Leave; the others fail if this is not the end."""
        self._steps.close()

    def _run(self) -> Generator[Pair, None, None]:
        last, count = None, 0
        try:
            for pair in self._exporter.ranks.watch(self._pairs()):
                count += 1
                if count == len(self._names):
                    last = pair
                else:
                    yield pair
                del pair
            self._exporter.agree(self._failure)
            self.agreed = True
        finally:
            self.over = True
        if last is not None:
            yield last

    def _pairs(self) -> Iterator[Pair]:
        names = iter(self._names)
        for plan in self._plans:
            for tensor, target in self._exporter.stream(plan, self._place):
                if target is None:
                    continue
                for name in names:
                    if name == tensor.name:
                        break
                    yield name, None
                value = target.tensor(tensor.shape, tensor.dtype)
                del target
                yield tensor.name, value
                del value
        for name in names:
            yield name, None

    def _place(self, tensor: RefitTensor) -> BufferSlice | None:
        mine = self._held is None or tensor.name in self._held
        if self._failure is not None or not mine:
            return None
        return BufferSlice(Buffer.on(self._exporter.device, tensor.nbytes), 0)


def group_by_layer(names: Sequence[str]) -> list[list[str]]:
    """The names by layer, as vLLM divides them: those with the same first number, and the same
    words before it. Kinds of layers are in the order of their first names. What has no number comes
    before all layers if it stands before the first name that has one, else after them.
    """
    before: list[str] = []
    after: list[str] = []
    kinds: dict[str, int] = {}
    layers: dict[tuple[int, int], list[str]] = {}
    for name in names:
        found = _NUMBERED.match(name)
        if found is None:
            (after if layers else before).append(name)
        else:
            kind = kinds.setdefault(found["words"], len(kinds))
            layers.setdefault((kind, int(found["number"])), []).append(name)
    groups = [before, *(layers[key] for key in sorted(layers)), after]
    return [group for group in groups if group]
