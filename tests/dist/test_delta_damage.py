"""Messages and files of changes that are damaged, lost, repeated or come in another order between a
trainer and an engine in another process: nothing wrong is accepted, and the next refit works.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_policy.errors import RefitError
from megatron_policy.refit.buffers import BufferSlice
from megatron_policy.refit.transports.delta_stream import DeltaStream
from megatron_policy.refit.transports.ipc.protocol import ACK
from megatron_policy.refit.transports.ipc.transport import IpcStream, Line, listen
from tests.dist.test_delta_deaths import paired, release
from tests.dist.test_detached_refit import SIZES
from tests.dist.test_trainer_deaths import _here

DAMAGES = 200
MOST_MESSAGES = 6
BUFFER = 4 * 1024  # of which changes fill several
FILE_DAMAGES, FILE_KINDS = 50, ("flip", "cut", "remove", "swap")
REFITS = 2  # until all weights are written again
KINDS = ("flip", "cut", "drop", "repeat", "swap", "flip what is sent", "cut what is sent")


class Meddler:
    """Does something to one message of a refit, counted over all lines to an engine."""

    def __init__(self, kind: str, number: int, seed: str) -> None:
        self.kind, self.left, self.draw = kind, number, random.Random(seed)
        self.done = ""
        """What it has done."""

    def connect(self, address: str, timeout_s: float) -> Line:
        return MeddlingLine(listen(address, timeout_s), self)

    def wants(self) -> bool:
        """Whether this message is the one."""
        self.left -= 1
        return self.left == 0

    def damage(self, content: bytes) -> bytes:
        """Other bytes."""
        at = self.draw.randrange(len(content))
        if self.kind == "cut":
            return content[:at]
        return content[:at] + bytes([content[at] ^ 1 << self.draw.randrange(8)]) + content[at + 1 :]


class MeddlingLine:
    """A line to an engine on which a meddler sits."""

    def __init__(self, line: Line, meddler: Meddler) -> None:
        self._line, self._meddler = line, meddler
        self._held: Callable[[], bytes] | None = None
        self._replies: list[bytes] = []
        self._lost = False

    def send(self, question: Callable[[], bytes]) -> None:
        kind, held = self._meddler.kind, self._held
        if held is not None:  # the one before comes after this one
            self._held = None
            self._line.send(question)
            if (reply := self._line.receive()) != ACK:
                self._replies.append(reply)
                return
            question = held
        elif kind in KINDS[:5] and self._meddler.wants():
            self._meddler.done = kind
            content = question()
            if kind == "swap" and b'"complete"' not in content:
                self._held = question
                self._replies.append(ACK)
                return
            if kind in ("drop", "swap"):
                self._lost = True
                return
            if kind == "repeat":
                self._line.send(question)
                self._replies.append(self._line.receive())
                if self._replies.pop() != ACK:
                    raise RefitError("the first of two is refused")
            else:
                damaged = self._meddler.damage(content)
                self._line.send(lambda: damaged)
                return
        self._line.send(question)

    def receive(self) -> bytes:
        if self._lost:
            raise RefitError("no reply has come in time")
        return self._replies.pop() if self._replies else self._line.receive()

    def close(self) -> None:
        self._line.close()


class MeddlingStream(IpcStream):
    """A stream whose memory a meddler changes before the engine reads it."""

    def __init__(self, address: str, meddler: Meddler) -> None:
        super().__init__(address, BUFFER, connect=meddler.connect)
        self._meddler = meddler

    def open(self, exporter: Any, plan: Any) -> Any:
        session: Any = super().open(exporter, plan)
        if session is not None and self._meddler.kind in KINDS[5:]:
            filled = session.filled

            def disturbed(tensor: Any, target: BufferSlice) -> None:
                if self._meddler.wants():
                    self._meddler.done = self._meddler.kind
                    at = self._meddler.draw.randrange(tensor.nbytes)
                    own = target.bytes(tensor.nbytes)[at:]
                    if self._meddler.kind.startswith("flip"):
                        own = own[:1]
                    own ^= 1 << self._meddler.draw.randrange(8)
                filled(tensor, target)

            session.filled = disturbed
        return session


def refit_despite(way: str, at: str, kind: str, number: int, seed: str) -> tuple[str, str]:
    """What was done to a message, and what was said of the refit if it failed."""
    meddler = Meddler(kind, number, seed)
    try:
        _here["policy"].refit(DeltaStream(MeddlingStream(at, meddler)))
    except RefitError as error:
        return meddler.done, str(error)
    return meddler.done, ""


@pytest.mark.nightly
def test_damaged_and_reordered_messages_are_refused_and_the_next_refit_works(
    checkpoint: Any, tmp_path_factory: Any
) -> None:
    draw, path = random.Random(0), checkpoint("qwen2", **SIZES)
    refused = dict.fromkeys(KINDS, 0)
    with paired("stream", tmp_path_factory.mktemp("s"), path) as pair:
        pair.begin()
        pair.end()
        number = 0
        while number < DAMAGES:
            kind, of = KINDS[number % len(KINDS)], 1 + draw.randrange(MOST_MESSAGES)
            pair.begin(refit_despite, kind, of, f"{number}")
            newest = pair.newest
            (done, said), (_, other) = pair.results()
            assert bool(said) == bool(other)
            if not said:  # it was done to nothing, or did no harm
                assert pair.check_engine() == newest
            refused[kind] += bool(done and said)
            number += bool(done)
            pair.begin()
            pair.end()
    assert all(refused.values()), refused


def damage_file(root: Path, kind: str, seed: str) -> None:
    """Do that to a file of a chain: a swap is with one of its kind, of another version or rank."""
    meddler = Meddler(kind, 0, seed)
    files = sorted(path for path in root.rglob("*") if path.is_file() and path.stat().st_size)
    path = meddler.draw.choice(files)
    content = path.read_bytes()
    if kind == "swap":
        like = [each for each in files if each.suffix == path.suffix and each != path]
        other = meddler.draw.choice(like or files)
        path.write_bytes(other.read_bytes())
        other.write_bytes(content)
    elif kind == "remove":
        path.unlink()
    else:
        path.write_bytes(meddler.damage(content))


@pytest.mark.nightly
@pytest.mark.parametrize("way", ["directory", "store"])
def test_damaged_and_swapped_files_are_refused_and_the_next_refit_works(
    checkpoint: Any, tmp_path: Path, way: str
) -> None:
    draw, path = random.Random(way), checkpoint("qwen2", **SIZES)
    refused = dict.fromkeys(FILE_KINDS, 0)
    with paired(way, tmp_path, path) as pair:
        pair.publish()
        assert pair.receive() == ("", had := pair.newest)
        for number in range(FILE_DAMAGES):
            kind = FILE_KINDS[number % len(FILE_KINDS)]
            for _ in range(1 + draw.randrange(3)):
                pair.publish()
            if draw.random() < 0.4:
                pair.engine.call(release)  # it takes all weights next
            damage_file(tmp_path / "chain", kind, f"{way} {number}")
            said, found = pair.receive()
            assert found == (had := had if said else pair.newest), (kind, said)
            refused[kind] += bool(said)
            for left in reversed(range(REFITS)):
                pair.publish()
                said, found = pair.receive()
                assert left or not said, (kind, said)
                assert found == (had := had if said else pair.newest), (kind, said)
    assert all(refused.values()), refused
