"""Refits from shards to shards over a process group, or by a mover: every trainer sends each engine
rank what the plan has it send, and nothing is gathered.

In round r trainer s sends to engine rank (s + r) % engines, so that all are busy and none waits for
one that waits for it. Both sides go through the rounds in this order.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from megatron_policy.converters.rows.regions import Region
from megatron_policy.dtypes import dtype_named, name_dtype
from megatron_policy.errors import RefitError
from megatron_policy.refit.buffers import align
from megatron_policy.refit.digest import Digests, algorithm_for
from megatron_policy.refit.index_spans import Move
from megatron_policy.refit.manifest import Form, RefitManifest, StagedVersion, with_digests
from megatron_policy.refit.plan import RefitPlan, RefitTensor
from megatron_policy.refit.shards import (
    EngineShards,
    ShardPlan,
    ShardTransfer,
    plan_shards,
)
from megatron_policy.refit.streams import write_stream
from megatron_policy.refit.transports.collective.handshake import Sender, raise_peer_failure
from megatron_policy.refit.transports.collective.stream import Stream, Writer
from megatron_policy.refit.transports.movers.landing import LandingPlace
from megatron_policy.refit.transports.movers.mover import Mover, Writing

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


Runs = Sequence[Sequence[ShardRun]]
"""What a trainer sends, for each engine rank."""


@dataclass(frozen=True)
class ShardLayout:
    """What one engine rank receives: its tensors, and the runs that each trainer sends of them."""

    forms: Mapping[str, Form]
    runs: Sequence[Sequence[ShardRun]]

    @classmethod
    def decode(cls, content: bytes) -> ShardLayout:
        """The inverse of `ShardList.encode`; RefitError for anything else."""
        try:
            names, described, found = json.loads(content)
            kinds = [_kind(*kind) for kind in described]
            forms: dict[str, Form] = {}
            runs = []
            for sender, numbers in enumerate(found):
                pairs = zip(numbers[::2], numbers[1::2], strict=True)
                of_sender = [(str(names[name]), *kinds[kind]) for name, kind in pairs]
                runs.append([_run(sender, at, *each) for at, each in enumerate(of_sender)])
                for name, form, _ in of_sender:
                    if forms.setdefault(name, form) != form:
                        raise ValueError(f"{name} is {forms[name]} and {form}")
            return cls(forms, runs)
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise RefitError(
                f"the trainer's list of shards cannot be read: {error}; "
                "use the same version of megatron-policy on both sides"
            ) from error


class ShardList:
    """What one engine rank receives, in the words in which it is told: most layers are alike, so
    that each kind of run is described once, and a run is the numbers of a name and of a kind.
    """

    def __init__(self, trainers: int) -> None:
        """Nothing yet of each of so many trainers."""
        self._names: dict[str, int] = {}
        self._kinds: dict[tuple[int, torch.dtype], int] = {}
        self._described: list[tuple[torch.dtype, Sequence[int], Sequence[Move]]] = []
        self._runs = [list[int]() for _ in range(trainers)]

    def add(
        self,
        source: int,
        name: str,
        dtype: torch.dtype,
        shape: Sequence[int],
        moves: Sequence[Move],
    ) -> None:
        """List a run of a tensor, of which this rank has `shape`, as the last one of a trainer."""
        key = id(moves), dtype  # comparing them takes longer than all else
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._kinds[key] = len(self._described)
            self._described.append((dtype, shape, moves))
        self._runs[source] += (self._names.setdefault(name, len(self._names)), kind)

    def encode(self) -> bytes:
        """The list as JSON."""
        kinds = [
            (name_dtype(dtype), shape, [to for _, to in moves])
            for dtype, shape, moves in self._described
        ]
        content = [list(self._names), kinds, self._runs]
        return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()


def order_engines(sender: int, engines: int) -> list[int]:
    """The engine ranks in the order in which a trainer sends to them."""
    return [(sender + number) % engines for number in range(engines)]


def order_senders(engine: int, engines: int, senders: int) -> list[int]:
    """The trainers in the order in which an engine rank receives from them."""
    return sorted(range(senders), key=lambda sender: ((engine - sender) % engines, sender))


def encode_layouts(plan: ShardPlan) -> list[bytes]:
    """The layout of each engine rank."""
    lists = [ShardList(plan.trainers) for _ in range(plan.engine_ranks)]
    for each in plan.transfers:
        tensor = each.tensor
        lists[each.target].add(each.source, tensor.name, tensor.dtype, each.shape, each.moves)
    return [each.encode() for each in lists]


def list_runs(plan: ShardPlan, sender: int) -> list[list[ShardRun]]:
    """The runs that a trainer sends, for each engine rank."""
    runs = [list[ShardRun]() for _ in range(plan.engine_ranks)]
    for each in plan.by_source.get(sender, ()):
        own, form = runs[each.target], (each.shape, each.tensor.dtype)
        to = tuple(to for _, to in each.moves)
        own.append(_run(sender, len(own), each.tensor.name, form, to))
    return runs


class _Prepared(NamedTuple):
    """What all refits of a plan have in common; trainer 0 tells the engines their layouts."""

    of: RefitPlan
    plan: ShardPlan
    runs: Runs
    layouts: Sequence[bytes]


class ShardRefits:
    """Refits of an engine that is split over the ranks of a group. `Collective.shards` makes it."""

    def __init__(
        self, member: Sender, held: Mapping[str, EngineShards], mover: str | None = None
    ) -> None:
        """`held` says which engine ranks have which part of each tensor; see `Collective.shards`
        for the mover.
        """
        self._member, self._engines, self._held = member, member.engines, held
        self._mover = mover or ""
        self._prepared: _Prepared | None = None

    def deliver(self, exporter: Exporter, step: int) -> RefitManifest:
        """Send the weights as they are after `step` optimizer steps.

        Collective over all ranks. RefitError on all of them if any failed.
        """
        began = time.perf_counter()
        # Refuses what does not fit before engines hear of it.
        _, plan, runs, layouts = self._prepare(exporter)
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

        return self._carry_out(exporter, layouts, runs, fill, step, began)

    def deliver_changes(
        self, exporter: Exporter, messages: Sequence[Sequence[bytes]], step: int, began: float
    ) -> RefitManifest:
        """Send each engine rank what has changed of its elements: the `messages` for each, of this
        trainer. Ends an operation of all ranks that has begun.
        """
        ranks = exporter.ranks
        own = [b"".join(write_stream(each)) if each else b"" for each in messages]
        lengths = [len(stream) for stream in own]
        of_all = [json.loads(each) for each in ranks.gather_text(json.dumps(lengths))]
        layouts, runs = _encode_streams(of_all), _list_streams(self._member.sender, lengths)

        def fill(engine: int, number: int, flat: Tensor) -> None:
            flat.copy_(torch.frombuffer(bytearray(own[engine]), dtype=torch.uint8))

        sent = self._carry_out(exporter, layouts, runs, fill, step, began)
        return replace(sent, shard_bytes=0, changed_bytes=sent.shard_bytes)

    def ask(self, exporter: Exporter) -> list[StagedVersion]:
        """The engine ranks' versions, on rank 0."""
        self._member.begin()
        return self._member.ask()

    def _carry_out(
        self,
        exporter: Exporter,
        layouts: Sequence[bytes],
        runs: Runs,
        fill: Fill,
        step: int,
        began: float,
    ) -> RefitManifest:
        failure, nbytes = None, 0
        try:
            self._member.begin()
            with exporter.ranks.alive():
                nbytes = self._send(exporter, layouts, runs, fill, step)
        except Exception as error:
            failure = error
            self._member.give_up(str(error))
        exporter.agree(failure)
        seconds = time.perf_counter() - began
        algorithm = algorithm_for(self._probe(exporter))
        sent = RefitManifest(step, algorithm, {}, exporter.served_model)
        return replace(sent, shard_bytes=nbytes, seconds=seconds)

    def plan(self, exporter: Exporter) -> ShardPlan:
        """The plan, which is made once."""
        return self._prepare(exporter).plan

    def _prepare(self, exporter: Exporter) -> _Prepared:
        plan, sender = exporter.plan(), self._member.sender
        if self._prepared is None or self._prepared.of is not plan:
            architecture = exporter.table.architecture
            shards = plan_shards(plan, architecture, exporter.topology, self._held, self._engines)
            layouts = encode_layouts(shards) if sender == 0 else ()
            self._prepared = _Prepared(plan, shards, list_runs(shards, sender), layouts)
        return self._prepared

    def _send(
        self, exporter: Exporter, layouts: Sequence[bytes], runs: Runs, fill: Fill, step: int
    ) -> int:
        member, trainers = self._member, exporter.topology.world_size
        if member.sender == 0:
            size, model = exporter.bucket_bytes, exporter.served_model
            member.offer_shards(layouts, trainers, size, model, self._mover)
        make_writer = self._meet(exporter, runs)
        digests, forms = Digests(algorithm_for(self._probe(exporter))), dict[str, Form]()
        with raise_peer_failure(member.find_failure):
            for engine in order_engines(member.sender, self._engines):
                if runs[engine]:
                    _send_runs(make_writer(engine), engine, runs[engine], fill, digests)
                sent = (run.tensor for run in runs[engine])
                forms |= {f"{engine}/{each.name}": (each.shape, each.dtype) for each in sent}
        tensors = with_digests(forms, digests.read())
        manifest = RefitManifest(step, digests.algorithm, tensors, exporter.served_model)
        member.finish(manifest.encode())
        return manifest.total_bytes

    def _meet(self, exporter: Exporter, runs: Runs) -> Callable[[int], Writer]:
        """Meet the engine ranks; what writes the runs of each."""
        streams = [Stream.of([run.tensor for run in of_engine]) for of_engine in runs]
        size, where = exporter.bucket_bytes, exporter.device
        if not self._mover:
            channel = self._member.meet()
            return lambda engine: Writer(
                streams[engine], size, where, partial(channel.send, target=engine + 1)
            )
        most = min(size, max(stream.nbytes for stream in streams))
        mover, places = self._member.meet_mover(self._mover, align(max(1, most)))
        memory = mover.memory
        return lambda engine: Writer(
            streams[engine], size, memory.device, _write_on(mover, places[engine]), memory
        )

    def _probe(self, exporter: Exporter) -> Tensor:
        """A tensor where what is sent is: movers have host memory."""
        return torch.empty(0, device="cpu") if self._mover else exporter.probe


