"""What a driver has its workers send to inference engines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from megatron_policy.coordination.authenticated_connection import new_secret
from megatron_policy.errors import ConfigError, RefitError, WorkerError
from megatron_policy.monitoring.metrics_log import MetricsLog
from megatron_policy.refit.arguments import check_transport
from megatron_policy.refit.comparison import EngineComparison, Logprobs, Rows
from megatron_policy.refit.probe import EngineProbe, ProbeFacts, run_probe
from megatron_policy.refit.transports.collective.shards import ShardRefits
from megatron_policy.refit.transports.collective.transport import CollectiveTransport
from megatron_policy.workers.checks import refuse_unknown
from megatron_policy.workers.cluster.group import WorkerGroup

if TYPE_CHECKING:
    from megatron_policy.policy.weight_exports import Destination
    from megatron_policy.refit.manifest import RefitInfo, RefitManifest

T = TypeVar("T")


class RefitDriver:
    """Hands the workers' weights over to engines, on the same or other devices."""

    def __init__(self, workers: WorkerGroup, metrics: MetricsLog) -> None:
        self._workers, self._metrics, self._secret = workers, metrics, new_secret()
        self._begun = False

    def refit(self, transport: Destination, *, adapters: bool = False) -> RefitManifest:
        """Send the weights, or the `adapters` alone, as `MegatronPolicy.refit` does on each worker;
        returns what all of them have sent. For a group that engines joined, call
        `broadcast_weights_for_collective`.
        """
        _check_sendable(transport, "refit()")
        self.finish_refit()
        sent = self._workers.run_all("refit", transport=transport, adapters=adapters)
        return self._join(sent)

    def begin_refit(self, transport: Destination, *, adapters: bool = False) -> None:
        """Begin a refit of the weights as they are now, as `MegatronPolicy.begin_refit` does on
        each worker, and return when they are copied to host memory. For a group that engines
        joined, call `broadcast_weights_for_collective(detached=True)`.
        """
        _check_sendable(transport, "begin_refit()")
        self.finish_refit()
        self._workers.run_all("begin_refit", transport=transport, adapters=adapters)
        self._begun = True

    def finish_refit(self) -> RefitManifest | None:
        """Wait for the refit that was begun; return what all workers have sent, or None if none is
        under way. RefitError if it has failed.
        """
        if not self._begun:
            return None
        self._begun = False
        sent = self._workers.run_all("finish_refit")
        return None if None in sent else self._join(sent)  # another call may have waited for it

    def close(self) -> None:
        """Wait for the refit that was begun, if the workers still answer."""
        if self._workers.usable:
            self.finish_refit()

    def _join(self, sent: Sequence[RefitManifest]) -> RefitManifest:
        """What all workers have sent together, recorded."""
        tensors = {name: each for manifest in sent for name, each in manifest.tensors.items()}
        slowest = max(manifest.seconds for manifest in sent)
        changed = sum(manifest.changed_bytes for manifest in sent)
        whole = replace(sent[0], tensors=tensors, changed_bytes=changed, seconds=slowest)
        self._metrics.sent(whole)
        return whole

    def probe(self, probe: EngineProbe) -> EngineComparison:
        """Compare what an engine computes with what the workers do, as `MegatronPolicy.probe`;
        everything that `probe` calls is called here.
        """
        self.finish_refit()
        return run_probe(probe, _ProbedWorkers(self._workers))

    def prepare_refit_info(
        self, with_numel: bool = False, *, adapters: bool = False, as_stored: bool = False
    ) -> RefitInfo:
        """{HF name: (shape, dtype)} of all that is sent, or with the number of elements too, and
        its `model`: what engines have to set up for it. With `adapters` of those alone; with
        `as_stored` of directories, which have the checkpoint's dtypes.
        """
        options = {"with_numel": with_numel, "adapters": adapters, "as_stored": as_stored}
        infos: list[RefitInfo] = self._workers.run_all("prepare_refit_info", **options)
        return infos[0]

    def prepare_info_for_collective(self, *, adapters: bool = False) -> RefitInfo:
        """As `prepare_refit_info`, of what `broadcast_weights_for_collective` sends."""
        return self.prepare_refit_info(adapters=adapters)

    def get_refit_addresses(self) -> dict[str, str]:
        """{device id: ZeroMQ address} that `stream_weights_via_ipc_zmq` binds for engines."""
        devices = self._workers.run_all("report_device_id")
        return dict(zip(devices, self._workers.run_all("get_refit_address"), strict=True))

    def stream_weights_via_ipc_zmq(
        self,
        buffer_size_bytes: int | None = None,
        kv_scales: Any = None,
        *,
        adapters: bool = False,
    ) -> list[Any]:
        """Start sending all weights, or the `adapters` alone, to the engine on each worker's
        device; return Ray's futures of each worker's bytes, seconds and rate
        (`RefitManifest.speed`), which raise RefitError if one refuses.
        """
        options = {"buffer_size_bytes": buffer_size_bytes, "kv_scales": kv_scales}
        return self._workers.futures("stream_weights_via_ipc_zmq", adapters=adapters, **options)

    def prepare_weights_for_ipc(
        self, _refit_buffer_size_gb: float | None = None, *, adapters: bool = False
    ) -> list[list[str]]:
        """HF names in order, in groups of at most that many GiB (by default what the worker with
        the least free memory can afford); a larger tensor is a group of its own.
        """
        answers = self._workers.run_all("prepare_weights_for_ipc", adapters=adapters)
        limit = min(available for _, available in answers)
        if _refit_buffer_size_gb is not None:
            limit = _refit_buffer_size_gb * 2**30
        groups: list[list[str]] = []
        left = 0.0
        for name, nbytes in answers[0][0]:
            if not groups or nbytes > left:
                groups.append([])
                left = limit
            groups[-1].append(name)
            left -= nbytes
        return groups

    def get_weights_ipc_handles(self, keys: list[str], *, adapters: bool = False) -> dict[str, Any]:
        """{device id: handles} of these tensors, of all workers."""
        options = {"keys": keys, "adapters": adapters}
        return unite(self._workers.run_all("get_weights_ipc_handles", **options))

    def get_refit_manifest(self) -> dict[str, Any]:
        """{device id: Manifest} of what `get_weights_ipc_handles` has exported."""
        return unite(self._workers.run_all("get_refit_manifest"))

    def init_collective(
        self,
        ip: str,
        port: int,
        world_size: int,
        train_world_size: int | None = None,
        secret: str | None = None,
        **options: Any,
    ) -> list[Any]:
        """Start meeting the engines' ranks, which need `secret` (None: that of
        `get_refit_secret`); return Ray's futures. See `EngineRefits.init_collective`.
        """
        refuse_unknown("init_collective", options)
        self._secret = secret or self._secret
        sizes = {"world_size": world_size, "train_world_size": train_world_size}
        where = {"ip": ip, "port": port, "secret": self._secret}
        return self._workers.futures("init_collective", **where, **sizes)

    def get_refit_secret(self) -> str:
        """What an engine needs to join the group of `init_collective`: made for this policy, and
        the same before and after that call.
        """
        return self._secret

    def broadcast_weights_for_collective(
        self,
        kv_scales: Any = None,
        buffer_size_bytes: int | None = None,
        num_buffers: int | None = None,
        *,
        adapters: bool = False,
        detached: bool = False,
    ) -> list[Any]:
        """Start sending all weights, or the `adapters` alone, to the engines that joined; return
        Ray's futures of each worker's bytes, seconds and rate (`RefitManifest.speed`), which raise
        RefitError if one refuses. With `detached` they are there, without a value, when the weights
        are copied to host memory: see `begin_refit`.
        """
        self.finish_refit()
        options = {"kv_scales": kv_scales, "buffer_size_bytes": buffer_size_bytes}
        if detached:
            self._begun = True
            return self._workers.futures("begin_refit_for_collective", adapters=adapters, **options)
        return self._workers.futures(
            "broadcast_weights_for_collective",
            num_buffers=num_buffers,
            adapters=adapters,
            **options,
        )


