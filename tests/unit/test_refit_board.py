"""The board: notes of any size, and no call that waits for longer than it was told."""

from __future__ import annotations

import time

import pytest

from megatron_policy.errors import RefitError
from megatron_policy.refit.board import Board, within
from megatron_policy.rendezvous import reserved_port


def test_notes_of_any_size_arrive_whole_and_go_whole() -> None:
    with reserved_port() as port:
        host, other = Board("127.0.0.1", port, 20.0, host=True), Board("127.0.0.1", port, 20.0)
        for size in (0, 1, 4 * 2**20, 9 * 2**20 + 5):
            content = bytes(range(256)) * (size // 256 + 1)
            host.put("note", content[:size])
            assert other.get("note", 20.0, "missing") == other.find("note") == content[:size]
        keys = host._store.num_keys()
        host.drop(["note", "none"])
        assert host._store.num_keys() == keys - 3
        assert other.find("note") is None
        other.close()
        host.close()


def test_a_note_that_does_not_come_is_missed_in_time_and_the_board_goes_on() -> None:
    with reserved_port() as port:
        host = Board("127.0.0.1", port, 20.0, host=True)
        with pytest.raises(RefitError, match="where is it"):
            host.get("note", 0.1, "where is it")
        host.put("note", b"here")
        assert host.get("note", 20.0, "where is it") == b"here"
        host.close()


def test_a_board_without_a_host_says_so() -> None:
    with reserved_port() as port, pytest.raises(RefitError, match=f"at 127.0.0.1:{port}, cannot"):
        Board("127.0.0.1", port, 1.0).get("note", 1.0, "missing")


def test_a_step_that_hangs_is_left_behind() -> None:
    with pytest.raises(TimeoutError, match=r"no answer within 0\.1 s"):
        within(0.1, lambda: time.sleep(5))


def test_a_step_that_fails_raises_what_it_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        within(5.0, lambda: 1 // 0)
