"""The stream over a socket to a real other process: what arrives, and every way it can go wrong."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import pickle
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from megatron_policy.errors import ConfigError, RefitError
from megatron_policy.formats.digests import UNSEALED, seal
from megatron_policy.refit.buffers import BufferSlice
from megatron_policy.refit.delivery import deliver
from megatron_policy.refit.manifest import RefitManifest, ServedModel
from megatron_policy.refit.transports.ipc.protocol import (
    Dialect,
    PackMessage,
    decode_handles,
    encode_handles,
    encode_question,
    parse_request,
)
from megatron_policy.refit.transports.ipc.shared_memory import ExportedBuffer, rebuilt
from megatron_policy.refit.transports.ipc.sockets.link import Link, parse_address
from megatron_policy.refit.transports.ipc.sockets.request_reply import ReplySocket, RequestSocket
from megatron_policy.refit.transports.ipc.transport import IpcStream, address_of
from tests import refit_engine as engine
from tests.other_process import OtherProcess, shared_memory_of
from tests.refit_trainer import BUFFER, FORMS, StandIn, send_and_die, weights
from tests.small_disk import MIB, free, small_disk

SHORT = 2.0  # seconds that a side waits for one that is gone
ZEROS = engine.bits(engine.zeros(FORMS))


@pytest.fixture(scope="module")
def others() -> Iterator[list[OtherProcess]]:
    """Processes that live as long as they can."""
    running = [OtherProcess(), OtherProcess()]
    for process in running:
        process.call(os.getpid)
    yield running
    for process in running:
        process.kill()


class Pair:
    """This process as the trainer of an address, and another that becomes the engine there."""

    def __init__(self, others: list[OtherProcess], address: str) -> None:
        self.others, self.address, self.path = others, address, parse_address(address)

    def start(
        self, forms: Any = FORMS, die_at_load: int = 0, receiving: bool = True, **options: Any
    ) -> OtherProcess:
        """A process that has just become an engine; nothing may be left of it."""
        process = self.others[0]
        process.call(engine.start, forms, die_at_load, {"timeout_s": 20.0, **options})
        if receiving:
            process.begin(engine.receive, self.address)
        return process

    def send(self, seed: int, buffer_bytes: int = BUFFER, **exporter: Any) -> RefitManifest:
        """One refit from this process, of the weights of that seed, which is also the step."""
        return send(self.address, seed, buffer_bytes, **exporter)


@pytest.fixture
def pair(others: list[OtherProcess], address: str) -> Iterator[Pair]:
    yield Pair(others, address)
    if others[0].alive:
        assert others[0].call(engine.left) == []
    else:
        others[0] = OtherProcess()
    assert left_here() == []
    assert os.listdir(os.path.dirname(parse_address(address))) == []


def left_here() -> list[str]:
    """Shared memory of this process; not what only the frames of a caught error hold."""
    gc.collect()
    return shared_memory_of("self")


@pytest.fixture
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"ipc://{tmp_path_factory.mktemp('s')}/t.sock"


def send(address: str, seed: int, buffer_bytes: int = BUFFER, **exporter: Any) -> RefitManifest:
    """One refit from this process, of the weights of that seed, which is also the step."""
    sink = IpcStream(address, buffer_bytes=buffer_bytes)
    return deliver(StandIn(weights(seed), **exporter), sink, step=seed)


@pytest.mark.dear
@pytest.mark.parametrize("staged", [True, False])
@pytest.mark.parametrize("buffer_bytes", [1024, BUFFER, 2**20])
def test_every_bit_arrives_once_and_again_a_step_later(
    pair: Pair, staged: bool, buffer_bytes: int
) -> None:
    process = pair.start(staged=staged)
    for step in (1, 2):
        manifest = pair.send(step, buffer_bytes)
        assert process.result() == step == manifest.step
        held, accepted, mixed, loads = process.call(engine.state)
        assert held == engine.bits(weights(step)) and accepted == step and not mixed
        assert list(manifest.tensors) == list(FORMS)
        assert sorted(chain(*loads)) == sorted([*FORMS] * step)
        assert (len(loads) == step) == (staged or buffer_bytes == 2**20)
        assert process.call(engine.left) == []
        if step == 1:
            process.begin(engine.receive, pair.address)


def test_an_engine_imports_neither_megatron_nor_ray_and_a_socket_only_for_streams(
    address: str,
) -> None:
    process = OtherProcess(clean=True)
    process.call(exec, "from megatron_policy.refit.receive import collective, disk, receiver")
    assert not {"megatron", "ray", "transformers", "zmq"} & process.call(engine.imported)
    process.call(engine.start, FORMS, 0, {})
    process.begin(engine.receive, address)
    send(address, 1)
    assert process.result() == 1
    imported = process.call(engine.imported)
    process.kill()
    assert {"torch", "zmq", "megatron_policy"} <= imported
    assert not {"megatron", "ray", "transformers"} & imported


@pytest.mark.parametrize(("staged", "die_at_load"), [(True, 1), (False, 2), (True, 0)])
def test_an_engine_killed_while_it_loads_or_waits_fails_the_sender_and_the_next_refit_succeeds(
    pair: Pair, staged: bool, die_at_load: int
) -> None:
    process = pair.start(die_at_load=die_at_load, staged=staged)

    def kill(name: str) -> None:
        if not die_at_load and name == "layers.3.weight":
            process.kill()

    with pytest.raises(RefitError, match=r"engine .* (disconnected|silent)"):
        pair.send(1, timeout_s=SHORT, during=kill)
    with pytest.raises((EOFError, ConnectionResetError)):
        process.result()
    assert not os.path.exists(pair.path) and left_here() == []
    pair.others[0] = OtherProcess()
    process = pair.start(staged=staged)
    pair.send(2)
    assert process.result() == 2


@pytest.mark.parametrize("staged", [True, False])
def test_a_trainer_killed_in_the_middle_fails_the_engine_and_leaves_nothing(
    pair: Pair, staged: bool
) -> None:
    process = pair.start(staged=staged, timeout_s=SHORT)
    pair.others[1].begin(send_and_die, pair.address, 1, "layers.4.weight")
    with pytest.raises(RefitError, match=r"trainer .* (disconnected|silent)|cannot open"):
        process.result(3 * SHORT)
    pair.others[1].kill()
    pair.others[1] = OtherProcess()
    pair.others[1].call(os.getpid)
    held, step, mixed, _ = process.call(engine.state)
    assert step is None and mixed == (not staged)
    assert (held == ZEROS) == staged
    assert not os.path.exists(pair.path) and process.call(engine.left) == []
    process.begin(engine.receive, pair.address)
    pair.send(2)
    assert process.result() == 2
    assert process.call(engine.state)[:3] == (engine.bits(weights(2)), 2, False)


class Meddling:
    """The stream, with its session's `filled` or `finish` replaced."""

    def __init__(self, inner: IpcStream, filled: Any = None, finish: Any = None) -> None:
        self._inner, self._filled, self._finish = inner, filled, finish

    def plan(self, exporter: Any) -> Any:
        return self._inner.plan(exporter)

    def open(self, exporter: Any, plan: Any) -> Any:
        session = self._inner.open(exporter, plan)
        filled, finish = session.filled, session.finish
        if self._filled:
            session.filled = lambda tensor, target: self._filled(filled, tensor, target)
        if self._finish:
            session.finish = lambda manifest: finish(self._finish(manifest))
        return session


