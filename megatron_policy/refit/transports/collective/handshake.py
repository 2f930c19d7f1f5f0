"""What trainer and engines of a group say to each other during a refit, and where they say it.

Knows neither what the weights are nor how they travel. A call is one refit, numbered. Its notes:

    call                 the trainer's session, the last call's number, and the last that is over
    layout/<digest>      the tensors of all senders; written when they change
    <call>/offer         which layout, in chunks of how many bytes
    <call>/ready/<e>     engine e is there, and which groups it is still in; or refuses
    <call>/go/<s>        sender s: which group it sends in, and to which engine processes
    <call>/sent/<s>      sender s: its manifest; or why it gave up
    <call>/verdict/<e>   engine e has accepted everything; or why not

Each sender has a group of its own with all engines. In one group for all, every sender would have
to receive what the others send, and a slow stage would hold up the rest; so each sends at its own
pace, and engines take a chunk of each in turn. A group serves until a call fails in it, or until an
engine is another process; then the call's number names a new one.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import xxhash

from megatron_policy.coordination.control_store import ControlStore
from megatron_policy.errors import RefitError
from megatron_policy.refit.transports.collective.stream_layout import Layout

CALL = "call"
ACCEPTED = b""
OFF, REFUSED = "failed", "refused"
"""In a note instead of what it should say: why there is nothing to say."""

_SENT, _GAVE_UP = b"+", b"-"
_MOMENT_S = 1.0
"""How long after a broken connection to look for the other side's own words."""


def note(call: int, what: str, number: int | None = None) -> str:
    """The key of a note of that call."""
    return f"{call}/{what}" if number is None else f"{call}/{what}/{number}"


def layout_note(digest: str) -> str:
    """The key of the layout with that digest."""
    return f"layout/{digest}"


def group_name(call: int, sender: int) -> str:
    """The name of the group that the sender made in that call."""
    return f"group/{call}/{sender}"


def said(content: Any) -> bytes:
    """A note of plain values."""
    return json.dumps(content).encode()


def understood(what: str, content: bytes, **kinds: type) -> dict[str, Any]:
    """The values of a note, at least those of `kinds`, each of its type; RefitError otherwise."""
    try:
        values = json.loads(content)
    except (ValueError, RecursionError):
        values = None
    if isinstance(values, dict):
        for other in (OFF, REFUSED):  # instead of all that
            if isinstance(values.get(other), str):
                return values
        if all(type(values.get(name)) is kind for name, kind in kinds.items()):
            return values
    raise RefitError(
        f"the note {what!r} of the refit group cannot be read: {content[:80]!a}. Use the same "
        "version of megatron-policy on both sides"
    )


@contextmanager
def heard(words: Callable[[], list[str]]) -> Iterator[None]:
    """Where the body finds a connection broken, and the other side has said why or says so within a
    moment, raise RefitError with those words.
    """
    try:
        yield
    except RefitError as error:
        deadline = time.monotonic() + _MOMENT_S
        while not (reasons := words()):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        raise RefitError("; ".join(reasons)) from error


def sent_manifest(content: bytes) -> bytes:
    """The manifest in a `sent` note; RefitError where the sender gave up."""
    if (why := gave_up(content)) is not None:
        raise RefitError(why)
    return content[len(_SENT) :]


def gave_up(content: bytes | None) -> str | None:
    """What a `sent` note says instead, where the sender gave up."""
    if content is None or content.startswith(_SENT):
        return None
    return f"the trainer gave up: {content.removeprefix(_GAVE_UP).decode(errors='replace')}"


class SenderHandshake:
    """A sender's part in the calls of its group."""

    def __init__(
        self, board: ControlStore, sender: int, engines: int, session: str, patience_s: float
    ):
        """No engine is waited for longer than `patience_s` seconds."""
        self.number = 0
        self._board, self._sender, self._engines = board, sender, engines
        self._session, self._patience_s = session, patience_s
        self._layout, self._over, self._said_go = "", 0, False

    def begin(self) -> None:
        """A new call; all senders count them alike, as refits are collective."""
        self.number += 1
        self._said_go = False

    def offer(self, layout: Layout, bucket_bytes: int) -> None:
        """Invite the engines; for sender 0."""
        content = layout.encoded()
        digest, senders = xxhash.xxh3_64_hexdigest(content), len(layout.streams)
        if digest != self._layout:
            self._board.drop([layout_note(self._layout)])
            self._board.put(layout_note(digest), content)
            self._layout = digest
        self._drop_notes(senders)
        offer = {"layout": digest, "senders": senders, "bucket_bytes": bucket_bytes}
        self._announce()  # first: who was waiting for the offer then finds its call announced
        self._put("offer", None, said(offer))

    def ready(self) -> list[dict[str, Any]]:
        """What each engine says; RefitError when one is not there in time, or refuses."""
        missing = "is not there within {:g} s: does it run, and receive?"
        answers = [
            understood("ready", content, process=str, groups=dict)
            for content in self._from_engines("ready", missing)
        ]
        for engine, answer in enumerate(answers):
            if REFUSED in answer:
                raise RefitError(f"engine {engine}: {answer[REFUSED]}")
        return answers

    def go(self, group: int, processes: Sequence[str]) -> None:
        """Tell these engine processes to receive in that group."""
        self._said_go = True
        self._put("go", self._sender, said({"group": group, "to": list(processes)}))

    def finish(self, manifest: bytes) -> None:
        """Say what was sent, and wait until all engines accept it; RefitError when one does not."""
        self._put("sent", self._sender, _SENT + manifest)
        missing = "has not said within {:g} s that it accepts the weights"
        for engine, verdict in enumerate(self._from_engines("verdict", missing)):
            if verdict != ACCEPTED:
                raise RefitError(f"engine {engine}: {verdict.decode(errors='replace')}")
        self._end()

    def give_up(self, why: str) -> None:
        """Tell the engines, as far as that is possible."""
        if not self._board.connected:
            return
        self._end()
        if not self._said_go:
            self._put("go", self._sender, said({OFF: why}))
        self._put("sent", self._sender, _GAVE_UP + why.encode())

    def objections(self) -> list[str]:
        """What engines have against it by now."""
        if not self._board.connected:
            return []
        found = [self._board.find(self._key("verdict", e)) for e in range(self._engines)]
        return [
            f"engine {e}: {words.decode(errors='replace')}"
            for e, words in enumerate(found)
            if words
        ]

    def _from_engines(self, what: str, missing: str) -> Iterator[bytes]:
        """That note of each engine, as soon as it is there."""
        deadline = time.monotonic() + self._patience_s
        for engine in range(self._engines):
            left = max(0.0, deadline - time.monotonic())
            words = f"engine {engine} {missing.format(self._patience_s)}"
            yield self._board.get(self._key(what, engine), left, words)

    def _end(self) -> None:
        self._over = self.number
        if self._sender == 0:
            self._announce()

    def _announce(self) -> None:
        now = {"session": self._session, "number": self.number, "over": self._over}
        self._board.put(CALL, said(now))

    def _drop_notes(self, senders: int) -> None:
        """Those of the call before: only when the next begins has everybody read them."""
        before = self.number - 1
        keys = [note(before, "offer")]
        keys += [note(before, what, s) for what in ("go", "sent") for s in range(senders)]
        keys += [note(before, w, e) for w in ("ready", "verdict") for e in range(self._engines)]
        self._board.drop(keys)

    def _put(self, what: str, number: int | None, content: bytes) -> None:
        self._board.put(self._key(what, number), content)

    def _key(self, what: str, number: int | None = None) -> str:
        return note(self.number, what, number)
