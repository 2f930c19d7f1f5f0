"""A key-value store in one process, and the requests that it serves."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass
from typing import Protocol

from megatron_policy.errors import RefitError

PUT, GET, WAIT, DROP, ADD, COUNT = "put", "get", "wait", "drop", "add", "count"
_KINDS = frozenset({PUT, GET, WAIT, DROP, ADD, COUNT})
_LONGEST_S = 1e6


@dataclass(frozen=True)
class Request:
    """One of these requests, of `keys`:

    put     set the value of the first to `body`
    get     the value of the first, once it exists
    wait    until all exist
    drop    delete all of them
    add     `number` to the first, whose value is a number in digits; 0 if it does not exist
    count   the number of all keys

    `get` and `wait` take `timeout_s` seconds at most.
    """

    do: str
    keys: tuple[str, ...] = ()
    timeout_s: float = 0.0
    number: int = 0
    body: bytes = b""

    def header(self) -> bytes:
        """All but the body, as JSON."""
        said = {"do": self.do, "keys": self.keys, "timeout_s": self.timeout_s}
        return json.dumps({**said, "number": self.number}).encode()

    @classmethod
    def decoded(cls, header: bytes, body: bytes) -> Request:
        """The inverse of `header`; RefitError for anything else."""
        match _plain(header):
            case {
                "do": str(do),
                "keys": list(keys),
                "timeout_s": int() | float() as timeout_s,
                "number": int(number),
            } if do in _KINDS and all(isinstance(key, str) for key in keys):
                if 0 <= timeout_s <= _LONGEST_S and (keys or do in (WAIT, DROP, COUNT)):
                    return cls(do, tuple(keys), float(timeout_s), number, body)
        raise RefitError(f"the refit group received an unrecognised request: {_shown(header)}")


@dataclass(frozen=True)
class Reply:
    """Whether all keys existed (of `drop`: whether any did), a sum or a count, a value; or in
    `error` why the request was not understood.
    """

    found: bool = True
    number: int = 0
    body: bytes = b""
    error: str = ""

    def header(self) -> bytes:
        """All but the body, as JSON."""
        said = {"found": self.found, "number": self.number, "error": self.error}
        return json.dumps(said).encode()

    @classmethod
    def decoded(cls, header: bytes, body: bytes) -> Reply:
        """The inverse of `header`; RefitError for anything else, and for an error in it."""
        match _plain(header):
            case {"found": bool(found), "number": int(number), "error": str(error)}:
                if error:
                    raise RefitError(error)
                return cls(found, number, body)
        raise RefitError(f"the refit group sent an unrecognised answer: {_shown(header)}")


class KeyValue(Protocol):
    """Serves requests: in this process or through a connection."""

    def perform(self, request: Request) -> Reply:
        """The reply to a request; RefitError if it cannot be served."""
        ...


class KeyValueStore:
    """The store. Safe to use from any number of threads."""

    def __init__(self) -> None:
        self._contents: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def perform(self, request: Request) -> Reply:
        """See `Request`."""
        keys = request.keys
        with self._changed:
            if request.do in (GET, WAIT):
                return self._waited(request)
            if request.do == PUT:
                self._contents[keys[0]] = request.body
            elif request.do == ADD:
                return self._added(keys[0], request.number)
            elif request.do == DROP:
                dropped = [self._contents.pop(key, None) is not None for key in keys]
                return Reply(found=any(dropped))
            self._changed.notify_all()
            return Reply(number=len(self._contents))

    def _waited(self, request: Request) -> Reply:
        end = time.monotonic() + request.timeout_s
        while not all(key in self._contents for key in request.keys):
            left = end - time.monotonic()
            if left <= 0:
                return Reply(found=False)
            self._changed.wait(left)
        return Reply(body=self._contents[request.keys[0]] if request.do == GET else b"")

    def _added(self, key: str, number: int) -> Reply:
        before = self._contents.get(key, b"0")
        if not before.removeprefix(b"-").isdigit():
            raise RefitError(f"the note {key} of the refit group is not a number: {_shown(before)}")
        total = int(before) + number
        self._contents[key] = b"%d" % total
        self._changed.notify_all()
        return Reply(number=total)


def _plain(content: bytes) -> object:
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None


def _shown(content: bytes) -> str:
    return ascii(content[:80])
