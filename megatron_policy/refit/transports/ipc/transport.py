"""Streams weights to an engine on the same machine: packs in two shared buffers, announced over a
socket. The messages are in `protocol`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

import torch

from megatron_policy import device
from megatron_policy.config.numbers import SMALLEST_BUFFER_BYTES
from megatron_policy.coordination.timeouts import ENGINE_SHARE
from megatron_policy.errors import ConfigError, RefitError
from megatron_policy.refit.arguments import check_count
from megatron_policy.refit.buffers import BufferSlice
from megatron_policy.refit.manifest import RefitManifest, StagedVersion
from megatron_policy.refit.plan import Pack, RefitPlan, RefitTensor, pack_tensors
from megatron_policy.refit.transports.ipc import protocol
from megatron_policy.refit.transports.ipc.protocol import Dialect
from megatron_policy.refit.transports.ipc.shared_memory import DIRECTORY, ExportedBuffer
from megatron_policy.refit.transports.ipc.sockets.request_reply import RequestSocket

if TYPE_CHECKING:
    from megatron_policy.refit.exporter import Exporter

HOST_BUFFER_BYTES = 32 * 2**20  # new pages cost more than more packs; containers have 64 MiB
GPU_BUFFER_BYTES = 512 * 2**20


def address_of(device_id: str) -> str:
    """Where the trainer on that device listens for the engine on it (NeMo RL's rule)."""
    return f"ipc:///tmp/{device_id}.sock"


class Line(Protocol):
    """Carries requests to one engine, and its replies; see `RequestSocket`."""

    def send(self, question: Callable[[], bytes], /) -> None:
        """Send the request that `question` returns; the previous one has been answered."""

    def receive(self) -> bytes:
        """The reply."""

    def close(self) -> None:
        """Called once."""


Connect = Callable[[str, float], Line]
"""Connects to the engine at an address; no wait of the line is longer than the seconds given."""


def listen(address: str, timeout_s: float) -> Line:
    """A socket at the address, to which an engine connects."""
    return RequestSocket(address, "engine", timeout_s)


class IpcStream:
    """A transport: every rank that has an engine on its machine streams all weights to it."""

    def __init__(
        self,
        address: str | Mapping[int, str] | None = None,
        buffer_bytes: int | None = None,
        *,
        dialect: Dialect | None = None,
        directory: str = DIRECTORY,
        connect: Connect = listen,
    ) -> None:
        """`address` is where rank 0 listens for the only engine, or where each rank listens for
        its own; None: every rank listens at its own device's address.

        `buffer_bytes` are exported to an engine at a time, in two halves (None: 512 MiB of a GPU,
        or 32 MiB of the host, allocated in `directory`); a tensor larger than a half is sent alone,
        in memory of its own size. ConfigError for less than 1024 bytes. Nothing waits longer than
        the exporter's timeout. `connect` makes the line to an engine.
        """
        if buffer_bytes is not None:
            check_count(buffer_bytes, "buffer_bytes", SMALLEST_BUFFER_BYTES)
        if address is not None and not isinstance(address, str | Mapping):
            raise ConfigError(
                f"the address {address!r:.80} is neither an ipc:// address nor one for each rank "
                "with an engine, as in {0: 'ipc:///tmp/engine.sock'}: give one of these, or None"
            )
        self._addresses = {0: address} if isinstance(address, str) else address
        self._buffer_bytes = buffer_bytes
        self._dialect = dialect or Dialect()
        self._directory, self._connect = directory, connect

    def plan(self, exporter: Exporter) -> RefitPlan | None:
        """Everything, on all ranks that gather with one that serves an engine; see `Transport`."""
        grid = exporter.topology
        if self._addresses is None:
            return exporter.plan()
        if absent := [rank for rank in self._addresses if not 0 <= rank < grid.world_size]:
            raise ConfigError(
                f"there are no ranks {absent} to send weights from: {grid.world_size} ranks run"
            )
        served = set(map(grid.block_of, self._addresses))
        return exporter.plan() if grid.block_of(exporter.rank) in served else None

    def open(self, exporter: Exporter, plan: RefitPlan) -> _Session | None:
        """Bind this rank's socket, if it has an engine. RefitError if it cannot."""
        address = self._address_on(exporter.rank)
        if address is None:
            return None
        on_host = exporter.device.type == "cpu"
        half = (self._buffer_bytes or (HOST_BUFFER_BYTES if on_host else GPU_BUFFER_BYTES)) // 2
        buffers = _PackBuffers(
            pack_tensors(plan.tensors, half), half, exporter.device, self._directory
        )
        line = self._connect(address, exporter.timeout_s * ENGINE_SHARE)
        session = _Session(line, buffers, self._dialect, exporter)
        try:
            opening = self._dialect.encode_opening(plan.info(), exporter.served_model)
            if opening is not None:
                session.send(lambda: opening)
        except BaseException:
            session.close()
            raise
        return session

    def ask(self, exporter: Exporter) -> list[StagedVersion]:
        """The version of this rank's engine, if it has one; see `AskingTransport`."""
        address = self._address_on(exporter.rank)
        if address is None:
            return []
        if self._dialect.end is not None:
            raise RefitError("a host's own receiver takes whole weights: refit with the stream")
        line = self._connect(address, exporter.timeout_s * ENGINE_SHARE)
        try:
            line.send(protocol.encode_question)
            return [protocol.parse_version(line.receive())]
        finally:
            line.close()

    def _address_on(self, rank: int) -> str | None:
        if self._addresses is None:
            return address_of(device.device_id())
        return self._addresses.get(rank)


class _PackBuffers:
    """Provides the buffers of packs: two used alternately, and a separate one for a large pack."""

    def __init__(
        self, packs: tuple[Pack, ...], half: int, where: torch.device, directory: str
    ) -> None:
        self._packs = iter(packs)
        self._half = half
        self._size = max((pack.nbytes for pack in packs if pack.nbytes <= half), default=0)
        self._where, self._directory = where, directory
        self._halves: list[ExportedBuffer] = []
        self._count = 0
        self.exported: ExportedBuffer | None = None
        self.pack = Pack((), (), 0)

    def next(self) -> None:
        """Begin the next pack: sets `pack`, and `exported` as its buffer."""
        self.pack = next(self._packs)
        if self.alone:
            self.exported = ExportedBuffer(self.pack.nbytes, self._where, self._directory)
            return
        # The half used longer ago: it was acknowledged before the other one was sent.
        again = self._halves.pop(0) if len(self._halves) == 2 else None
        self.exported = again or ExportedBuffer(self._size, self._where, self._directory)
        self._halves.append(self.exported)

    @property
    def alone(self) -> bool:
        """Whether the pack has its own buffer."""
        return self.pack.nbytes > self._half

    def take_back(self) -> None:
        """Release the pack's buffer, if it has its own."""
        if self.alone and self.exported is not None:
            self.exported.close()
            self.exported = None

    def close(self) -> None:
        """Release all buffers."""
        self.take_back()
        for exported in self._halves:
            exported.close()
        self._halves.clear()


class _Session:
    """One rank's end of one stream; see `TransportSession`."""

    def __init__(
        self, line: Line, buffers: _PackBuffers, dialect: Dialect, exporter: Exporter
    ) -> None:
        self._exporter = exporter
        self._line, self._buffers, self._dialect = line, buffers, dialect
        self._at = 0  # number of tensors in the pack so far
        self._asked = False  # whether a reply is outstanding

    def place(self, tensor: RefitTensor) -> BufferSlice | None:
        if self._at == 0:
            self._buffers.next()
        pack, exported = self._buffers.pack, self._buffers.exported
        assert exported is not None and pack.tensors[self._at].name == tensor.name, tensor.name
        return BufferSlice(exported.buffer, pack.offsets[self._at])

    def filled(self, tensor: RefitTensor, target: BufferSlice) -> None:
        self._at += 1
        pack, exported = self._buffers.pack, self._buffers.exported
        if self._at < len(pack.tensors):
            return
        assert exported is not None
        dialect, names = self._dialect, [tensor.name for tensor in pack.tensors]
        # A handle is for single use: a repeated request makes a new one.
        self.send(
            lambda: dialect.encode_pack(protocol.PackMessage(exported.handle(), names, pack.nbytes))
        )
        self._at = 0
        if self._buffers.alone:
            self._receive()
            self._buffers.take_back()

    def finish(self, manifest: RefitManifest) -> None:
        with self._exporter.ranks.alive():  # for ranks that wait: the engine may be slow to load
            self._receive()
            self._buffers.close()  # the engine may need the memory when it loads
            self.send(lambda: self._dialect.encode_closing(manifest))
            self._receive()

    def close(self) -> None:
        try:
            self._line.close()
        finally:
            self._buffers.close()

    def send(self, question: Callable[[], bytes]) -> None:
        self._receive()
        self._line.send(question)
        self._asked = True

    def _receive(self) -> None:
        if self._asked:
            protocol.check_answer(self._line.receive())
        self._asked = False
