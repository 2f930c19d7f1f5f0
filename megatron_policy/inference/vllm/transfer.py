"""The trainer's side of vLLM's weight transfer: a refit whose requests are the calls of vLLM's own
control plane. The engine's side is `transfer_engine.py`.

    policy.refit(WeightTransfer(client))

A request is one `update_weights`; its tensors are in memory shared with vLLM's workers, as in the
stream over a socket. A trainer needs no vLLM for it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from megatron_policy.coordination.timeouts import start_thread
from megatron_policy.dtypes import name_dtype
from megatron_policy.errors import RefitError
from megatron_policy.refit.transports.ipc.protocol import ACK
from megatron_policy.refit.transports.ipc.shared_memory import DIRECTORY
from megatron_policy.refit.transports.ipc.transport import IpcStream

if TYPE_CHECKING:
    from megatron_policy.inference.vllm.weight_source import SyncClient
    from megatron_policy.refit.buffers import BufferSlice
    from megatron_policy.refit.delivery import TransportSession
    from megatron_policy.refit.exporter import Exporter
    from megatron_policy.refit.manifest import RefitManifest
    from megatron_policy.refit.plan import RefitPlan, RefitTensor

_log = logging.getLogger(__name__)

BACKEND = "megatron_policy"
"""The backend of vLLM's `WeightTransferConfig` that receives these."""


class WeightTransfer:
    """A transport: rank 0 sends all weights to every worker of one vLLM on its machine."""

    def __init__(
        self,
        client: SyncClient | None,
        buffer_bytes: int | None = None,
        *,
        directory: str = DIRECTORY,
    ) -> None:
        """`client` calls vLLM: one of vLLM's own (`HTTPVLLMWeightSyncClient`, ...), or any object
        with these methods; only rank 0 needs it. The others are those of `IpcStream`.
        """
        self._client = client
        self._engine = EngineCalls()
        self._calls: _Calls | None = None
        self._stream = IpcStream(
            {0: BACKEND}, buffer_bytes, directory=directory, connect=self._connect
        )

    def init_info(self, exporter: Exporter, *, staged: bool = True) -> dict[str, Any]:
        """What `client.init_weight_transfer_engine` is called with, once before the first refit:
        the tensors that vLLM is to expect, others are refused before any is sent. With `staged`
        it keeps all of them aside until they are checked, so that a refused refit leaves it as it
        was; that takes memory for the whole model, unsharded, in every worker.
        """
        tensors = {
            name: [name_dtype(dtype), list(shape)]
            for name, (shape, dtype) in exporter.plan().info().items()
        }
        model = exporter.served_model.plain()
        return {"tensors": tensors, "model": model, "staged": staged}

    def plan(self, exporter: Exporter) -> RefitPlan | None:
        """Everything, on all ranks that gather with rank 0."""
        return self._stream.plan(exporter)

    def open(self, exporter: Exporter, plan: RefitPlan) -> _Session | None:
        """Begin the update on rank 0. RefitError if vLLM does not begin it in time, or expects
        other weights.
        """
        stream = self._stream.open(exporter, plan)
        if stream is None:
            return None
        assert self._calls is not None
        return _Session(stream, self._calls, exporter)

    def _connect(self, address: str, timeout_s: float) -> _Calls:
        if self._client is None:
            raise RefitError("rank 0 has no client to call vLLM with: give WeightTransfer one")
        self._calls = _Calls(self._client, self._engine, timeout_s)
        self._calls.begin()
        return self._calls


class _Session:
    """Rank 0's end of one update; see `TransportSession`."""

    def __init__(self, stream: TransportSession, calls: _Calls, exporter: Exporter) -> None:
        self._stream, self._calls, self._exporter = stream, calls, exporter

    def place(self, tensor: RefitTensor) -> BufferSlice | None:
        return self._stream.place(tensor)

    def filled(self, tensor: RefitTensor, target: BufferSlice) -> None:
        self._stream.filled(tensor, target)

    def finish(self, manifest: RefitManifest) -> None:
        self._stream.finish(manifest)  # returns when every worker has accepted it
        with self._exporter.ranks.alive():
            self._calls.finish(str(manifest.step))

    def close(self) -> None:
        self._stream.close()


