"""A client or the host of a control store that is killed, is stopped or comes late: what the others
hear, and that none of them waits for longer than it was told.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager

import pytest
import torch

from megatron_policy.coordination.control_server import GET, PUT, ControlClient, Reply, Request
from megatron_policy.coordination.control_store import ControlStore
from megatron_policy.coordination.rendezvous import reserved_port
from megatron_policy.errors import RefitError
from tests.collective_engine import SECRET
from tests.coordination_parts import HANG_S, LONG_S
from tests.other_process import OtherProcess

SHORT_S = 2.0
LARGE = 64 * 2**20  # more than the buffers of a connection hold

_kept: list[ControlStore | ControlClient] = []


def keep_host(port: int) -> None:
    """Host a store with one note in this process."""
    store = ControlStore("127.0.0.1", port, LONG_S, SECRET, host=True)
    store.put("note", b"here")
    _kept.append(store)


def put_half(port: int) -> None:
    """Send the first half of a value."""
    client = ControlClient("127.0.0.1", port, SECRET.encode(), LONG_S, LONG_S)
    _kept.append(client)
    connection = client._host._connection
    connection.send_bytes(Request(PUT, ("note",)).header())
    body = b"planted" * 1000
    os.write(connection.fileno(), struct.pack("!i", len(body)) + body[: len(body) // 2])


def ask_for_large(port: int) -> None:
    """Ask for the large value, and do not read the answer."""
    client = ControlClient("127.0.0.1", port, SECRET.encode(), LONG_S, LONG_S)
    _kept.append(client)
    client._host.send(Request(GET, ("large",), timeout_s=LONG_S).header(), b"")


def read_large() -> bool:
    """Read that answer: is it whole?"""
    client = _kept[-1]
    assert isinstance(client, ControlClient)
    return Reply.parse(*client._host.receive()).body == b"x" * LARGE


def get(port: int, key: str) -> bytes:
    """Wait for a note."""
    return ControlStore("127.0.0.1", port, LONG_S, SECRET).get(key, HANG_S, "missing")


def join_and_wait(port: int) -> None:
    """Be rank 1 of a group, of which rank 0 then waits for this one."""
    store = ControlStore("127.0.0.1", port, LONG_S, SECRET)
    group = store.process_group("group", 1, 2, LONG_S)
    store.put("joined", b"")
    time.sleep(HANG_S)
    group.close()


@pytest.fixture
def other() -> Iterator[OtherProcess]:
    process = OtherProcess()
    yield process
    process.kill()


@contextmanager
def hosting() -> Iterator[tuple[int, ControlStore]]:
    """A store with one note, hosted here."""
    with (
        reserved_port() as port,
        closing(ControlStore("127.0.0.1", port, LONG_S, SECRET, host=True)) as host,
    ):
        host.put("note", b"here")
        yield port, host


def is_served(port: int) -> bool:
    """Whether a client can still read and write."""
    with closing(ControlStore("127.0.0.1", port, LONG_S, SECRET)) as client:
        client.put("another", b"note")
        return client.find("note") == b"here" and client.get("another", LONG_S, "") == b"note"


def test_half_a_value_of_a_client_that_is_killed_is_no_value(other: OtherProcess) -> None:
    with hosting() as (port, host):
        other.call(put_half, port)
        assert host.find("note") == b"here"
        other.kill()
        assert is_served(port) and host.find("note") == b"here"


def test_a_client_that_is_stopped_amid_an_answer_keeps_nobody_waiting(other: OtherProcess) -> None:
    with hosting() as (port, host):
        host.put("large", b"x" * LARGE)
        other.call(ask_for_large, port)
        other.stop()
        assert is_served(port)
        other.go_on()
        assert other.call(read_large)


def test_a_client_gets_a_note_that_comes_late_and_disturbs_nobody_if_killed_before(other) -> None:
    with hosting() as (port, host):
        other.begin(get, port, "late")
        time.sleep(0.5)
        host.put("late", b"here at last")
        assert other.result(HANG_S) == b"here at last"
        other.begin(get, port, "later")
        time.sleep(0.2)
        other.kill()
        assert is_served(port)
        host.put("later", b"nobody reads it")
        assert is_served(port)


def test_a_host_that_comes_late_is_waited_for(other: OtherProcess) -> None:
    with reserved_port() as port, ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(get, port, "note")
        time.sleep(0.5)
        other.call(keep_host, port)
        assert waiting.result(HANG_S) == b"here"


def test_a_host_that_is_killed_and_started_anew_is_reached_again(other: OtherProcess) -> None:
    with reserved_port() as port:
        other.call(keep_host, port)
        client = ControlStore("127.0.0.1", port, LONG_S, SECRET)
        assert client.get("note", LONG_S, "missing") == b"here"
        client.put("another", b"note")
        other.kill()
        host = OtherProcess()
        try:
            host.call(keep_host, port)
            with pytest.raises(RefitError, match="cannot be reached"):
                client.put("another", b"note")  # that was to be said to the other host
            assert client.get("note", LONG_S, "missing") == b"here"
            assert client.find("another") is None, "the values were the other host's"
            host.kill()
            host = OtherProcess()
            host.call(keep_host, port)
            assert client.get("note", LONG_S, "missing") == b"here"
        finally:
            host.kill()


Ask = Callable[[ControlStore], object]
ASKS: dict[str, Ask] = {
    "put": lambda store: store.put("another", b"note"),
    "put a large value": lambda store: store.put("large", b"x" * LARGE),
    "get": lambda store: store.get("note", SHORT_S, "missing"),
    "find": lambda store: store.find("note"),
    "drop": lambda store: store.drop(["another"]),
    "process_group": lambda store: store.process_group("group", 1, 2, SHORT_S),
}


@pytest.mark.dear
@pytest.mark.parametrize("fault", ["killed", "stopped"])
def test_a_host_that_is_killed_or_stopped_is_named_by_every_call(other, fault) -> None:
    def heard(ask: Ask, store: ControlStore) -> str:
        with pytest.raises(RefitError) as error:
            ask(store)
        return str(error.value)

    with reserved_port() as port, ThreadPoolExecutor(len(ASKS)) as threads:
        other.call(keep_host, port)
        stores = [ControlStore("127.0.0.1", port, SHORT_S, SECRET) for _ in ASKS]
        for store in stores:
            assert store.get("note", LONG_S, "missing") == b"here"
        if fault == "killed":
            other.kill()
        else:
            other.stop()
        asked = [threads.submit(heard, *each) for each in zip(ASKS.values(), stores, strict=True)]
        for name, words in zip(ASKS, asked, strict=True):
            expected = f"training rank 0, at 127.0.0.1:{port}, cannot be reached: "
            assert words.result(HANG_S).startswith(expected), name
        if fault == "stopped":
            other.go_on()
            for store in stores:  # no answer of before is taken for one to this
                store.put("note", b"back")
                assert store.get("note", LONG_S, "missing") == b"back"
        for store in stores:
            store.close()


def test_a_member_that_is_killed_amid_a_collective_fails_the_other(other: OtherProcess) -> None:
    with hosting() as (port, host):
        other.begin(join_and_wait, port)
        group = host.process_group("group", 0, 2, LONG_S)
        host.get("joined", LONG_S, "missing")
        pending = group.broadcast(torch.zeros(4), 1)
        other.kill()
        with pytest.raises(RefitError, match="group: a process has left, or was ended"):
            pending.wait()
        group.close(broken=True)
        assert is_served(port)


def test_a_member_that_does_not_come_is_missed_in_time() -> None:
    with hosting() as (port, host):
        with closing(ControlStore("127.0.0.1", port, LONG_S, SECRET)) as client:
            for store, rank in ((host, 0), (client, 1)):
                with pytest.raises(RefitError, match=r"did not take part within|no answer within"):
                    store.process_group(f"group {rank}", rank, 2, 0.5)
        assert is_served(port)
