"""The handshake between trainer and engines of a group during a refit, over the control store.

Each refit has one handshake, with a number <n>. The keys:

    call                 id of the trainer's run, number of the last handshake, and of the last over
    layout/<digest>      the tensors of all senders; written when they change
    <n>/offer            which layout of which model, in chunks of how many bytes
    <n>/ready/<e>        engine e is ready, and which groups it is still in, or where a mover writes
    <n>/at/<e>           which weights engine e has staged, where the offer is only a question
    <n>/go/<s>           sender s: which group it sends in, and to which engine processes
    <n>/sent/<s>         sender s: its manifest
    <n>/checked/<e>      of shards: all has arrived at engine e as it was sent
    <n>/load             of shards: engine 0 has seen that of all, and it is not off; all load
    <n>/accepted/<e>     engine e has accepted everything
    <n>/off              why it has failed: from the first that gives up, refuses, or is lost

No wait in a handshake goes on once it is off. Who takes part in one, and has not come to its end,
lets the store set that note when its connection breaks: the others hear at once of one that dies.

Each sender has its own group with all engines. In a single group, every sender would have to
receive what the others send, and a slow stage would hold up the rest. With one each, senders go at
their own pace, and engines take a chunk of each in turn. A group is reused until a handshake fails
in it or an engine process is replaced; then a new group is named after the handshake's number.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import xxhash

from megatron_policy.coordination.control_store import ControlStore
from megatron_policy.coordination.process_group import BoundedProcessGroup
from megatron_policy.errors import RefitError
from megatron_policy.refit.manifest import ServedModel, StagedVersion, read_version
from megatron_policy.refit.transports.collective.stream import StreamLayout
from megatron_policy.refit.transports.movers.landing import LandingPlace
from megatron_policy.refit.transports.movers.mover import Mover
from megatron_policy.refit.transports.movers.named import find_mover

CALL = "call"
ACCEPTED = b""
OFF = "off"
"""The note of why a handshake has failed."""
LOST = "has left, or was ended: look into its log"
QUESTION = "question"
"""The field of an offer that is none."""
SHARDS = "shards"
"""The field that an offer has in place of a layout, if each engine has its own."""
MOVER = "mover"
"""The field that an offer of shards has if a mover writes them, in place of groups: its name."""

_MOMENT_S = 1.0
"""How long after a broken connection to look for a reason from the other side."""


def note_key(call: int, what: str, number: int | None = None) -> str:
    """The key of a message of that handshake."""
    return f"{call}/{what}" if number is None else f"{call}/{what}/{number}"


def layout_key(digest: str) -> str:
    """The key under which the layout with that digest is stored."""
    return f"layout/{digest}"


def shards_key(digest: str, engine: int) -> str:
    """The key under which an engine's own layout is stored, of the layouts with that digest."""
    return f"{layout_key(digest)}/{engine}"


def group_name(call: int, sender: int) -> str:
    """The name of the group that the sender made in that handshake."""
    return f"group/{call}/{sender}"


def encode(content: Any) -> bytes:
    """A message of plain values, encoded."""
    return json.dumps(content).encode()


def parse_note(what: str, content: bytes, **kinds: type) -> dict[str, Any]:
    """The values of a message, including those of `kinds` with their types; else RefitError."""
    try:
        values = json.loads(content)
    except (ValueError, RecursionError):
        values = None
    if isinstance(values, dict):
        if isinstance(values.get(QUESTION), str):  # it replaces the content
            return values
        if all(type(values.get(name)) is kind for name, kind in kinds.items()):
            return values
    raise RefitError(
        f"the note {what!r} of the refit group cannot be read: {content[:80]!a}. Use the same "
        "version of megatron-policy on both sides"
    )


@contextmanager
def raise_peer_failure(words: Callable[[], str]) -> Iterator[None]:
    """If the body fails on a broken connection, wait a moment for the reason of whoever has failed
    first, and raise RefitError with that.
    """
    try:
        yield
    except RefitError as error:
        deadline = time.monotonic() + _MOMENT_S
        while not (reason := words()):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        raise RefitError(reason) from error


def find_failure(store: ControlStore, call: int) -> str:
    """Why that handshake has failed; empty if it has not, or if the store is lost."""
    content = store.find(note_key(call, OFF)) if store.connected else None
    return (content or b"").decode(errors="replace")