class _Calls:
    """The line of one update: each request is a call of `update_weights`, and its return the
    reply. Calls run in a thread, while the trainer fills the next buffer.
    """

    def __init__(self, client: SyncClient, engine: EngineCalls, timeout_s: float) -> None:
        self._client, self._engine, self._timeout_s = client, engine, timeout_s
        self._reply: Future[None] | None = None
        self._open = False  # vLLM waits for more of the update

    def begin(self) -> None:
        """Begin the update."""
        start = "begin a weight update", self._client.start_weight_update, self._timeout_s
        try:
            self._engine.run(*start)
        except LateAnswer:
            raise
        except RefitError:
            self._give_up()  # it may be in the update of a trainer that is gone
            self._engine.run(*start)
        self._open = True

    def send(self, question: Callable[[], bytes], /) -> None:
        request = {"request": question().decode()}
        self._reply = self._engine.begin(lambda: self._client.update_weights(request))

    def receive(self) -> bytes:
        assert self._reply is not None
        reply, self._reply = self._reply, None
        self._open = False
        self._engine.wait(reply, "take the weights", self._timeout_s)
        self._open = True
        return ACK

    def finish(self, version: str) -> None:
        """End the update, whose weights were accepted."""
        self._open = False
        finish = self._client.finish_weight_update
        self._engine.run("finish the weight update", lambda: finish(version), self._timeout_s)

    def close(self) -> None:
        """Tell vLLM, if it waits for more, that none comes."""
        try:
            if self._reply is not None:
                self.receive()
        finally:
            if self._open:
                self._give_up()
            self._open = False

    def _give_up(self) -> None:
        """Have vLLM's workers end the update, as they do when a part of it fails."""
        part = {"gave_up": "its log says what failed"}
        end = self._client.update_weights
        try:
            self._engine.run("end the update", lambda: end(part), self._timeout_s)
        except RefitError as error:
            _log.debug("vLLM has ended the update: %s", error)


_T = TypeVar("_T")


class LateAnswer(RefitError):
    """vLLM has not answered in time."""


class EngineCalls:
    """The calls of one vLLM, each in a thread. While one that was given up has not returned, no
    other is begun: vLLM may be in the midst of it, and take the one for a part of the other.
    """

    def __init__(self) -> None:
        self._late: tuple[str, Future[Any]] | None = None

    def begin(self, step: Callable[[], _T]) -> Future[_T]:
        """Begin a call; LateAnswer while an earlier one is under way that was given up."""
        if self._late is not None and not self._late[1].done():
            raise LateAnswer(
                f"vLLM has still not returned from an earlier call to {self._late[0]}, and takes "
                "no weights until it has: restart the engine, and make the transport anew"
            )
        outcome: Future[_T] = Future()

        def run() -> None:
            try:
                outcome.set_result(step())
            except Exception as error:
                outcome.set_exception(error)

        if not start_thread(threading.Thread(target=run, daemon=True, name="vllm-call")):
            run()
        return outcome

    def wait(self, call: Future[_T], what: str, timeout_s: float) -> _T:
        """What the call returns. RefitError if it fails; LateAnswer if it takes longer than
        `timeout_s` seconds: it is then given up.
        """
        try:
            return call.result(timeout_s)
        except TimeoutError as error:
            if call.done():  # it is the client's own
                raise RefitError(f"vLLM could not {what}: {error}") from error
            self._late = (what, call)
            raise LateAnswer(
                f"vLLM did not {what} within {timeout_s:g} s: is it running, and is it idle? If it "
                "never returns from that, restart the engine, and make the transport anew"
            ) from error
        except Exception as error:
            raise RefitError(f"vLLM could not {what}: {error}") from error

    def run(self, what: str, step: Callable[[], _T], timeout_s: float) -> _T:
        """Begin a call and wait for it."""
        return self.wait(self.begin(step), what, timeout_s)