def flipped(filled: Any, tensor: Any, target: BufferSlice) -> None:
    """One bit of one tensor, after its digest was taken."""
    if tensor.name == "layers.2.weight":
        target.bytes(tensor.nbytes)[17] ^= 4
    filled(tensor, target)


def without(manifest: RefitManifest) -> RefitManifest:
    return replace(manifest, tensors={k: v for k, v in manifest.tensors.items() if k != "norm"})


def with_more(manifest: RefitManifest) -> RefitManifest:
    return replace(manifest, tensors={**manifest.tensors, "more": manifest.tensors["norm"]})


@pytest.mark.parametrize("staged", [True, False])
@pytest.mark.parametrize("expected", [True, False])
@pytest.mark.parametrize(
    ("meddle", "said"),
    [
        ({"filled": flipped}, "digest: layers.2.weight"),
        ({"finish": without}, "norm"),
        ({"finish": with_more}, "missing: more|unknown to it: more"),
    ],
    ids=["flipped", "unannounced", "missing"],
)
def test_what_is_not_the_complete_set_is_refused_on_both_sides(
    pair: Pair, meddle: dict[str, Any], said: str, staged: bool, expected: bool
) -> None:
    process = pair.start(staged=staged, **({} if expected else {"expected": None}))
    sink = Meddling(IpcStream(pair.address, buffer_bytes=BUFFER), **meddle)
    with pytest.raises(RefitError, match=said) as sent:
        deliver(StandIn(weights(1)), sink, step=1)
    assert "the engine refused the weights" in str(sent.value)
    with pytest.raises(RefitError, match=said):
        process.result()
    held, step, mixed, _ = process.call(engine.state)
    assert step is None and mixed == (not staged) and (held == ZEROS) == staged
    process.begin(engine.receive, pair.address)
    pair.send(1)
    assert process.result() == 1 and process.call(engine.state)[2] is False


