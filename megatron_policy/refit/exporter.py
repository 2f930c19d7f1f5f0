"""One policy's end of every refit: plans, the stream of its weights, agreement between ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_policy.config.numbers import DEFAULT_BUCKET_BYTES
from megatron_policy.coordination.operation import REFITS, Coordinator
from megatron_policy.coordination.process_group import ProcessGroups
from megatron_policy.coordination.timeouts import DEFAULT_TIMEOUT_S
from megatron_policy.errors import ConfigError, RefitError
from megatron_policy.parallel.topology import Coords, Topology
from megatron_policy.refit.buffers import Buffer, BufferSlice
from megatron_policy.refit.export import Filled, Place, Sources, stream_alone
from megatron_policy.refit.manifest import ServedModel
from megatron_policy.refit.plan import RefitPlan, RefitTensor
from megatron_policy.refit.planning import RefitModel, plan_refit
from megatron_policy.refit.rounds import rounds_of, stream_together

if TYPE_CHECKING:
    from megatron_policy.interfaces.engine import Adapters, TrainingEngine

_KEPT_PLANS = 64


class Exporter:
    """A rank's weights as whole Hugging Face tensors; every rank of the policy has one.

    Collectives use its own groups, made at their first use. If one of them fails, all ranks abandon
    the groups and make new ones for the next refit.
    """

    def __init__(
        self,
        engine: TrainingEngine,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        dtype: torch.dtype | None = None,
        tokenizer: Any = None,
    ) -> None:
        """No collective waits longer than `timeout_s` seconds, and none moves more than
        `bucket_bytes` plus 2 %. Engines get `dtype`; None: the checkpoint's own. Directories get
        the files of `tokenizer`; None: those of the model.
        """
        place = engine.place
        self.topology: Topology = place.topology
        self.coords: Coords = place.coords
        self.rank = place.topology.rank(place.coords)
        self.timeout_s, self.bucket_bytes, self.dtype = timeout_s, bucket_bytes, dtype
        self.source_dtypes = engine.source_dtypes
        self.table, self.tokenizer = engine.table, tokenizer
        self.adapters: Adapters | None = engine.adapters
        self._sources = Sources(engine.held, engine.table.architecture, self.adapters)
        self._model = RefitModel(
            engine.table,
            place.split,
            engine.source_dtypes,
            engine.precision,
            self.topology,
        )
        self._of_adapters: RefitModel | None = None
        if (own := self.adapters) is not None:
            self._of_adapters = replace(self._model, table=own.table, dtypes=own.dtypes)
        self._only_adapters = False
        self._plans: dict[object, RefitPlan] = {}
        store = dist.distributed_c10d._get_default_store()
        size = self.topology.world_size
        self._coordinator = Coordinator(REFITS, store, self.rank, size, timeout_s)
        self._operation = self._coordinator.begin()
        self._groups: ProcessGroups | None = None
        self._calls = 0

    @property
    def probe(self) -> Tensor:
        """A tensor on the weights' device."""
        return self._sources.probe

    @property
    def device(self) -> torch.device:
        """The weights' device."""
        return self.probe.device

    @property
    def calls(self) -> int:
        """Number of collective calls by this rank so far."""
        return self._calls + (self._groups.calls if self._groups else 0)

    def begin(self) -> None:
        """Begin an operation of all ranks, which count them alike: one that comes late to an
        operation which has failed does not meet the others in the next.
        """
        self._sources.restart()
        before, self._operation = self._operation, self._coordinator.begin()
        if self._groups is not None and before.first_failure(self._operation.call):
            self._leave_groups(broken=True)  # this rank was not there when the others gave up

    def plan(
        self,
        *,
        names: tuple[str, ...] | None = None,
        own_stage: bool = False,
        bucket_bytes: int | None = None,
        dtype: torch.dtype | None = None,
        as_stored: bool = False,
        adapters: bool | None = None,
    ) -> RefitPlan:
        """What a refit moves; see `plan_refit`. `own_stage` leaves out other stages' tensors;
        `as_stored` keeps the checkpoint's dtypes, whatever engines get. With `adapters` it moves
        those alone, by PEFT's names; else the weights, merged with them; None: as `handing_over`
        says. ConfigError for adapters of a policy that has none.
        """
        adapters = self._only_adapters if adapters is None else adapters
        model = self._of_adapters if adapters else self._model
        if model is None:
            raise ConfigError(
                "this policy has no adapters to hand over: set policy.megatron_cfg.peft"
            )
        size = bucket_bytes or self.bucket_bytes
        dtype = None if as_stored else dtype or self.dtype
        key = (names, own_stage, size, dtype, adapters)
        if key not in self._plans:
            if len(self._plans) >= _KEPT_PLANS:
                self._plans.clear()
                self._sources.forget()
            self._plans[key] = plan_refit(
                model,
                bucket_bytes=size,
                dtype=dtype,
                stage=self.coords.pp if own_stage else None,
                names=names,
            )
        return self._plans[key]

    def served(self, *, adapters: bool | None = None) -> ServedModel:
        """What an engine has to set up for what `plan` moves."""
        own = self.adapters
        if own is None or not (self._only_adapters if adapters is None else adapters):
            return ServedModel(self.table.overrides)
        return ServedModel(self.table.overrides, own.spec.peft_config(own.table))

    @property
    def only_adapters(self) -> bool:
        """Whether plans are of adapters alone, see `handing_over`."""
        return self._only_adapters

    @contextmanager
    def handing_over(self, *, adapters: bool) -> Iterator[None]:
        """In this context plans are of the adapters alone, or of the merged weights."""
        self._only_adapters = adapters
        try:
            yield
        finally:
            self._only_adapters = False

    def stream(self, plan: RefitPlan, place: Place) -> Filled:
        """Yield each tensor of the plan in order, complete, with its buffer slice from `place`.

        A tensor is placed when its first elements arrive, after all earlier ones were yielded. All
        ranks that gather together must iterate to the end, even those that place nothing.
        RefitError if one of them does not take part in time.
        """
        if self.topology.world_size > 1:
            return self._watched(plan, place)
        return chain.from_iterable(
            stream_alone(exchange, self._sources, place) for exchange in plan.exchanges
        )

    def agree(self, failure: Exception | None) -> None:
        """End an operation, collectively: RefitError on all ranks, with reasons, if any failed.
        What was merged is no longer needed.
        """
        self._sources.restart()
        with self._giving_up():
            reasons = self._operation.collect_failures(failure)
        self._operation.leave_together()
        if reasons:
            raise RefitError(reasons) from failure

    def broadcast_text(self, words: str | None) -> str:
        """The words that rank 0 passes. Collective over all ranks; the others pass None."""
        with self._giving_up():
            return self._operation.broadcast(words)

    def gather_text(self, words: str) -> list[str]:
        """On rank 0 the words that each rank passes; nothing on the others. Collective."""
        with self._giving_up():
            return self._operation.gather(words)

    def leave_together(self) -> None:
        """End an operation that `agree` does not end."""
        self._operation.leave_together()

    def alive(self) -> AbstractContextManager[None]:
        """Send heartbeats to the other ranks while the body waits for an engine."""
        return self._operation.beating()

    def leave(self) -> None:
        """Call before `close` if nothing failed: rank 0 leaves after the others."""
        self._coordinator.shut_down()

    def close(self) -> None:
        """Leave the groups."""
        self._leave_groups()

    @contextmanager
    def _giving_up(self) -> Iterator[None]:
        """Leave the groups if the body fails: calls can still be under way in them."""
        try:
            yield
        except BaseException:
            self._leave_groups(broken=True)
            raise

    def _leave_groups(self, broken: bool = False) -> None:
        groups, self._groups = self._groups, None
        if groups is not None:
            self._calls += groups.calls
            groups.close(broken)

    def _watched(self, plan: RefitPlan, place: Place) -> Filled:
        with self._giving_up():
            try:
                for filled in self._streamed(plan, place):
                    yield filled
                    self._operation.beat()
            except BaseException as error:
                # Also if the caller stops early: the others are in the middle of an exchange.
                self._operation.abort(error)
                raise

    def _streamed(self, plan: RefitPlan, place: Place) -> Filled:
        operation = self._operation
        if reason := operation.first_failure():
            raise RefitError(f"the other ranks have already aborted: {reason}")
        if self._groups is None:
            self._groups = operation.call(lambda: self._join(operation.number))
        for exchange in plan.exchanges:
            if exchange.gathers:
                group = self._groups.experts if exchange.of_experts else self._groups.tp
                # Nothing keeps the buffer of these rounds while the next exchange makes its own.
                yield from stream_together(
                    exchange, rounds_of(exchange, self._sources, group, self._groups.pp), place
                )
            else:
                yield from stream_alone(exchange, self._sources, place)

    def _join(self, number: int) -> ProcessGroups:
        name, store = f"{self._coordinator.root}/{number}", self._coordinator.store
        return ProcessGroups.join(name, store, self.topology, self.coords, self.timeout_s)


def tensors(exporter: Exporter, plan: RefitPlan) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each HF tensor of the plan by name, in its own memory, which the caller may keep.

    The iteration ends when every rank has reached its end; RefitError if one of them does not.
    """

    def place(tensor: RefitTensor) -> BufferSlice:
        return BufferSlice(Buffer.on(exporter.device, tensor.nbytes), 0)

    exporter.begin()
    for tensor, target in exporter.stream(plan, place):
        assert target is not None
        yield tensor.name, target.tensor(tensor.shape, tensor.dtype)
    # Even if nothing was exchanged: another rank may not have reached its first tensor yet.
    exporter.agree(None)
