"""The handshake between trainer and engines of a group during a refit, over the control store.

Each refit has one handshake, with a number <n>. The keys:

    call                 id of the trainer's run, number of the last handshake, and of the last over
    layout/<digest>      the tensors of all senders; written when they change
    <n>/offer            which layout of which model, in chunks of how many bytes
    <n>/ready/<e>        engine e is ready, and which groups it is still in; or it refuses
    <n>/go/<s>           sender s: which group it sends in, and to which engine processes
    <n>/sent/<s>         sender s: its manifest; or why it gave up
    <n>/verdict/<e>      engine e has accepted everything; or why not

Each sender has its own group with all engines. In a single group, every sender would have to
receive what the others send, and a slow stage would hold up the rest. With one each, senders go at
their own pace, and engines take a chunk of each in turn. A group is reused until a handshake fails
in it or an engine process is replaced; then a new group is named after the handshake's number.
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
from megatron_policy.refit.manifest import ServedModel
from megatron_policy.refit.transports.collective.stream import StreamLayout

CALL = "call"
ACCEPTED = b""
OFF, REFUSED = "failed", "refused"
"""Fields that replace a message's content: why there is none."""

_SENT, _GAVE_UP = b"+", b"-"
_MOMENT_S = 1.0
"""How long after a broken connection to look for a reason from the other side."""


def note(call: int, what: str, number: int | None = None) -> str:
    """The key of a message of that handshake."""
    return f"{call}/{what}" if number is None else f"{call}/{what}/{number}"


def layout_note(digest: str) -> str:
    """The key under which the layout with that digest is stored."""
    return f"layout/{digest}"


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
        for other in (OFF, REFUSED):  # these replace the content
            if isinstance(values.get(other), str):
                return values
        if all(type(values.get(name)) is kind for name, kind in kinds.items()):
            return values
    raise RefitError(
        f"the note {what!r} of the refit group cannot be read: {content[:80]!a}. Use the same "
        "version of megatron-policy on both sides"
    )


@contextmanager
def raise_peer_failure(words: Callable[[], list[str]]) -> Iterator[None]:
    """If the body fails on a broken connection, wait a moment for the other side's reason, and
    raise RefitError with that reason.
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
    """The manifest in a `sent` message; RefitError if the sender gave up."""
    if (why := read_abort_reason(content)) is not None:
        raise RefitError(why)
    return content[len(_SENT) :]


def read_abort_reason(content: bytes | None) -> str | None:
    """The reason in a `sent` message if the sender gave up, else None."""
    if content is None or content.startswith(_SENT):
        return None
    return f"the trainer gave up: {content.removeprefix(_GAVE_UP).decode(errors='replace')}"


class SenderHandshake:
    """A sender's side of the handshakes of its group."""

    def __init__(
        self, store: ControlStore, sender: int, engines: int, session: str, timeout_s: float
    ):
        """Engines are waited for at most `timeout_s` seconds."""
        self.number = 0
        self._store, self._sender, self._engines = store, sender, engines
        self._session, self._timeout_s = session, timeout_s
        self._layout, self._over, self._sent_go = "", 0, False

    def begin(self) -> None:
        """Begin a new handshake; all senders number them alike, as refits are collective."""
        self.number += 1
        self._sent_go = False

    def offer(self, layout: StreamLayout, bucket_bytes: int, model: ServedModel) -> None:
        """Publish the offer to the engines; only sender 0 does."""
        content = layout.encoded()
        digest, senders = xxhash.xxh3_64_hexdigest(content), len(layout.streams)
        if digest != self._layout:
            self._store.drop([layout_note(self._layout)])
            self._store.put(layout_note(digest), content)
            self._layout = digest
        self._drop_notes(senders)
        sizes = {"senders": senders, "bucket_bytes": bucket_bytes}
        offer = {"layout": digest, **sizes, "model": model.plain()}
        self._announce()  # first: an engine waiting for the offer then finds it announced
        self._put("offer", None, encode(offer))

    def ready(self) -> list[dict[str, Any]]:
        """Each engine's `ready` message; RefitError if one is not ready in time, or refuses."""
        missing = "did not get ready within {:g} s: is it running, and receiving?"
        answers = [
            parse_note("ready", content, process=str, groups=dict)
            for content in self._from_engines("ready", missing)
        ]
        for engine, answer in enumerate(answers):
            if REFUSED in answer:
                raise RefitError(f"engine {engine}: {answer[REFUSED]}")
        return answers

    def go(self, group: int, processes: Sequence[str]) -> None:
        """Tell these engine processes to receive in that group."""
        self._sent_go = True
        self._put("go", self._sender, encode({"group": group, "to": list(processes)}))

    def finish(self, manifest: bytes) -> None:
        """Publish the manifest, and wait until all engines accept; RefitError if one does not."""
        self._put("sent", self._sender, _SENT + manifest)
        missing = "did not say within {:g} s that it accepts the weights"
        for engine, verdict in enumerate(self._from_engines("verdict", missing)):
            if verdict != ACCEPTED:
                raise RefitError(f"engine {engine}: {verdict.decode(errors='replace')}")
        self._end()

    def give_up(self, why: str) -> None:
        """Tell the engines, if that is still possible."""
        if not self._store.connected:
            return
        self._end()
        if not self._sent_go:
            self._put("go", self._sender, encode({OFF: why}))
        self._put("sent", self._sender, _GAVE_UP + why.encode())

    def objections(self) -> list[str]:
        """The engines' refusals so far."""
        if not self._store.connected:
            return []
        found = [self._store.find(self._key("verdict", e)) for e in range(self._engines)]
        return [
            f"engine {e}: {words.decode(errors='replace')}"
            for e, words in enumerate(found)
            if words
        ]

    def _from_engines(self, what: str, missing: str) -> Iterator[bytes]:
        """Yield that message of each engine as soon as it arrives."""
        deadline = time.monotonic() + self._timeout_s
        for engine in range(self._engines):
            left = max(0.0, deadline - time.monotonic())
            words = f"engine {engine} {missing.format(self._timeout_s)}"
            yield self._store.get(self._key(what, engine), left, words)

    def _end(self) -> None:
        self._over = self.number
        if self._sender == 0:
            self._announce()

    def _announce(self) -> None:
        now = {"session": self._session, "number": self.number, "over": self._over}
        self._store.put(CALL, encode(now))

    def _drop_notes(self, senders: int) -> None:
        """Delete the previous handshake's keys: once the next begins, everyone has read them."""
        before = self.number - 1
        keys = [note(before, "offer")]
        keys += [note(before, what, s) for what in ("go", "sent") for s in range(senders)]
        keys += [note(before, w, e) for w in ("ready", "verdict") for e in range(self._engines)]
        self._store.drop(keys)

    def _put(self, what: str, number: int | None, content: bytes) -> None:
        self._store.put(self._key(what, number), content)

    def _key(self, what: str, number: int | None = None) -> str:
        return note(self.number, what, number)