def test_the_weights_of_another_model_are_refused_before_any_is_sent(pair: Pair) -> None:
    for model in (
        FORMS | {"other": ((3,), torch.float32)},
        FORMS | {"norm": ((34,), torch.bfloat16)},
        FORMS | {"norm": ((33,), torch.float16)},
        {name: form for name, form in FORMS.items() if name != "norm"},
    ):
        process = pair.start(model, staged=False)
        with pytest.raises(RefitError, match=r"not the weights of the engine's.*(other|norm)"):
            pair.send(1)
        with pytest.raises(RefitError):
            process.result()
        assert process.call(engine.state)[1:] == (None, False, [])


def test_a_refit_that_cannot_be_announced_leaves_no_socket(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/socket"
    model = ServedModel({"x": {1, 2}})  # no JSON
    with pytest.raises(RefitError, match="set"):
        deliver(StandIn(weights(1), model=model), IpcStream(address), 1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("staged", [True, False])
def test_what_the_engine_cannot_load_is_refused_with_its_reason(pair: Pair, staged: bool) -> None:
    process = pair.start({**FORMS, "norm": ((34,), torch.bfloat16)}, expected=None, staged=staged)
    with pytest.raises(RefitError, match=r"RuntimeError: .*size of tensor"):
        pair.send(1)
    with pytest.raises(RefitError, match="mixed"):
        process.result()
    assert process.call(engine.state)[1:3] == (None, True)


def test_a_step_older_than_the_engines_is_refused_and_an_equal_one_is_not(pair: Pair) -> None:
    process = pair.start()
    for step in (5, 5):
        pair.send(step)
        assert process.result() == 5
        process.begin(engine.receive, pair.address)
    with pytest.raises(RefitError, match=r"step 4 .*older"):
        pair.send(4)
    with pytest.raises(RefitError, match="older"):
        process.result()
    assert process.call(engine.state)[:2] == (engine.bits(weights(5)), 5)


@pytest.mark.parametrize("during", ["before the first", "in the middle"])
def test_a_trainer_that_gives_up_ends_the_engines_wait(pair: Pair, during: str) -> None:
    process = pair.start(timeout_s=30)

    def fail(name: str) -> None:
        if name == ("embed" if during == "before the first" else "layers.3.weight"):
            raise RuntimeError("somewhere else")

    with pytest.raises(RuntimeError, match="somewhere else"):
        pair.send(1, during=fail)
    # On a busy machine it may all be over before the engine opens what it was told of.
    with pytest.raises(RefitError, match=r"trainer .* disconnected|cannot open"):
        process.result(10)
    assert process.call(engine.state)[0] == ZEROS


def test_a_request_is_read_whole_though_its_trainer_has_left(address: str) -> None:
    with zmq.Context() as context, context.socket(zmq.REQ) as trainer:
        trainer.bind(address)
        link = Link(context, zmq.REP)
        try:
            link.socket.connect(address)
            trainer.send(b"a question")
            end = time.monotonic() + 30
            while not link.wait(end, zmq.POLLIN):  # then ZeroMQ has read the first part
                assert time.monotonic() < end
            trainer.close(0)
            while not link.left:
                link.wait(end)
                assert time.monotonic() < end
            assert link.wait(end, zmq.POLLIN)
            assert link.receive() == b"a question"
            began = time.monotonic()
            assert link.send(b"an answer")
        finally:
            link.close(30)
    assert time.monotonic() - began < 20, "it lingers, for nobody"


def test_a_full_shared_memory_fails_the_refit_and_a_smaller_buffer_succeeds(
    pair: Pair, tmp_path: Path
) -> None:
    forms = {f"w{i}": ((100, 1000), torch.bfloat16) for i in range(8)}
    held = weights(1, forms)
    process = pair.start(forms)
    with small_disk(tmp_path / "tiny") as tiny:

        def refit(buffer_bytes: int) -> None:
            sink = IpcStream(pair.address, buffer_bytes=buffer_bytes, directory=tiny)
            deliver(StandIn(held), sink, step=1)

        with pytest.raises(RefitError, match=r"the trainer cannot get .* smaller buffer") as full:
            refit(3 * MIB)
        assert free(tiny) == MIB and full.value.__cause__ is not None
        with pytest.raises(RefitError, match=r"trainer .* disconnected"):
            process.result()
        process.begin(engine.receive, pair.address)
        refit(MIB)
        assert process.result() == 1 and process.call(engine.state)[0] == engine.bits(held)
        assert free(tiny) == MIB


def test_an_engine_that_never_comes_fails_the_refit_in_time(address: str) -> None:
    with pytest.raises(RefitError, match=r"no engine connected to .* within 0.75 s"):
        send(address, 1, timeout_s=1.0)
    assert os.listdir(os.path.dirname(parse_address(address))) == []


def leave_socket(address: str) -> None:
    """As a killed trainer does: nobody listens there."""
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(parse_address(address))
    assert os.path.exists(parse_address(address))


@pytest.mark.parametrize("left", [False, True])
def test_a_trainer_that_never_comes_fails_the_engine_in_time_and_a_dead_ones_socket_goes(
    pair: Pair, left: bool
) -> None:
    if left:
        leave_socket(pair.address)
    process = pair.start(timeout_s=0.5)
    with pytest.raises(RefitError, match=r"no trainer connected to .* within 0.5 s"):
        process.result(10)
    assert not os.path.exists(pair.path)


def test_the_socket_of_a_killed_trainer_does_not_keep_the_next_one_away(pair: Pair) -> None:
    leave_socket(pair.address)
    process = pair.start()
    time.sleep(0.2)
    pair.send(3)
    assert process.result() == 3


def test_an_engine_leaves_with_the_trainer_it_has_answered(address: str) -> None:
    with contextlib.ExitStack() as stack:
        trainer = RequestSocket(address, "engine", 20.0)
        with contextlib.closing(trainer), ThreadPoolExecutor(1) as threads:
            engine = stack.enter_context(contextlib.closing(ReplySocket(address, "trainer", 20.0)))
            asked = threads.submit(lambda: (trainer.send(lambda: b"the last"), trainer.receive()))
            assert engine.receive() == b"the last"
            engine.send(b"ack")
            assert asked.result(20)[1] == b"ack"
        following = RequestSocket(address, "engine", 0.5)
        stack.callback(following.close)
        with pytest.raises(RefitError, match="no engine connected"):
            following.send(lambda: b"the first of the next refit")


@pytest.mark.parametrize("own", [True, False], ids=["our receiver", "the host's"])
def test_an_engine_that_leaves_with_the_first_question_gives_way_to_the_next_one(
    pair: Pair, own: bool
) -> None:
    sink = IpcStream(
        pair.address, buffer_bytes=BUFFER, dialect=Dialect(None if own else "all sent")
    )
    process = pair.start(receiving=False, timeout_s=20.0)
    said: list[Any] = []
    with ThreadPoolExecutor(1) as threads, zmq.Context() as context:
        with context.socket(zmq.REP) as slow:
            slow.connect(pair.address)
            refit = threads.submit(deliver, StandIn(weights(1), timeout_s=20.0), sink, 1)
            assert slow.poll(20_000), "it has the first question"
        if own:
            process.begin(engine.receive, pair.address)
            assert refit.result(30).step == process.result() == 1
            assert process.call(engine.state)[0] == engine.bits(weights(1))
        else:
            _answering(context, pair.address, said, [b"ack"] * 99, lambda: refit.result(30))
            assert said[-1] == "all sent"
            assert list(chain(*(names for _, names, _ in said[:-1]))) == list(FORMS)


def test_an_engine_that_leaves_without_an_answer_fails_the_refit_where_no_other_comes(
    address: str,
) -> None:
    with ThreadPoolExecutor(1) as threads, zmq.Context() as context:
        with context.socket(zmq.REP) as gone:
            gone.connect(address)
            refit = threads.submit(send, address, 1, timeout_s=4.0)
            assert gone.poll(20_000)
        with pytest.raises(RefitError, match="no engine connected"):
            refit.result(30)


def test_of_two_engines_at_one_address_each_has_a_refit_of_its_own(pair: Pair) -> None:
    both = [pair.start(), pair.others[1]]
    both[1].call(engine.start, FORMS, 0, {"timeout_s": 20.0})
    both[1].begin(engine.receive, pair.address)
    for step in (1, 2):
        pair.send(step, timeout_s=20.0)
    assert {process.result() for process in both} == {1, 2}
    for process in both:
        held, step, mixed, _ = process.call(engine.state)
        assert held == engine.bits(weights(step)) and not mixed


def test_who_comes_and_says_nothing_does_not_disturb_a_refit(pair: Pair) -> None:
    path, stop = pair.path, threading.Event()

    def knock() -> int:
        times = 0
        while not stop.wait(0.002):
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
                probe.connect(path)
                times += 1
        return times

    with ThreadPoolExecutor(1) as threads:
        knocks = threads.submit(knock)
        try:
            process = pair.start(receiving=False)
            for step in (1, 2, 3):
                refit = threading.Timer(0.1, process.begin, (engine.receive, pair.address))
                refit.start()
                pair.send(step, timeout_s=20.0)
                refit.join()
                assert process.result() == step
        finally:
            stop.set()
        assert knocks.result() > 0


def test_only_sockets_of_this_user_are_taken_weights_from_and_they_are_open_to_no_other(
    pair: Pair,
) -> None:
    Path(pair.path).write_text("not a socket")
    process = pair.start()
    with pytest.raises(RefitError, match="not a socket of this user"):
        process.result(10)
    assert Path(pair.path).read_text() == "not a socket"
    os.unlink(pair.path)
    with contextlib.closing(RequestSocket(pair.address, "engine", 1.0)):
        assert os.stat(pair.path).st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "said", [os.system, subprocess.Popen, pickle.Unpickler, torch.load, Path("/")]
)
def test_nothing_that_a_message_names_is_called(said: Any) -> None:
    for content in (pickle.dumps((said, ["a"], 1)), pickle.dumps(said, protocol=0)):
        with pytest.raises(RefitError, match=r"cannot be read.*same version"):
            parse_request(content)


def test_a_handle_of_gpu_memory_is_let_through() -> None:
    """As torch makes it: type, size, stride, offset, storage type, dtype, GPU, handles."""
    storage = torch.storage.TypedStorage, torch.uint8, 0, b"handle", 8, 0, False, b"c", 0, b"", True
    handle = ((torch.Tensor, torch.Size([8]), (1,), 0, *storage),)
    sent = Dialect().encode_pack(PackMessage(handle, ["a"], 512))
    assert parse_request(sent) == PackMessage(handle, ["a"], 512)
    for field, other in (("dtype", "load"), ("device", "0"), ("handle", 7), ("handle", "zz")):
        said = json.loads(sent)
        said["handle"]["device"][field] = other
        with pytest.raises(RefitError, match="cannot be read"):
            parse_request(sealed(said))


def test_handles_that_a_caller_carries_are_plain_on_the_way() -> None:
    storage = torch.storage.TypedStorage, torch.uint8, 0, b"handle", 8, 0, False, b"c", 0, b"", True
    on_device = rebuild_cuda_tensor, (torch.Tensor, torch.Size([8]), (1,), 0, *storage)
    on_host = rebuilt, (1, 2, 3, 4, 5, torch.bfloat16, 0)
    handles = {
        "GPU-0": (True, [(torch.float32, on_device)], {"a": 0}),
        "host": (True, [(torch.bfloat16, on_host)], {"a": 0, "b": 512}),
    }
    sent = encode_handles(handles)
    assert decode_handles(sent) == handles
    for wrong in ("", "[]", "{", sent.replace("512", "-1"), sent.replace("bfloat16", "load")):
        with pytest.raises(RefitError, match="handles of weights cannot be read"):
            decode_handles(wrong)


def sealed(fields: object) -> bytes:
    """A message of these fields, with its digest."""
    own = fields | {"digest": UNSEALED} if isinstance(fields, dict) else fields
    return seal(json.dumps(own).encode())


HOST = {"pid": 1, "started": 1, "fd": 1, "inode": 1, "nbytes": 1}
ANNOUNCED = {"say": "announce", "version": 4, "tensors": {}, "model": {}}
PACKED = {"say": "pack", "handle": {"host": HOST}, "names": ["a"], "used_bytes": 1}
MESSAGES: tuple[object, ...] = (
    3,
    {"say": "run", "names": ["a"]},
    ANNOUNCED | {"version": 3},
    *(ANNOUNCED | {"tensors": {"a": form}} for form in (["load", [1]], ["float32", [-1]], 7)),
    {name: value for name, value in ANNOUNCED.items() if name != "model"},
    *(ANNOUNCED | {"model": model} for model in (7, {"adapters": []})),
    *(PACKED | {"handle": handle} for handle in ({}, {"host": {"pid": 1}})),
    PACKED | {"handle": {"host": HOST | {"fd": "1"}}},
    *(PACKED | wrong for wrong in ({"names": [7]}, {"used_bytes": -1})),
)


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"x", b"\xff\xfe", b"[" * 100_000, pickle.dumps(3), pickle.dumps(("a", "b"))),
        *(sealed(each) for each in MESSAGES),
    ],
)
def test_what_is_no_message_is_refused(content: bytes) -> None:
    for whole in (ANNOUNCED, PACKED):
        parse_request(sealed(whole))
    with pytest.raises(RefitError, match="same version"):
        parse_request(content)


