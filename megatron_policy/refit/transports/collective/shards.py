"""Refits from shards to shards over a process group: every trainer sends each engine rank what the
plan has it send, and nothing is gathered.

In round r trainer s sends to engine rank (s + r) % engines, so that all are busy and none waits for
one that waits for it. Both sides go through the rounds in this order.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from megatron_policy.converters.rows.regions import Region
from megatron_policy.coordination.process_group import BoundedProcessGroup
from megatron_policy.dtypes import dtype_named, name_dtype
from megatron_policy.errors import RefitError
from megatron_policy.refit.digest import Digests, algorithm_for
from megatron_policy.refit.manifest import Form, RefitManifest, StagedVersion, with_digests
from megatron_policy.refit.plan import RefitTensor
from megatron_policy.refit.shards import EngineShards, ShardPlan, ShardTransfer, plan_shards
from megatron_policy.refit.streams import write_stream
from megatron_policy.refit.transports.collective.handshake import Sender, raise_peer_failure
from megatron_policy.refit.transports.collective.stream import Stream, Writer

if TYPE_CHECKING:
    from megatron_policy.refit.exporter import Exporter


Fill = Callable[[int, int, Tensor], None]
"""Fills the elements of a run, `[N]`: of which engine rank, and which of its runs."""


class ShardRun(NamedTuple):
    """Elements of a tensor of an engine rank, one after another, as a trainer sends them."""

    tensor: RefitTensor
    """As it travels: flat, with a name of its own."""
    of: str
    regions: tuple[Region, ...]


@dataclass(frozen=True)
class ShardLayout:
    """What one engine rank receives: its tensors, and the runs that each trainer sends of them."""

    forms: Mapping[str, Form]
    runs: Sequence[Sequence[ShardRun]]

    def encode(self) -> bytes:
        """The layout as JSON."""
        forms = {n: [name_dtype(dtype), list(shape)] for n, (shape, dtype) in self.forms.items()}
        runs = [[[run.of, run.regions] for run in of] for of in self.runs]
        return json.dumps([forms, runs], ensure_ascii=False, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, content: bytes) -> ShardLayout:
        """The inverse of `encode`; RefitError for anything else."""
        try:
            named, found = json.loads(content)
            forms = {
                name: (tuple(map(int, shape)), dtype_named(dtype))
                for name, (dtype, shape) in named.items()
            }
            runs = [
                [
                    _run(sender, at, name, forms[name], tuple(map(_region, of)))
                    for at, (name, of) in enumerate(each)
                ]
                for sender, each in enumerate(found)
            ]
            return cls(forms, runs)
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise RefitError(
                f"the trainer's list of shards cannot be read: {error}; "
                "use the same version of megatron-policy on both sides"
            ) from error


def order_engines(sender: int, engines: int) -> list[int]:
    """The engine ranks in the order in which a trainer sends to them."""
    return [(sender + number) % engines for number in range(engines)]


def order_senders(engine: int, engines: int, senders: int) -> list[int]:
    """The trainers in the order in which an engine rank receives from them."""
    return sorted(range(senders), key=lambda sender: ((engine - sender) % engines, sender))


def make_layouts(plan: ShardPlan) -> list[ShardLayout]:
    """The layout of each engine rank."""
    forms: list[dict[str, Form]] = [{} for _ in range(plan.engine_ranks)]
    runs = [[list[ShardRun]() for _ in range(plan.trainers)] for _ in range(plan.engine_ranks)]
    for each in plan.transfers:
        name, own = each.tensor.name, runs[each.target][each.source]
        shape = each.shape if each.tensor.shape else ()
        form = forms[each.target].setdefault(name, (shape, each.tensor.dtype))
        own.append(_run(each.source, len(own), name, form, tuple(to for _, to in each.moves)))
    return [ShardLayout(*each) for each in zip(forms, runs, strict=True)]


class ShardRefits:
    """Refits of an engine that is split over the ranks of a group. `Collective.shards` makes it."""

    def __init__(self, member: Sender, held: Mapping[str, EngineShards]) -> None:
        """`held` says which engine ranks have which part of each tensor."""
        self._member, self._engines, self._held = member, member.engines, held
        self._planned: tuple[object, ShardPlan, list[ShardLayout]] | None = None

    def deliver(self, exporter: Exporter, step: int) -> RefitManifest:
        """Send the weights as they are after `step` optimizer steps.

        Collective over all ranks. RefitError on all of them if any failed.
        """
        began = time.perf_counter()
        plan, layouts = self.plan(exporter)  # refuses what does not fit before engines hear of it
        exporter.begin()
        by_target: defaultdict[int, list[ShardTransfer]] = defaultdict(list)
        for transfer in plan.by_source.get(self._member.sender, ()):
            by_target[transfer.target].append(transfer)

        def fill(engine: int, number: int, flat: Tensor) -> None:
            transfer, at = by_target[engine][number], 0
            for own, _ in transfer.moves:
                part = flat[at : at + own.elements].view(own.size)
                part.copy_(exporter.view(transfer.entry, own))
                at += own.elements

        return self._carry_out(exporter, layouts, fill, step, began)

    def deliver_changes(
        self, exporter: Exporter, messages: Sequence[Sequence[bytes]], step: int, began: float
    ) -> RefitManifest:
        """Send each engine rank what has changed of its elements: the `messages` for each, of this
        trainer. Ends an operation of all ranks that has begun.
        """
        ranks = exporter.ranks
        own = [b"".join(write_stream(each)) if each else b"" for each in messages]
        lengths = ranks.gather_text(json.dumps([len(stream) for stream in own]))
        found = json.loads(ranks.broadcast_text(json.dumps(lengths) if lengths else None))
        layouts = _lay_out_streams([json.loads(each) for each in found])

        def fill(engine: int, number: int, flat: Tensor) -> None:
            flat.copy_(torch.frombuffer(bytearray(own[engine]), dtype=torch.uint8))

        sent = self._carry_out(exporter, layouts, fill, step, began)
        return replace(sent, shard_bytes=0, changed_bytes=sent.shard_bytes)

    def ask(self, exporter: Exporter) -> list[StagedVersion]:
        """The engine ranks' versions, on rank 0."""
        self._member.begin()
        return self._member.ask() if self._member.sender == 0 else []

    def _carry_out(
        self,
        exporter: Exporter,
        layouts: Sequence[ShardLayout],
        fill: Fill,
        step: int,
        began: float,
    ) -> RefitManifest:
        failure, nbytes = None, 0
        self._member.begin()
        try:
            with exporter.ranks.alive():
                nbytes = self._send(exporter, layouts, fill, step)
        except Exception as error:
            failure = error
            self._member.give_up(str(error))
        exporter.agree(failure)
        seconds = time.perf_counter() - began
        sent = RefitManifest(step, algorithm_for(exporter.probe), {}, exporter.served_model)
        return replace(sent, shard_bytes=nbytes, seconds=seconds)

    def plan(self, exporter: Exporter) -> tuple[ShardPlan, list[ShardLayout]]:
        """The plan, which is made once."""
        plan = exporter.plan()
        if self._planned is None or self._planned[0] is not plan:
            architecture = exporter.table.architecture
            shards = plan_shards(plan, architecture, exporter.topology, self._held, self._engines)
            self._planned = plan, shards, make_layouts(shards)
        return self._planned[1:]

    def _send(
        self, exporter: Exporter, layouts: Sequence[ShardLayout], fill: Fill, step: int
    ) -> int:
        member, trainers = self._member, exporter.topology.world_size
        if member.sender == 0:
            member.offer_shards(layouts, trainers, exporter.bucket_bytes, exporter.served_model)
        channel = member.meet()
        digests, forms = Digests(algorithm_for(exporter.probe)), dict[str, Form]()
        with raise_peer_failure(member.find_failure):
            for engine in order_engines(member.sender, self._engines):
                runs = layouts[engine].runs[member.sender]
                _send_runs(exporter, channel, engine, runs, fill, digests)
                forms |= {
                    f"{engine}/{r.tensor.name}": (r.tensor.shape, r.tensor.dtype) for r in runs
                }
        sent = with_digests(forms, digests.read())
        manifest = RefitManifest(step, digests.algorithm, sent, exporter.served_model)
        member.finish(manifest.encode())
        return manifest.total_bytes