def _send_runs(
    writer: Writer, engine: int, runs: Sequence[ShardRun], fill: Fill, digests: Digests
) -> None:
    """Send one engine rank what this rank has for it."""
    for number, run in enumerate(runs):
        name, target = run.tensor.name, writer.place(run.tensor.name)
        fill(engine, number, target.tensor(run.tensor.shape, run.tensor.dtype))
        digests.add(f"{engine}/{name}", target.bytes(run.tensor.nbytes))
        writer.filled(name, target)
    writer.settle()


def _write_on(mover: Mover, place: LandingPlace) -> Callable[[Tensor], Writing]:
    """What writes one chunk after another to that place."""
    at = place.at

    def write(chunk: Tensor) -> Writing:
        nonlocal at
        first, at = at, at + chunk.numel()
        return mover.write(place.to, chunk, first)

    return write


def _encode_streams(lengths: Sequence[Sequence[int]]) -> list[bytes]:
    """The layout of each engine rank, where each trainer sends a stream of so many bytes to each:
    the names are those of `read_streams`.
    """
    lists = []
    for of_engine in zip(*lengths, strict=True):
        lists.append(ShardList(len(lengths)))
        for sender, length in enumerate(of_engine):
            if length:
                name, whole = _form_stream(sender, length)
                lists[-1].add(sender, name, torch.uint8, (1, length), (Move(whole, whole),))
    return [each.encode() for each in lists]