def call_off(store: ControlStore, call: int, why: str) -> None:
    """Say why a handshake has failed, unless that was said, if the store is not lost."""
    if store.connected:
        off = note_key(call, OFF)
        with suppress(RefitError):  # the others hear of the connection
            store.put(off, why.encode(), unless=off)
            store.put_at_end(off, b"")


class Sender:
    """A sender's side of its group: the handshakes, and the process group in which it sends."""

    def __init__(self, store: ControlStore, sender: int, engines: int, timeout_s: float) -> None:
        """Engines are waited for at most `timeout_s` seconds."""
        self.sender, self._number, self._oldest = sender, 0, 0
        self._store, self._engines, self._timeout_s = store, engines, timeout_s
        self._session = uuid.uuid4().hex
        self._layout, self._over = "", 0
        self._channel: BoundedProcessGroup | None = None
        self._made_in = self._broadcasts = 0
        self._mover: Mover | None = None
        self._reached: tuple[str, list[bytes]] = "", []

    @property
    def engines(self) -> int:
        """Number of engine processes."""
        return self._engines

    @property
    def broadcasts(self) -> int:
        """Number of broadcasts that it has sent."""
        return self._broadcasts + (self._channel.calls if self._channel else 0)

    def begin(self) -> None:
        """Begin a new handshake; all senders number them alike, as refits are collective."""
        self._number += 1
        self._leave_word(self._number)

    def offer(self, layout: StreamLayout, bucket_bytes: int, model: ServedModel) -> None:
        """Publish the offer to the engines; only sender 0 does."""
        content = layout.encode()
        digest, senders = xxhash.xxh3_64_hexdigest(content), len(layout.streams)
        if digest != self._layout:
            self._store.drop([layout_key(self._layout)])
            self._store.put(layout_key(digest), content)
            self._layout = digest
        sizes = {"senders": senders, "bucket_bytes": bucket_bytes}
        self._put_offer({"layout": digest, **sizes, "model": model.plain()})

    def offer_shards(
        self,
        layouts: Sequence[bytes],
        senders: int,
        bucket_bytes: int,
        model: ServedModel,
        mover: str,
    ) -> None:
        """Publish the offer of other tensors for each engine, as its layout says, which the mover
        of that name writes, or groups send; only sender 0 does.
        """
        digest = xxhash.xxh3_64_hexdigest(b"".join(layouts))
        if digest != self._layout:
            before, self._layout = self._layout, ""
            self._store.drop([layout_key(before)])
            for engine, content in enumerate(layouts):
                self._store.put(shards_key(digest, engine), content)
            self._layout = digest
        sizes = {"senders": senders, "bucket_bytes": bucket_bytes}
        self._put_offer({SHARDS: self._layout, MOVER: mover, **sizes, "model": model.plain()})

    def ask(self) -> list[StagedVersion]:
        """Ask the engines, in a handshake of its own, which weights they have staged; sender 0
        does. RefitError if one does not answer in time.
        """
        if self.sender > 0:
            self._leave_word(self._number + 1)
            return []
        self._put_offer({QUESTION: "at"})
        missing = "did not say within {:g} s which weights it has: is it running, and receiving?"
        try:
            answers = [
                parse_note("at", content, at=list) for content in self._from_engines("at", missing)
            ]
        finally:
            self._end()  # an engine that comes now waits for the next one
        self._drop_earlier()
        return [read_version(*answer["at"]) for answer in answers]

    def _put_offer(self, offer: dict[str, Any]) -> None:
        self._announce()  # first: an engine waiting for the offer then finds it announced
        self._put("offer", None, encode(offer))

    def meet(self) -> BoundedProcessGroup:
        """The group with all engines, once they are ready; the last one if all are still in it.
        RefitError if one is not ready in time, or refuses.
        """
        answers = self._await_ready(groups=dict)
        held = {answer["groups"].get(str(self.sender)) for answer in answers}
        if self._channel is None or held != {self._made_in}:
            self._leave(broken=True)
            self._store.drop([group_name(self._made_in, self.sender)])  # where it has met
            self._made_in = self._number
        self._go_on(answers)
        if self._channel is None:
            name, size = group_name(self._made_in, self.sender), self._engines + 1
            limit_s, off = self._timeout_s, self._key(OFF)
            with raise_peer_failure(self.find_failure):
                self._channel = self._store.process_group(name, 0, size, limit_s, off)
            self._channel.watch = self.check_failure
        return self._channel

    def meet_mover(self, name: str, nbytes: int) -> tuple[Mover, list[LandingPlace]]:
        """A mover of that name with so many bytes, and where it is to write at each engine, once
        they are ready; the last one if they have the same memory. RefitError as of `meet`.
        """
        answers = self._await_ready(landing=dict)
        places = [LandingPlace.from_words(answer["landing"], self.sender) for answer in answers]
        reached = name, [place.to for place in places]
        if self._mover is None or self._reached != reached or self._mover.memory.numel() < nbytes:
            self._leave(broken=True)
            self._mover = find_mover(name)(nbytes, self._timeout_s, self.check_failure)
            self._reached = reached
        self._go_on(answers)
        return self._mover, places

    def _await_ready(self, **kinds: type) -> list[dict[str, Any]]:
        """What each engine says, once all are ready."""
        missing = "did not get ready within {:g} s: is it running, and receiving?"
        return [
            parse_note("ready", content, process=str, **kinds)
            for content in self._from_engines("ready", missing)
        ]

    def _go_on(self, answers: Sequence[Mapping[str, Any]]) -> None:
        """Tell the engines that it goes on, and in which group if it is in one."""
        processes = [answer["process"] for answer in answers]
        self._put("go", self.sender, encode({"group": self._made_in, "to": processes}))

    def finish(self, manifest: bytes) -> None:
        """Publish the manifest, and wait until all engines accept; RefitError if one does not."""
        self._put("sent", self.sender, manifest)
        missing = "did not say within {:g} s that it accepts the weights"
        for _ in self._from_engines("accepted", missing):
            pass
        self._leave_word(self._number + 1)
        self._end()
        if self.sender == 0:
            self._drop_earlier()

    def give_up(self, why: str) -> None:
        """Tell the engines that this refit has failed, if that is still possible, and leave the
        process group.
        """
        try:
            if self._store.connected:
                self._end()
            call_off(self._store, self._number, f"the trainer gave up: {why}")
        finally:
            self._leave(broken=True)

    def close(self) -> None:
        """Leave for good."""
        self._leave()
        self._store.close()

    def check_failure(self) -> None:
        """RefitError if this handshake has failed, or if the store is lost."""
        if words := self.find_failure():
            raise RefitError(words)

    def find_failure(self) -> str:
        """Why this handshake has failed; empty if it has not."""
        return find_failure(self._store, self._number)

    def _leave(self, broken: bool = False) -> None:
        """Leave the process group and the mover's memory; the next refit makes new ones."""
        mover, self._mover = self._mover, None
        if mover is not None:
            mover.close()
        channel, self._channel = self._channel, None
        if channel is not None:
            self._broadcasts += channel.calls
            channel.close(broken)

    def _from_engines(self, what: str, missing: str) -> Iterator[bytes]:
        """Yield that message of each engine as soon as it arrives."""
        deadline = time.monotonic() + self._timeout_s
        for engine in range(self._engines):
            left = max(0.0, deadline - time.monotonic())
            words = f"engine {engine} {missing.format(self._timeout_s)}"
            yield self._store.get(self._key(what, engine), left, words, self._key(OFF))

    def _leave_word(self, number: int) -> None:
        """If this process is ended, let the others hear of it in that handshake."""
        note = f"sender {self.sender} {LOST}"
        self._store.put_at_end(note_key(number, OFF), note.encode())

    def _drop_earlier(self) -> None:
        """Drop the notes of the handshakes before this one, now that every engine has come to it:
        one may have been waiting in another that has failed, to which nobody else came.
        """
        self._store.drop([str(number) for number in range(self._oldest, self._number)])
        self._oldest = self._number

    def _end(self) -> None:
        self._over = self._number
        if self.sender == 0:
            self._announce()

    def _announce(self) -> None:
        now = {"session": self._session, "number": self._number, "over": self._over}
        self._store.put(CALL, encode(now))

    def _put(self, what: str, number: int | None, content: bytes) -> None:
        self._store.put(self._key(what, number), content)

    def _key(self, what: str, number: int | None = None) -> str:
        return note_key(self._number, what, number)