def _send_runs(
    exporter: Exporter,
    channel: BoundedProcessGroup,
    engine: int,
    runs: Sequence[ShardRun],
    fill: Fill,
    digests: Digests,
) -> None:
    """Send one engine rank what this rank has for it."""
    if not runs:
        return
    stream = Stream.of([run.tensor for run in runs])
    writer = Writer(
        stream, exporter.bucket_bytes, exporter.device, lambda c: channel.send(c, engine + 1)
    )
    for number, run in enumerate(runs):
        name, target = run.tensor.name, writer.place(run.tensor.name)
        fill(engine, number, target.tensor(run.tensor.shape, run.tensor.dtype))
        digests.add(f"{engine}/{name}", target.bytes(run.tensor.nbytes))
        writer.filled(name, target)
    writer.settle()


def _lay_out_streams(lengths: Sequence[Sequence[int]]) -> list[ShardLayout]:
    """The layout of each engine rank, where each trainer sends a stream of so many bytes to each:
    the names are those of `read_streams`.
    """
    layouts = []
    for of_engine in zip(*lengths, strict=True):
        forms: dict[str, Form] = {}
        runs: list[list[ShardRun]] = []
        for sender, length in enumerate(of_engine):
            name, form = f"0.{sender}.0", ((1, length), torch.uint8)
            if length:
                forms[name] = form
            runs.append(
                [_run(sender, 0, name, form, (Region((length,), (1,), 0),))] if length else []
            )
        layouts.append(ShardLayout(forms, runs))
    return layouts


def _run(sender: int, at: int, name: str, form: Form, regions: tuple[Region, ...]) -> ShardRun:
    elements = sum(region.elements for region in regions)
    return ShardRun(RefitTensor(f"{sender}/{at}", (elements,), form[1]), name, regions)


def _region(fields: tuple[list[int], list[int], int]) -> Region:
    size, stride, offset = fields
    return Region(tuple(map(int, size)), tuple(map(int, stride)), int(offset))
