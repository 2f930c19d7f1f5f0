"""Ports reserved for ranks: nobody else is given one, and a listener can still be opened at it."""

from __future__ import annotations

import random
import socket
from collections.abc import Sequence

import pytest
from torch import distributed as dist

from megatron_policy.coordination import rendezvous
from megatron_policy.coordination.rendezvous import PORTS, reserved_port


@pytest.fixture
def in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every reservation tries the same ports in the same order."""
    order = random.sample(PORTS, 50)

    def sample(_: Sequence[int], __: int) -> Sequence[int]:
        return order

    monkeypatch.setattr(rendezvous.random, "sample", sample)


@pytest.mark.usefixtures("in_order")
def test_a_reserved_port_is_given_to_nobody_else_until_it_is_free_again() -> None:
    with reserved_port() as one, reserved_port() as two, reserved_port() as three:
        assert len({one, two, three}) == 3
    with (
        reserved_port() as port,
        socket.create_server(("127.0.0.1", port)),
        reserved_port() as other,
    ):
        assert port == one and other != port


def test_ranks_meet_at_a_reserved_port() -> None:
    with reserved_port() as port:
        store = dist.TCPStore("127.0.0.1", port, 1, True)
        store.set("key", "value")
        assert store.get("key") == b"value"


def test_a_machine_without_free_ports_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with reserved_port() as port:
        monkeypatch.setattr(rendezvous, "PORTS", range(port, port + 1))
        with pytest.raises(OSError, match=f"no free port between {port} and {port}"):
            reserved_port().__enter__()