def _list_streams(sender: int, lengths: Sequence[int]) -> list[list[ShardRun]]:
    """The stream that a trainer sends to each engine rank, of so many bytes, as its only run."""
    runs: list[list[ShardRun]] = []
    for length in lengths:
        name, whole = _form_stream(sender, length)
        run = _run(sender, 0, name, ((1, length), torch.uint8), (whole,))
        runs.append([run] if length else [])
    return runs


def _form_stream(sender: int, length: int) -> tuple[str, Region]:
    """The name of a trainer's stream of so many bytes, and all of these."""
    return f"0.{sender}.0", Region((length,), (1,), 0)


def _run(sender: int, at: int, name: str, form: Form, regions: tuple[Region, ...]) -> ShardRun:
    elements = sum(region.elements for region in regions)
    return ShardRun(RefitTensor(f"{sender}/{at}", (elements,), form[1]), name, regions)


def _kind(
    dtype: str, shape: list[int], regions: list[tuple[list[int], list[int], int]]
) -> tuple[Form, tuple[Region, ...]]:
    """A kind of run, as it is read: the form of the tensor, and where the run belongs in it."""
    found = (
        Region(tuple(map(int, size)), tuple(map(int, stride)), int(offset))
        for size, stride, offset in regions
    )
    return (tuple(map(int, shape)), dtype_named(dtype)), tuple(found)