class _ProbedWorkers:
    """Workers that a driver probes with; see `ProbedPolicy`."""

    def __init__(self, workers: WorkerGroup) -> None:
        self._workers = workers

    def probe_facts(self, adapters: bool) -> ProbeFacts:
        facts: list[ProbeFacts] = self._workers.run_all("probe_facts", adapters=adapters)
        return facts[0]

    def probe_logprobs(self, rows: Rows) -> Logprobs:
        found: list[Logprobs] = self._workers.run_all("probe_logprobs", rows=rows)
        return found[0]

    def disturb_weights(self, kind: str | None, adapters: bool) -> None:
        self._workers.run_all("disturb_weights", kind=kind, adapters=adapters)

    def once(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except (RefitError, WorkerError):
            raise
        except Exception as error:
            raise RefitError(
                f"the engine could not be asked: {type(error).__name__}: {error}"
            ) from error

    def together(self, hand_over: Callable[[], T]) -> T:
        return hand_over()


def _check_sendable(transport: Destination, call: str) -> None:
    check_transport(transport, call)
    groups = CollectiveTransport | ShardRefits
    if isinstance(getattr(transport, "transport", transport), groups):
        raise ConfigError(
            "a group's transport cannot be sent to the workers: call init_collective and "
            "broadcast_weights_for_collective"
        )


def unite(answers: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """All workers' results by device, merged."""
    united: dict[str, Any] = {}
    for answer in answers:
        if twice := sorted(united.keys() & answer.keys()):
            raise RefitError(f"two workers report the same device: {', '.join(twice)}")
        united |= answer
    return united
