"""Trainers and engines that are killed at random moments of refits of what has changed: an engine
has what was published last or what is published now, never a mixture, and the next refit works.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from megatron_policy.errors import RefitError
from megatron_policy.refit.transports.delta_stream import DeltaStream
from megatron_policy.refit.transports.deltas import DeltaDirectory
from megatron_policy.refit.transports.ipc.transport import IpcStream
from tests import refit_engine
from tests.dist.cases import policy_config
from tests.dist.refits import TP2
from tests.dist.test_delta_refit import BUCKET, disturb
from tests.dist.test_delta_store import RANKS_SHARE, forms_of, share_folders
from tests.dist.test_detached_refit import SIZES, bits_of
from tests.dist.test_trainer_deaths import _here, start_trainers
from tests.other_process import OtherProcess, read_results
from tests.refit_engine import Bits, bits, zeros

KILLS = 34  # of either side over each transport
MOST_CALLS, FEW_CALLS = 40, 4
TIMEOUT_S = 900.0  # nothing here waits so long: who does has not heard of a death
OURS = ("megatron_policy", "refit_engine")
SCAN_AND_PACK = ("SentCopy.advance", "encode_message", "Operation.gather", "Operation.broadcast")
END = ("Operation.collect_failures", "Operation.leave_together")
TAKE = ("decode_message", "Patches.apply", "Patches.check", "SmallEngine.load", "Patches.undo")
READ = ("receive_deltas", "read_chain", "read_messages", "receive_directory")
WHOLE = ("DirectorySession.place", "ShardFile.put", "DirectorySession.finish")
PHASES: dict[str, dict[str, tuple[str, ...]]] = {
    "directory": {
        "trainer": (
            *SCAN_AND_PACK,
            *("Directory.write", "Directory.replace", "Directory.keep_only"),
            *WHOLE,
            *END,
        ),
        "engine": (*READ, *TAKE),
    },
    "store": {
        "trainer": (
            *SCAN_AND_PACK,
            *("ObjectFolder.write", "ObjectFolder.upload", "ObjectFolder.keep_only"),
            *WHOLE,
            *END,
        ),
        "engine": (*READ, "ObjectFolder.download", *TAKE),
    },
    "stream": {
        "trainer": (
            *SCAN_AND_PACK,
            *("IpcStream.ask", "_join_streams", "IpcStream.open", "_Session.filled"),
            *("_Session.finish", "_Session.close"),
            *END,
        ),
        "engine": (
            *("receive_stream", "encode_version", "WeightAssembler.announce"),
            *("WeightAssembler.take", "WeightAssembler.stage", *TAKE),
        ),
    },
}
"""By how engines are reached and by who is killed: functions, in the order of a refit."""
OF_RANK_0 = ("_Session.", "Directory.replace", "ShardFile", "ObjectFolder.upload", "keep_only")
"""What is in the names of functions that rank 0 alone calls."""
MOST_REFITS = 9  # until one comes to the function


def die_after(function: str, calls: int) -> None:
    """Be killed after so many calls of our functions from the first of this one on."""
    left = [calls]

    def look(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or not any(name in code.co_filename for name in OURS):
            return
        if left[0] < calls or code.co_qualname == function:
            left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    threading.setprofile(look)
    sys.setprofile(look)


def change(number: int) -> Bits:
    """Other weights; what they are. Nobody is killed meanwhile."""
    sys.setprofile(None)
    threading.setprofile(None)
    disturb(_here["policy"], number, 0.1)
    return bits_of(_here["policy"])


def refit(way: str, at: str) -> str:
    """What was said if it failed."""
    if way == "stream":
        to: Any = DeltaStream(IpcStream(at, buffer_bytes=BUCKET))
    else:
        to = share_folders(partial(DeltaDirectory, whole_every=2), at)
    try:
        _here["policy"].refit(to)
    except RefitError as error:
        return str(error)
    return ""


def start_engine(forms: dict[str, Any]) -> Bits:
    refit_engine.start(forms, 0, {"timeout_s": TIMEOUT_S})
    return bits(zeros(forms))


def refuse_to_load() -> None:
    """Fail after a part is loaded: what was changed is undone."""
    state = refit_engine._here["receiver"]._engine

    def fail(tensors: Any) -> None:
        refit_engine._here["engine"].load(tensors[:2])
        raise RuntimeError("no memory")

    state.load = fail


def release() -> None:
    """Take all weights next."""
    refit_engine._here["receiver"].release()


PREPARED = {
    "Patches.undo": refuse_to_load,
    "receive_directory": release,
    "ObjectFolder.download": release,
    "WeightAssembler.take": release,
}
"""What else to do before an engine is killed in one of these functions."""


def receive(way: str, at: str) -> tuple[str, Bits]:
    """What was said if it failed; what the engine has then."""
    receiver, said = refit_engine._here["receiver"], ""
    take = receiver.receive_ipc_stream if way == "stream" else receiver.receive_deltas
    try:
        share_folders(take, at)
    except RefitError as error:
        said = str(error)
    return said, bits(refit_engine._here["engine"].weights)


class Pair:
    """Two trainers and an engine, each a process that can be killed."""

    def __init__(self, way: str, at: str, config: dict[str, Any], forms: dict[str, Any]) -> None:
        self._reached, self._config, self._forms = (way, at), config, forms
        self._is_stream, self._number, self._receiving = way == "stream", 0, False
        self.trainers, self._may_have = start_trainers(config), list[Bits]()
        self.start_engine()

    @property
    def newest(self) -> Bits:
        """What was sent last."""
        return self._may_have[-1]

    def publish(self) -> None:
        """A refit that works, of which the engine does not know yet."""
        self.begin(held=True)
        assert self.results() == ["", ""]

    def receive(self) -> tuple[str, Bits]:
        """What the engine says, if it fails, of what was published; what it has then."""
        self.engine.begin(receive, *self._reached)
        said, found = self.engine.result(TIMEOUT_S)
        return said, found

    def start_engine(self) -> None:
        self.engine = OtherProcess()
        self._may_have.insert(0, self.engine.call(start_engine, self._forms))
        self._receiving = False

    def begin(
        self, act: Callable[..., Any] = refit, *more: Any, arm: Any = None, held: bool = False
    ) -> None:
        """Begin a refit of other weights, on both sides, or if the engine is `held`, on the
        trainers'; `arm` is called before.
        """
        self._number += 1
        for process in self.trainers:
            process.begin(change, self._number)
        new, _ = [process.result(TIMEOUT_S) for process in self.trainers]
        self._may_have.append(new)
        if arm is not None:
            arm()
        for process in self.trainers:
            process.begin(act, *self._reached, *more)
        if not held:
            self.begin_to_receive()

    def begin_to_receive(self) -> None:
        """Begin it unless an earlier one still waits for a trainer."""
        if not self._receiving:
            self.engine.begin(receive, *self._reached)
        self._receiving = True

    def check_engine(self) -> Bits:
        """What the engine has when it has received: what some refit sent whole."""
        said, found = self.engine.result(TIMEOUT_S)
        self._receiving = False
        assert found in self._may_have, said
        del self._may_have[: self._may_have.index(found)]
        return found

    def results(self) -> list[str | None]:
        """What trainers have said of a refit; None of one that was killed."""
        return read_results(self.trainers, TIMEOUT_S)

    def end(self) -> None:
        """The end of a refit that works, and of which the engine has everything."""
        newest = self.newest
        while self.check_engine() != newest and self._is_stream:
            self.begin_to_receive()  # who was left in an earlier refit comes to this one
        assert self.results() == ["", ""]
        self.look_again()
        assert self._may_have == [newest]

    def look_again(self) -> None:
        """Let an engine that reads what there is do so again."""
        if not self._is_stream:
            self.begin_to_receive()
            self.check_engine()

    def kill_trainer(self, rank: int, function: str, calls: int) -> None:
        rank = 0 if any(part in function for part in OF_RANK_0) else rank
        victim = self.trainers[rank]
        for _ in range(MOST_REFITS):
            self.begin(arm=partial(victim.call, die_after, function, calls))
            if (said := self.results())[rank] is None:
                break
            assert said == ["", ""]
            self.check_engine()
            calls = 0  # fewer follow it
        assert said[rank] is None, f"{function} is not called"
        assert said[1 - rank] is not None
        self.trainers[1 - rank].kill()  # as whoever has started it does
        if not self._is_stream:
            self.check_engine()
        self.look_again()
        self.trainers = start_trainers(self._config)

    def kill_engine(self, _: int, function: str, calls: int) -> None:
        if function in PREPARED:
            self.engine.call(PREPARED[function])
            calls %= FEW_CALLS  # the next refit is another one
        victim, left = self.engine, MOST_REFITS
        while self.engine is victim:
            assert (left := left - 1), f"{function} is not called"
            victim.call(die_after, function, calls)
            self.begin()
            try:
                victim.result(TIMEOUT_S)
                self._receiving = False
                calls = 0  # fewer follow it
            except EOFError:
                self.start_engine()
                self.begin_to_receive()
            assert (said := self.results()) == ["", ""] or self._is_stream, said
        if not self._is_stream:
            self.check_engine()

    def stop(self) -> None:
        for process in (self.engine, *self.trainers):
            process.kill()


@contextmanager
def paired(way: str, place: Path, path: Path) -> Iterator[Pair]:
    """Those of a small model, which refit in that way below `place`."""
    at = {"stream": f"ipc://{place}/t", "store": f"{RANKS_SHARE}{place}/chain"}
    top = {"refit_bucket_bytes": BUCKET, "refit_timeout_s": TIMEOUT_S}
    config = policy_config(path, TP2, **top)
    pair = Pair(way, at.get(way, f"{place}/chain"), config, forms_of(path))
    try:
        yield pair
    finally:
        pair.stop()


@pytest.mark.nightly
@pytest.mark.parametrize("victim", ["trainer", "engine"])
@pytest.mark.parametrize("way", PHASES)
def test_who_is_killed_at_a_random_moment_leaves_no_mixture_and_the_next_refit_works(
    checkpoint: Any, tmp_path_factory: Any, way: str, victim: str
) -> None:
    draw, path = random.Random(f"{way} {victim}"), checkpoint("qwen2", **SIZES)
    with paired(way, tmp_path_factory.mktemp("s"), path) as pair:
        kill, phases = getattr(pair, f"kill_{victim}"), PHASES[way][victim]
        pair.begin()
        pair.end()
        for number in range(KILLS):
            rank, calls = draw.randrange(2), draw.randrange(MOST_CALLS)
            kill(rank, phases[number % len(phases)], calls)
            pair.begin()
            pair.end()