def test_a_message_of_which_a_bit_is_flipped_is_refused() -> None:
    manifest = RefitManifest(8, "xxh3-64", {}, ServedModel({"rope_theta": 1e6}))
    for content in (encode_question(), Dialect().encode_closing(manifest)):
        parse_request(content)
        for at in range(8 * len(content)):
            damaged = bytearray(content)
            damaged[at // 8] ^= 1 << at % 8
            with pytest.raises(RefitError, match="same version"):
                parse_request(bytes(damaged))


def test_a_message_that_means_nothing_is_answered_with_a_refusal(pair: Pair) -> None:
    process = pair.start()
    line = RequestSocket(pair.address, "engine", 5.0)
    line.send(lambda: pickle.dumps(os.system))
    assert line.receive().startswith(b"refused: ")
    line.close()
    with pytest.raises(RefitError, match="cannot be read"):
        process.result()


def test_a_pack_larger_than_its_memory_is_refused_by_name(pair: Pair) -> None:
    process = pair.start()
    line = RequestSocket(pair.address, "engine", 20.0)
    exported = ExportedBuffer(512, torch.device("cpu"))

    def said(content: bytes) -> bytes:
        line.send(lambda: content)
        return line.receive()

    assert said(Dialect().encode_opening(FORMS, ServedModel())) == b"ack"
    refused = said(Dialect().encode_pack(PackMessage(exported.handle(), ["norm", "embed"], 3584)))
    assert refused.startswith(b"refused: embed does not fit")
    line.close()
    exported.close()
    with pytest.raises(RefitError, match="embed does not fit"):
        process.result()
    assert process.call(engine.state)[0] == ZEROS


def test_an_engine_with_its_own_dialect_gets_packs_and_its_marker_only(address: str) -> None:
    sink = IpcStream(address, buffer_bytes=BUFFER, dialect=Dialect(end="all sent"))
    said: list[Any] = []
    context = zmq.Context()
    with pytest.raises(RefitError, match="refused the weights: enough"):
        replies = [b"ack", b"ack", b"enough"]
        _answering(context, address, said, replies, lambda: deliver(StandIn(weights(1)), sink, 1))
    _answering(context, address, said, [b"ack"] * 99, lambda: deliver(StandIn(weights(1)), sink, 1))
    context.term()
    packs, end = said[3:-1], said[-1]
    assert end == "all sent"
    assert list(chain(*(names for _, names, _ in packs))) == list(FORMS)
    assert [used for _, _, used in packs] == [3072, 1536, 1536, 1536, 1536, 1536, 1536 + 512, 1024]


def _answering(
    context: zmq.Context, address: str, said: list[Any], replies: list[bytes], act: Callable
) -> None:
    """Answer in another thread, as an engine of a host would, while `act` runs."""
    stop = threading.Event()

    def answer() -> None:
        with context.socket(zmq.REP) as socket:
            socket.linger = 0
            socket.connect(address)
            for reply in replies:
                while not socket.poll(20):
                    if stop.is_set():
                        return
                said.append(pickle.loads(socket.recv()))
                socket.send(reply)
            stop.wait(5)

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        act()
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize(
    "address", ["tcp://127.0.0.1:1", "/tmp/x.sock", "ipc://relative", "ipc:///" + 107 * "x"]
)
def test_addresses_elsewhere_and_too_small_buffers_are_refused(address: str) -> None:
    assert address_of("GPU-1234") == "ipc:///tmp/GPU-1234.sock"
    with pytest.raises((ConfigError, RefitError), match="ipc:///tmp"):
        send(address, 1)
    with pytest.raises(ConfigError, match="1024 or more"):
        IpcStream(buffer_bytes=1000)
