"""The engine's side of a refit over a process group that it shares with the trainers. The protocol
is in `handshake`.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_policy import device
from megatron_policy.coordination.control_store import ControlStore
from megatron_policy.coordination.process_group import BoundedProcessGroup, PendingCollective
from megatron_policy.coordination.timeouts import DEFAULT_TIMEOUT_S, checked_timeout
from megatron_policy.errors import ConfigError, RefitError
from megatron_policy.refit.arguments import check_group
from megatron_policy.refit.manifest import (
    RefitInfo,
    RefitManifest,
    ServedModel,
)
from megatron_policy.refit.receive.assembler import ShardAssembler, WeightAssembler
from megatron_policy.refit.transports.collective.handshake import (
    ACCEPTED,
    CALL,
    LOST,
    MOVER,
    OFF,
    QUESTION,
    SHARDS,
    call_off,
    encode,
    find_failure,
    group_name,
    layout_key,
    note_key,
    parse_note,
    raise_peer_failure,
    shards_key,
)
from megatron_policy.refit.transports.collective.shards import (
    ShardLayout,
    ShardRun,
    order_senders,
)
from megatron_policy.refit.transports.collective.stream import (
    ChunkReader,
    Reader,
    Stream,
    StreamLayout,
    WholeReader,
    make_views,
)
from megatron_policy.refit.transports.movers.landing import Landing


def join_collective(
    ip: str,
    port: int,
    rank: int,
    world_size: int,
    train_world_size: int | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    *,
    secret: str | None = None,
) -> CollectiveGroup:
    """An engine's membership in a group with trainers; it connects when it first receives.

    Training rank 0 hosts the group at (ip, port). Engine ranks follow those of the trainers:
    1 .. world_size - 1 without `train_world_size`, as only training rank 0 is in such a group;
    train_world_size .. world_size - 1 with it. `secret` is the trainer's (`Collective.secret`, the
    driver's `get_refit_secret()`); it refuses processes with another one. ConfigError for a rank
    outside that range, and without a secret.
    """
    checked_timeout(timeout_s)
    sizes = {"world_size": world_size, "train_world_size": train_world_size}
    check_group(ip, port, rank=rank, **sizes)
    trainers = 1 if train_world_size is None else train_world_size
    if not trainers <= rank < world_size:
        raise ConfigError(
            f"rank {rank} is not an engine's: those are {trainers} .. {world_size - 1} in a group "
            f"of {world_size} with {trainers} training rank(s)"
        )
    if secret is None:
        raise ConfigError(
            f"the refit group at {ip}:{port} accepts only engines with the trainer's secret. Give "
            "secret=: `Collective.secret` of the trainer, or the driver's `get_refit_secret()`"
        )
    store = ControlStore(ip, port, timeout_s, secret)
    return CollectiveGroup(store, rank - trainers, world_size - trainers, timeout_s)


@dataclass(frozen=True)
class _Call:
    """A refit that this engine takes part in."""

    number: int
    layout: StreamLayout
    bucket_bytes: int
    made_in: tuple[int, ...]
    """For each sender, the handshake in which its group was made."""
    shards: ShardLayout | None = None
    """What this engine receives, where each has its own tensors."""
    mover: str = ""
    """What writes these, in place of groups."""


class CollectiveGroup:
    """An engine's membership in a group with trainers, kept from refit to refit."""

    def __init__(self, store: ControlStore, engine: int, engines: int, timeout_s: float) -> None:
        """Engine number `engine` of `engines`; see `join_collective`."""
        self._store = store
        self._engine, self._engines, self._timeout_s = engine, engines, timeout_s
        # Distinguishes this process from a replacement started in its place.
        self._process = uuid.uuid4().hex
        self._session, self._last = "", 0
        self._layout: tuple[str, StreamLayout] = ("", StreamLayout(()))
        # By sender: the handshake that made the group, and the group.
        self._joined: dict[int, tuple[int, BoundedProcessGroup]] = {}
        self._landing = Landing()

    def receive(self, assembler: WeightAssembler, timeout_s: float | None = None) -> RefitManifest:
        """Receive one refit: the next that the trainer begins, or one that waits for this engine.

        Returns when the engine has loaded all weights. RefitError if the trainer does not begin,
        continue or finish within `timeout_s` seconds each, gives up, or sends weights that are
        refused; the trainer raises too, and the next refit starts afresh on both sides.
        """
        limit, call = timeout_s or self._timeout_s, None
        deadline = time.monotonic() + limit
        while call is None:
            number = self._wait_for_call(deadline, limit)
            try:
                call = self._answer(number, assembler, deadline, limit)
            except BaseException:
                self._landing.close()
                raise
        try:
            if not call.mover:
                self._join(call, limit)
            if call.shards is None:
                self._take(call, assembler)
                manifest = assembler.finish(self._manifest(call, limit))
            else:
                manifest = self._take_shards(call, call.shards, assembler, limit)
        except BaseException as error:
            words = str(error) or type(error).__name__
            call_off(self._store, call.number, f"engine {self._engine}: {words}")
            self._leave()
            raise
        self._store.put(note_key(call.number, "accepted", self._engine), ACCEPTED)
        with suppress(RefitError):  # a trainer that was waiting for this alone may have left
            self._store.put_at_end(note_key(call.number, OFF), b"")
        return manifest

    def close(self) -> None:
        """Leave; the remaining engines need another process in place of this one."""
        self._leave()
        self._store.close()

    def _wait_for_call(self, deadline: float, limit: float) -> int:
        """The number of an open handshake that this process has not answered yet."""
        missing = f"the trainer has not begun a refit within {limit:g} s"
        while True:
            content = self._store.get(CALL, _left(deadline), missing)
            now = parse_note(CALL, content, session=str, number=int, over=int)
            if now["session"] != self._session:  # another trainer, whose numbers start again
                self._leave()
                self._session, self._last = now["session"], 0
            if (number := now["number"]) > max(self._last, now["over"]):
                self._last = number
                return self._last
            number, left = max(number, self._last) + 1, _left(deadline)
            try:
                self._store.get(note_key(number, "offer"), left, missing, note_key(number, OFF))
            except RefitError:  # a trainer that was started in its place counts from 1
                self._last = number if find_failure(self._store, number) else self._last
                if self._store.connected or not _left(deadline):
                    raise

    def _answer(
        self, number: int, assembler: WeightAssembler, deadline: float, limit: float
    ) -> _Call | None:
        """Report this engine ready; None if the handshake began with another process in its
        place.
        """
        missing = f"the trainer has not continued its refit within {limit:g} s"
        off = note_key(number, OFF)
        content = self._store.get(note_key(number, "offer"), _left(deadline), missing, off)
        offer = parse_note("offer", content, senders=int, bucket_bytes=int, model=dict)
        if QUESTION in offer:
            self._store.put(
                note_key(number, "at", self._engine), encode({"at": [assembler.version]})
            )
            return None
        self._store.put_at_end(off, f"engine {self._engine} {LOST}".encode())
        layout, shards, mover = self._layout[1], None, str(offer.get(MOVER, ""))
        if SHARDS in offer:
            key = shards_key(offer[SHARDS], self._engine)
            shards = ShardLayout.decode(self._store.get(key, _left(deadline), missing, off))
            forms, senders = dict(shards.forms), len(shards.runs)
        else:
            if self._layout[0] != (digest := offer["layout"]):
                content = self._store.get(layout_key(digest), _left(deadline), missing, off)
                self._layout = digest, StreamLayout.decode(content)
            layout = self._layout[1]
            slots = (slot for stream in layout.streams for slot in stream.slots)
            forms, senders = {s.name: (s.shape, s.dtype) for s in slots}, len(layout.streams)
        if offer["senders"] != senders or offer["bucket_bytes"] < 1:
            raise RefitError(f"the trainer's offer contradicts itself: {offer}")
        groups = {str(sender): made_in for sender, (made_in, _) in self._joined.items()}
        answer: dict[str, Any] = {"process": self._process, "groups": groups}
        try:
            assembler.announce(RefitInfo(forms, _read_model(offer)))
            if shards is not None and mover:
                sizes = [_stream_of(runs).nbytes for runs in shards.runs]
                answer["landing"] = self._landing.prepare(mover, sizes, limit)
        except RefitError as error:
            call_off(self._store, number, f"engine {self._engine}: {error}")
            raise
        self._store.put(note_key(number, "ready", self._engine), encode(answer))
        keys = [note_key(number, "go", sender) for sender in range(offer["senders"])]
        found = (self._store.get(key, _left(deadline), missing, off) for key in keys)
        answers = [parse_note("go", content, group=int, to=list) for content in found]
        if any(self._process not in answer["to"] for answer in answers):
            self._store.put_at_end(off, b"")
            return None
        made_in = tuple(answer["group"] for answer in answers)
        return _Call(number, layout, offer["bucket_bytes"], made_in, shards, mover)

    def _join(self, call: _Call, limit: float) -> None:
        """Join the group of each sender."""
        for sender, made_in in enumerate(call.made_in):
            if sender in self._joined:
                before, channel = self._joined.pop(sender)
                if before == made_in:
                    self._joined[sender] = (before, channel)
                    continue
                channel.close(broken=True)
            name, size = group_name(made_in, sender), self._engines + 1
            off = note_key(call.number, OFF)
            with raise_peer_failure(lambda: find_failure(self._store, call.number)):
                channel = self._store.process_group(name, self._engine + 1, size, limit, off)
            channel.watch = self._check_failure
            self._joined[sender] = (made_in, channel)

    def _check_failure(self) -> None:
        """RefitError if the refit has failed, or if the store is lost."""
        if words := find_failure(self._store, self._last):
            raise RefitError(words)

    def _take(self, call: _Call, assembler: WeightAssembler) -> None:
        """Receive all chunks, one of each sender in turn, in the same order on all engines."""
        chunks = [list(stream.chunks(call.bucket_bytes)) for stream in call.layout.streams]
        where = device.current_device()
        readers = make_readers(call.layout.streams, call.bucket_bytes, where, assembler)
        pending: dict[int, PendingCollective] = {}

        def start(sender: int, number: int) -> None:
            if number < len(chunks[sender]):
                memory = readers[sender].memory_for(*chunks[sender][number])
                pending[sender] = self._joined[sender][1].broadcast(memory, 0)

        for sender in range(len(chunks)):
            start(sender, 0)
        turns = sorted((n, s) for s, of in enumerate(chunks) for n in range(len(of)))
        for number, sender in turns:
            with raise_peer_failure(lambda: find_failure(self._store, call.number)):
                pending[sender].wait()
            # If each chunk has its own memory, receive the next one while this one is read.
            if assembler.receives_in_place:
                start(sender, number + 1)
            assembler.take(readers[sender].complete(*chunks[sender][number]))
            if not assembler.receives_in_place:
                start(sender, number + 1)

    def _take_shards(
        self, call: _Call, shards: ShardLayout, assembler: WeightAssembler, limit: float
    ) -> RefitManifest:
        """Receive this engine's own elements, trainer after trainer, and let it load them."""
        where = torch.device("cpu") if call.mover else device.current_device()
        whole = ShardAssembler(shards, assembler, where, self._engine)
        for sender in order_senders(self._engine, self._engines, len(shards.runs)):
            runs = {run.tensor.name: run for run in shards.runs[sender]}
            stream = _stream_of(shards.runs[sender])
            if call.mover:
                self._wait_for_sender(call.number, sender, limit)
                arrived = make_views(stream, self._landing.part(sender, stream.nbytes))
                for name, flat in arrived.items():
                    whole.put(runs[name], flat)
                continue
            reader = ChunkReader(stream, call.bucket_bytes, where)
            for first, end in stream.chunks(call.bucket_bytes):
                memory = reader.memory_for(first, end)
                with raise_peer_failure(lambda: find_failure(self._store, call.number)):
                    self._joined[sender][1].receive(memory, 0).wait()
                for name, flat in reader.complete(first, end):
                    whole.put(runs[name], flat)
        sent = self._manifest(call, limit)
        whole.check(sent)
        # Ranks of one engine load all or none: it is called off, or they load.
        try:
            self._wait_for_engines(call.number, limit)
        except BaseException:
            whole.undo()
            raise
        return whole.finish(sent)

    def _wait_for_engines(self, number: int, limit: float) -> None:
        """Wait until all ranks of the engine have checked what they received, as this one has;
        RefitError if that is called off.
        """
        self._store.put(note_key(number, "checked", self._engine), ACCEPTED)
        deadline, off = time.monotonic() + limit, note_key(number, OFF)
        missing = f"engine {{}} has not said within {limit:g} s what arrived"
        for other in range(self._engines if self._engine == 0 else 0):
            key = note_key(number, "checked", other)
            self._store.get(key, _left(deadline), missing.format(other), off)
        load = note_key(number, "load")
        if self._engine == 0:
            self._store.put(load, ACCEPTED, unless=off)
        self._store.get(load, _left(deadline), missing.format(0), off)

    def _manifest(self, call: _Call, limit: float) -> RefitManifest:
        """The manifest of what all senders have sent."""
        senders = range(len(call.made_in))
        sent = (self._wait_for_sender(call.number, sender, limit) for sender in senders)
        parts = [RefitManifest.decode(content) for content in sent]
        kinds = {(part.step, part.algorithm) for part in parts}
        if len(kinds) > 1:
            raise RefitError(f"the trainer's pipeline stages sent different steps: {sorted(kinds)}")
        tensors = {name: sent for part in parts for name, sent in part.tensors.items()}
        return RefitManifest(parts[0].step, parts[0].algorithm, tensors, parts[0].model)

    def _wait_for_sender(self, number: int, sender: int, limit: float) -> bytes:
        """The manifest of a sender, which has sent everything."""
        missing = f"the trainer has not said within {limit:g} s what it has sent"
        off = note_key(number, OFF)
        return self._store.get(note_key(number, "sent", sender), limit, missing, off)

    def _leave(self) -> None:
        self._landing.close()
        while self._joined:
            self._joined.popitem()[1][1].close(broken=True)


