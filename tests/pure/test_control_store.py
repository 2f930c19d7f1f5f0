"""The control store: notes of any size, and no call that waits for longer than it was told."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch.distributed as dist

from megatron_policy.coordination import control_server, control_store
from megatron_policy.coordination.authenticated_connection import (
    AuthenticatedConnection,
    new_secret,
)
from megatron_policy.coordination.control_server import ControlClient, Reply, Request
from megatron_policy.coordination.control_store import ControlStore
from megatron_policy.coordination.rendezvous import reserved_port
from megatron_policy.coordination.timeouts import run_with_timeout
from megatron_policy.errors import ConfigError, RefitError
from tests.collective_engine import SECRET


def test_notes_of_any_size_arrive_whole_and_go_whole() -> None:
    with reserved_port() as port:
        host = ControlStore("127.0.0.1", port, 20.0, SECRET, host=True)
        other = ControlStore("127.0.0.1", port, 20.0, SECRET)
        for size in (0, 1, 4 * 2**20, 9 * 2**20 + 5):
            content = bytes(range(256)) * (size // 256 + 1)
            host.put("note", content[:size])
            assert other.get("note", 20.0, "missing") == other.find("note") == content[:size]
        assert host.count() == 1
        host.drop(["note", "none"])
        assert host.count() == 0
        assert other.find("note") is None
        other.close()
        host.close()


def test_a_value_that_says_why_ends_waits_and_is_set_when_a_process_is_gone() -> None:
    with reserved_port() as port, ThreadPoolExecutor(1) as thread:
        host = ControlStore("127.0.0.1", port, 60.0, SECRET, host=True)
        leaving, other = (ControlStore("127.0.0.1", port, 60.0, SECRET) for _ in range(2))
        leaving.put_at_end("off", b"replaced")
        leaving.put_at_end("off", b"it has left")
        waiting = thread.submit(other.get, "note", 600.0, "missing", "off")
        leaving.close()
        with pytest.raises(RefitError, match="it has left"):
            waiting.result(60.0)
        with pytest.raises(RefitError, match="it has left"):
            host.get("note", 600.0, "missing", "off")
        host.put("note", b"late", unless="off")
        assert host.find("note") is None
        host.put("note", b"here")
        assert other.get("note", 600.0, "missing", "off") == b"here", "what exists is read"
        other.put_at_end("off", b"it came second")
        other.close()
        leaving.put_at_end("fine", b"withdrawn")
        leaving.put_at_end("fine", b"")
        leaving.close()
        assert host.find("off") == b"it has left" and host.find("fine") is None
        host.close()


def test_whoever_waits_hears_of_a_host_that_is_gone() -> None:
    with reserved_port() as port, ThreadPoolExecutor(1) as thread:
        host = ControlStore("127.0.0.1", port, 60.0, SECRET, host=True)
        other = ControlStore("127.0.0.1", port, 600.0, SECRET)
        other.put("note", b"here")
        waiting = thread.submit(other.get, "never", 600.0, "missing", "off")
        host.close()
        with pytest.raises(RefitError, match="cannot be reached"):
            waiting.result(60.0)


def test_a_board_without_a_host_says_so() -> None:
    with reserved_port() as port, pytest.raises(RefitError, match=f"at 127.0.0.1:{port}, cannot"):
        ControlStore("127.0.0.1", port, 1.0, SECRET).get("note", 1.0, "missing")


def test_a_host_reads_its_own_values_and_does_not_connect_to_itself(monkeypatch) -> None:
    def connect(*_: Any) -> None:
        raise AssertionError("the values are in this process")

    monkeypatch.setattr(control_store, "ControlClient", connect)
    with (
        reserved_port() as port,
        closing(ControlStore("127.0.0.1", port, 20.0, SECRET, host=True)) as host,
    ):
        for size in (0, 1):  # with no value in it, and with one
            assert host.count() == size
            host.process_group("group", 0, 1, 20.0).close()
            host.put("note", b"here")


def test_a_step_that_hangs_is_left_behind_and_one_that_fails_raises_what_it_raised() -> None:
    with pytest.raises(TimeoutError, match=r"no answer within 0\.1 s"):
        run_with_timeout(0.1, lambda: time.sleep(5))
    with pytest.raises(ZeroDivisionError):
        run_with_timeout(5.0, lambda: 1 // 0)


@pytest.fixture
def host() -> Iterator[ControlStore]:
    """A board with one note."""
    with (
        reserved_port() as port,
        closing(ControlStore("127.0.0.1", port, 20.0, SECRET, host=True)) as own,
    ):
        own.put("note", b"here")
        yield own


def test_a_note_that_does_not_come_is_missed_in_time_and_the_board_goes_on(
    host: ControlStore,
) -> None:
    with pytest.raises(RefitError, match="where is it"):
        host.get("other", 0.1, "where is it")
    assert host.get("note", 20.0, "where is it") == b"here"


def untouched(host: ControlStore) -> bool:
    return host.count() == 1 and host.find("note") == b"here"


def test_a_board_listens_at_the_announced_address_and_nowhere_else(host: ControlStore) -> None:
    socket.create_connection(("127.0.0.1", host.port), 20.0).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", host.port), 20.0)


def test_an_address_that_is_not_this_machines_is_named() -> None:
    with pytest.raises(RefitError, match=r"cannot be hosted at 192\.0\.2\.1:20999.*this machine"):
        ControlStore("192.0.2.1", 20999, 1.0, SECRET, host=True)


def test_who_has_another_secret_is_refused_at_once_by_name(host: ControlStore) -> None:
    stranger = ControlStore("127.0.0.1", host.port, 600.0, new_secret())
    for ask in (
        lambda: stranger.put("note", b"planted"),
        lambda: stranger.get("note", 600.0, "missing"),
        lambda: stranger.drop(["note"]),
        lambda: stranger.process_group("group", 1, 2, 600.0),
    ):
        with pytest.raises(
            RefitError, match=r"refuses this process: its secret is a different one.*trainer"
        ):
            ask()
        assert not stranger.connected
    assert untouched(host)


def test_torchs_own_store_reaches_no_note(host: ControlStore) -> None:
    with pytest.raises(RuntimeError):
        timeout = timedelta(seconds=1)
        store = dist.TCPStore("127.0.0.1", host.port, None, False, timeout, wait_for_workers=False)
        store.set("note", "planted")
        store.get("note")
    assert untouched(host)


def plant(request: Request) -> bytes:
    """A message as a holder of the secret would send it, but for the seal."""
    parts = (request.header(), request.body, bytes(32))
    return b"".join(struct.pack("!i", len(part)) + part for part in parts)


def test_a_note_planted_without_the_secret_is_not_accepted(host: ControlStore) -> None:
    planted = plant(Request("put", ("note",), b"planted"))
    with socket.create_connection(("127.0.0.1", host.port), 20.0) as stranger:
        # A socket with a timeout ignores MSG_WAITALL: what arrived first would be all that is read.
        assert len(stranger.makefile("rb").read(60)) == 60  # greeting and random bytes
        stranger.sendall(planted)  # as if it were the proof
        with suppress(ConnectionResetError):  # hung up before it read everything
            assert stranger.recv(1) in (b"\0", b"")
    assert untouched(host)


def test_a_note_planted_in_a_holders_connection_is_not_accepted(host: ControlStore) -> None:
    with closing(ControlClient("127.0.0.1", host.port, SECRET.encode(), 20.0, 20.0)) as holder:
        connection = holder._host._end
        connection.sendall(plant(Request("put", ("note",), b"planted")))
        assert connection.recv(1) == b"", "it was hung up"
    assert untouched(host)


def test_a_message_that_is_sent_twice_is_taken_once(host: ControlStore) -> None:
    class Doubling:
        def __init__(self, inner: Connection) -> None:
            self.inner, self.said = inner, []

        def send_bytes(self, content: bytes) -> None:
            self.said.append(content)
            self.inner.send_bytes(content)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

    with socket.create_connection(("127.0.0.1", host.port), 20.0) as connection:
        sealed = AuthenticatedConnection(connection, SECRET.encode(), host=False, timeout_s=20.0)
        inner, sealed._connection = sealed._connection, Doubling(sealed._connection)
        sealed.send(Request("add", ("sum",), b"1").header(), b"1")
        assert Reply.parse(*sealed.receive()).body == b"1"
        for part in sealed._connection.said:
            inner.send_bytes(part)
        with pytest.raises(ConnectionResetError):
            sealed.receive()
    assert host.find("sum") == b"1"


def test_a_host_without_the_secret_is_not_taken_for_the_trainer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        board = ControlStore("127.0.0.1", port, 20.0, SECRET)

        def pretend() -> None:
            connection, _ = server.accept()
            with connection, pytest.raises(RefitError):
                AuthenticatedConnection(
                    connection, b"a guess at the secret", host=True, timeout_s=20.0
                )

        with ThreadPoolExecutor(1) as threads:
            pretending = threads.submit(pretend)
            with pytest.raises(RefitError, match="secret is a different one"):
                board.put("weights", b"")
            pretending.result(20)


@pytest.mark.parametrize(
    "header",
    [
        *(b"", b"\x80\x04.", b"[]", b"{}", b"[" * 100_000),
        b'{"do": "put", "keys": [], "timeout_s": 0}',
        b'{"do": "put", "keys": [1], "timeout_s": 0}',
        b'{"do": "run", "keys": ["a"], "timeout_s": 0}',
        b'{"do": "get", "keys": ["a"], "timeout_s": 1e300}',
        b'{"do": "get", "keys": ["a"], "timeout_s": NaN}',
        b'{"do": "drop", "keys": "a", "timeout_s": 0}',
    ],
)
def test_a_request_that_means_nothing_is_answered_with_its_words(
    host: ControlStore, header: bytes
) -> None:
    with closing(ControlClient("127.0.0.1", host.port, SECRET.encode(), 20.0, 20.0)) as holder:
        sealed: AuthenticatedConnection = holder._host
        sealed.send(header, b"")
        with pytest.raises(RefitError, match="received an unrecognised request"):
            Reply.parse(*sealed.receive())
        assert holder.perform(Request("get", ("note",), timeout_s=20.0)).body == b"here", (
            "it goes on"
        )


@pytest.mark.parametrize(
    ("there", "added"),
    [(b"here", b"1"), (b"1", b""), (b"1", b"-"), (b"1", b"1" * 21), (b"1" * 5000, b"1")],
    ids=["words", "nothing", "a sign", "too long", "too long already"],
)
def test_a_sum_of_what_is_no_number_is_refused_by_name(host, there: bytes, added: bytes) -> None:
    host.put("note", there)
    with closing(ControlClient("127.0.0.1", host.port, SECRET.encode(), 20.0, 20.0)) as holder:
        # Python reads no more than 4,300 digits.
        for number in (added, b"1" * 5000, b"-" + b"1" * 5000):
            with pytest.raises(RefitError, match=r"the note note .* is not a number of at most 20"):
                holder.perform(Request("add", ("note",), number))
        assert holder.perform(Request("get", ("note",))).body == there, "it goes on"
        largest = b"9" * 20
        for number, total in ((b"-" + largest, b"-" + largest), (largest, b"0")):
            assert holder.perform(Request("add", ("sum",), number)).body == total


def test_without_a_thread_that_bounds_it_no_connection_is_made_or_used(host, monkeypatch) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    client = ControlStore("127.0.0.1", host.port, 600.0, SECRET)
    assert client.find("note") == b"here"
    other = ControlStore("127.0.0.1", host.port, 600.0, SECRET)
    monkeypatch.setattr(threading.Timer, "start", start)
    for store in (client, other):  # at once, and not at the end of its time
        with pytest.raises(RefitError, match="no thread can be started"):
            store.find("note")
    monkeypatch.undo()
    for store in (client, other):
        assert store.find("note") == b"here", "it goes on"


def test_a_host_without_a_thread_that_serves_says_so_and_frees_its_port(monkeypatch) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with reserved_port() as port:
        monkeypatch.setattr(threading.Thread, "start", start)
        with pytest.raises(RefitError, match=f"hosted at 127.0.0.1:{port}: no thread can be start"):
            ControlStore("127.0.0.1", port, 20.0, SECRET, host=True)
        monkeypatch.undo()
        ControlStore("127.0.0.1", port, 20.0, SECRET, host=True).close()


@pytest.mark.parametrize("at_once", [1, 7])
def test_a_greeting_that_comes_in_parts_is_read_whole(host: ControlStore, at_once: int) -> None:
    class Dribbling:
        def __init__(self, inner: socket.socket) -> None:
            self.inner = inner

        def recv(self, count: int, *_: int) -> bytes:
            return self.inner.recv(min(count, at_once))

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

    with socket.create_connection(("127.0.0.1", host.port), 20.0) as connection:
        end: Any = Dribbling(connection)
        sealed = AuthenticatedConnection(end, SECRET.encode(), host=False, timeout_s=20.0)
        sealed.send(Request("get", ("note",)).header(), b"")
        assert Reply.parse(*sealed.receive()).body == b"here"


def test_strangers_who_say_nothing_do_not_keep_holders_away(host: ControlStore) -> None:
    strangers = [socket.create_connection(("127.0.0.1", host.port), 20.0) for _ in range(200)]
    try:
        with closing(ControlStore("127.0.0.1", host.port, 20.0, SECRET)) as holder:
            assert holder.get("note", 20.0, "missing") == b"here"
    finally:
        for stranger in strangers:
            stranger.close()


def test_a_stranger_that_dribbles_or_announces_much_is_hung_up_on(host, monkeypatch) -> None:
    address = ("127.0.0.1", host.port)
    monkeypatch.setattr(control_server, "_HANDSHAKE_S", 0.5)
    with socket.create_connection(address, 20.0) as stranger, pytest.raises(OSError):
        stranger.sendall(struct.pack("!i", 32))
        for _ in range(32):  # each byte comes in time
            time.sleep(0.1)
            stranger.sendall(b"\0")
    monkeypatch.setattr(control_server, "_HANDSHAKE_S", 600.0)
    with socket.create_connection(address, 20.0) as stranger:
        greeting = stranger.recv(1024)
        stranger.sendall(struct.pack("!i", 33))  # more than the random bytes that are expected
        while stranger.recv(1024):
            pass
    assert greeting.startswith(b"megatron-policy refit ") and untouched(host)


@pytest.mark.parametrize(
    "greeting", [b"megatron-policy refit 2\n", b"SSH-2.0-OpenSSH_9.6 Debian\r\n"]
)
def test_a_host_of_another_version_is_named_as_such(greeting: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as threads:
        board = ControlStore("127.0.0.1", server.getsockname()[1], 20.0, SECRET)
        asked = threads.submit(board.find, "note")
        connection, _ = server.accept()
        with connection:
            connection.sendall(greeting + bytes(32))
            with pytest.raises(RefitError, match="not a refit group of this version"):
                asked.result(20)


def test_a_board_that_is_closed_listens_no_more(host: ControlStore) -> None:
    other = ControlStore("127.0.0.1", host.port, 0.5, SECRET)
    assert other.find("note") == b"here"
    host.close()
    with pytest.raises(RefitError, match="cannot be reached"):
        other.find("note")


@pytest.mark.parametrize("secret", ["", "short", None, b"bytes of sixteen or more"])
def test_a_secret_that_can_be_guessed_is_refused(secret: Any) -> None:
    with pytest.raises(ConfigError, match="16 characters or more"):
        ControlStore("127.0.0.1", 1, 1.0, secret)
    assert len({new_secret(), new_secret()}) == 2
