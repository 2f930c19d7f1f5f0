"""One policy's end of every refit: plans, and the stream of its weights."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_policy.config.numbers import DEFAULT_BUCKET_BYTES
from megatron_policy.converters.files.contained import expanded
from megatron_policy.converters.rows.regions import Region
from megatron_policy.converters.table import Entry
from megatron_policy.coordination.timeouts import DEFAULT_TIMEOUT_S
from megatron_policy.device import synchronize
from megatron_policy.errors import ConfigError
from megatron_policy.interfaces.engine import Adapters, TrainingEngine
from megatron_policy.memory.pinned_pool import PinnedMemoryPool
from megatron_policy.refit.buffers import Buffer, BufferSlice
from megatron_policy.refit.manifest import ServedModel, WeightVersion
from megatron_policy.refit.plan import RefitPlan, RefitTensor
from megatron_policy.refit.planning import RefitModel, plan_refit
from megatron_policy.refit.ranks import RefitRanks
from megatron_policy.refit.rounds import Kept, make_rounds, stream_together
from megatron_policy.refit.sources import Filled, Place, Sources, stream_alone
from megatron_policy.refit.streams import Streams, plan_streams

_KEPT_PLANS = 64


@dataclass(frozen=True)
class Origin:
    """The models that a policy was made from, directories or names on the hub, and the tokenizer
    that it was given.
    """

    model: str
    """Its weights at the start; directories get its config, and its tokenizer if none was given."""
    reference: str | None = None
    """The weights of the reference, if they are others."""
    tokenizer: Any = None

    def check_apart(self, path: Path) -> None:
        """ConfigError for a destination that is one of the models, lies in one or holds one."""
        final = Path(os.path.realpath(path))
        named = {"policy.model_name": self.model, "policy.reference_model_name": self.reference}
        for key, name in named.items():
            if name is None:
                continue
            own = Path(os.path.realpath(expanded(name)))
            # A name of the hub is no path, but one that an export took would be read in its place.
            if final.is_relative_to(own) or (own.exists() and own.is_relative_to(final)):
                raise ConfigError(
                    f"{path} overlaps {name}, which is {key}: a resumed policy would start from "
                    "what replaces it, compare with that, or copy it. Choose a path apart from it"
                )


class Exporter:
    """A rank's weights as whole Hugging Face tensors: those of its model, merged with adapters if
    there are any, or the adapters alone, by PEFT's names. Every rank of the policy has both.
    """

    @classmethod
    def of(
        cls,
        engine: TrainingEngine,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        dtype: torch.dtype | None = None,
        origin: Origin,
    ) -> Exporter:
        """The exporter of the model. No collective waits longer than `timeout_s` seconds, and none
        moves more than `bucket_bytes` plus 2 %. Engines get `dtype`; None: the checkpoint's own.
        Directories get the files of `origin`, and are apart from its models.
        """
        place, table, own = engine.place, engine.table, engine.adapters
        ranks = RefitRanks(place.topology, place.coords, timeout_s)
        sources = Sources(engine.held, table.architecture, own)
        make = partial(cls, ranks, sources, own, bucket_bytes, dtype, origin)
        model = RefitModel(
            table, place.split, engine.source_dtypes, engine.precision, place.topology
        )
        alone = None
        if own is not None:
            served = ServedModel(table.overrides, own.spec.peft_config(own.table))
            alone = make(replace(model, table=own.table, dtypes=own.dtypes), served, None)
        return make(model, ServedModel(table.overrides), alone)

    def __init__(
        self,
        ranks: RefitRanks,
        sources: Sources,
        adapters: Adapters | None,
        bucket_bytes: int,
        dtype: torch.dtype | None,
        origin: Origin,
        model: RefitModel,
        served_model: ServedModel,
        alone: Exporter | None,
    ) -> None:
        """`alone` is the exporter of the adapters; see `of`."""
        self.ranks, self.topology, self.coords = ranks, ranks.topology, ranks.coords
        self.rank, self.timeout_s = ranks.rank, ranks.timeout_s
        self.bucket_bytes, self.dtype, self.origin = bucket_bytes, dtype, origin
        self.table, self.source_dtypes, self.adapters = model.table, model.dtypes, adapters
        self.served_model = served_model
        """What an engine has to set up for what is exported."""
        self._sources, self._model, self._alone = sources, model, alone
        self.published: dict[object, Any] = {}
        """What is kept from one refit by deltas to the next: by directory, or by `DeltaStream`."""
        self._plans: dict[object, RefitPlan] = {}
        self._kept: Sequence[Kept] | None = None
        self._streams: Sequence[Streams] = ()

    @property
    def probe(self) -> Tensor:
        """A tensor on the weights' device."""
        return self._sources.probe

    @property
    def device(self) -> torch.device:
        """The weights' device."""
        return self.probe.device

    def select(self, *, adapters: bool) -> Exporter:
        """The exporter of the adapters alone, or this one. ConfigError for adapters of a policy
        that has none.
        """
        if not adapters:
            return self
        if self._alone is None:
            raise ConfigError(
                "this policy has no adapters to hand over: set policy.megatron_cfg.peft"
            )
        return self._alone

    def freeze(self, plan: RefitPlan | None, ranks: RefitRanks, pool: PinnedMemoryPool) -> Exporter:
        """An exporter that streams this plan, with all exchanges in rounds, as the weights are now.
        What this rank has for it is copied to the pool's memory, which it needs to the end; the
        weights are then free to change or move. It shares nothing that changes with this one, and
        takes part with these `ranks`: another thread can use it. None: this rank has no part in it.
        """
        frozen = copy(self)
        frozen.ranks, frozen._plans = ranks, dict(self._plans)
        frozen._sources = self._sources.apart()
        if plan is None:
            return frozen
        groups = ranks.join_groups()
        self.restart()
        frozen._kept = [
            make_rounds(each, self._sources, groups.of(each.of_experts), groups.pp).keep(pool)
            for each in plan.exchanges
        ]
        self.restart()
        synchronize()
        return frozen

    def versioned(self, version: WeightVersion, streams: Sequence[Streams] = ()) -> Exporter:
        """This exporter, which says which weights it exports; with `streams` it exports these, what
        ranks have changed, in place of tensors.
        """
        other = copy(self)
        other.served_model, other._streams = replace(self.served_model, version=version), streams
        return other

    def view(self, entry: Entry, region: Region) -> Tensor:
        """Those elements of this rank's parameter as it is now, merged with its adapter; what is
        merged is kept until the next operation begins or ends, or `restart`.
        """
        return self._sources.view(entry, region)

    def restart(self) -> None:
        """Forget what was merged: adapters may have changed, or nobody needs it now."""
        self._sources.restart()

    def begin(self) -> None:
        """Begin an operation of all ranks; see `RefitRanks.begin`."""
        self.restart()
        self.ranks.begin()

    def agree(self, failure: Exception | None) -> None:
        """End an operation, collectively: RefitError on all ranks, with reasons, if any failed.
        What was merged is no longer needed.
        """
        self.restart()
        self.ranks.agree(failure)

    def plan(
        self,
        *,
        names: tuple[str, ...] | None = None,
        own_stage: bool = False,
        bucket_bytes: int | None = None,
        dtype: torch.dtype | None = None,
        as_stored: bool = False,
    ) -> RefitPlan:
        """What a refit moves; see `plan_refit`. `own_stage` leaves out other stages' tensors;
        `as_stored` keeps the checkpoint's dtypes, whatever engines get.
        """
        size = bucket_bytes or self.bucket_bytes
        if self._streams:
            stages = (self.coords.pp,) if own_stage else range(self.topology.pp)
            return plan_streams(self._streams, stages, size)
        dtype = None if as_stored else dtype or self.dtype
        key = (names, own_stage, size, dtype)
        if key not in self._plans:
            if len(self._plans) >= _KEPT_PLANS:
                self._plans.clear()
                self._sources.forget()
            stage = self.coords.pp if own_stage else None
            self._plans[key] = plan_refit(
                self._model, bucket_bytes=size, dtype=dtype, stage=stage, names=names
            )
        return self._plans[key]

    def stream(self, plan: RefitPlan, place: Place) -> Filled:
        """Yield each tensor of the plan in order, complete, with its buffer slice from `place`.

        A tensor is placed when its first elements arrive, after all earlier ones were yielded. All
        ranks that gather together must iterate to the end, even those that place nothing.
        RefitError if one of them does not take part in time.
        """
        if self.topology.world_size > 1 or self._kept is not None or self._streams:
            return self.ranks.watch(self._exchange(plan, place))
        return chain.from_iterable(
            stream_alone(exchange, self._sources, place) for exchange in plan.exchanges
        )

    def _exchange(self, plan: RefitPlan, place: Place) -> Filled:
        groups = self.ranks.join_groups()
        for number, exchange in enumerate(plan.exchanges):
            if exchange.gathers or exchange.in_rounds:
                group = groups.of(exchange.of_experts)
                kept = None
                if self._streams:
                    kept = self._streams[number].keep(exchange, self.coords.pp)
                elif self._kept is not None:
                    kept = self._kept[number]
                # Nothing keeps the buffer of these rounds while the next exchange makes its own.
                yield from stream_together(
                    exchange, make_rounds(exchange, self._sources, group, groups.pp, kept), place
                )
            else:
                yield from stream_alone(exchange, self._sources, place)


def stream_tensors(exporter: Exporter, plan: RefitPlan) -> Iterator[tuple[str, torch.Tensor]]:
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