def _stream_of(runs: Sequence[ShardRun]) -> Stream:
    return Stream.of([run.tensor for run in runs])


def _read_model(offer: Mapping[str, Any]) -> ServedModel:
    try:
        return ServedModel.from_plain(offer["model"])
    except ValueError as error:
        raise RefitError(f"the trainer's offer cannot be read: {error}") from error


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())


def make_readers(
    streams: Sequence[Stream], chunk_bytes: int, where: torch.device, assembler: WeightAssembler
) -> list[Reader]:
    """One reader for each stream. A staged assembler keeps the memory that chunks are received in,
    so nothing is copied; a later refit of the same streams reuses that memory.
    """
    if not assembler.receives_in_place:
        return [ChunkReader(stream, chunk_bytes, where) for stream in streams]
    readers: list[Reader] = []
    for stream in streams:
        memory = _kept_memory(stream, assembler.kept)
        if memory is None:
            memory = torch.empty(stream.nbytes, dtype=torch.uint8, device=where)
            assembler.kept.update(make_views(stream, memory))
        readers.append(WholeReader(stream, memory, assembler.kept))
    return readers


def _kept_memory(stream: Stream, kept: Mapping[str, Tensor]) -> Tensor | None:
    """The memory of which the kept tensors of this stream are views, if they are."""
    names = [slot.name for slot in stream.slots]
    if not names or any(name not in kept for name in names):
        return None
    storage = kept[names[0]].untyped_storage()
    memory = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    if memory.numel() != stream.nbytes:
        return None
    for name, view in make_views(stream, memory).items():
        had = kept[name]
        if (had.data_ptr(), had.shape, had.dtype) != (view.data_ptr(), view.shape, view.dtype):
            return None
    return memory
