"""The worker's methods that fetch their rows from the host's data plane, using the host's mixin."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from megatron_policy.device.process_groups import new_group
from megatron_policy.hosts.nemo_rl.host_imports import part
from megatron_policy.parallel.topology import Coords, Topology

if TYPE_CHECKING:
    from megatron_policy.policy import MegatronPolicy

_MODULE, _MIXIN = "nemo_rl.data_plane.worker_mixin", "TQWorkerMixin"
_FORWARDED = (
    "train",
    "get_logprobs",
    "get_reference_policy_logprobs",
    "begin_train_step",
    "train_microbatch",
    "finish_train_step",
    "abort_train_step",
)
"""The methods that the mixin calls on the worker it is mixed into."""


class DataPlane:
    """Training and inference on rows that the worker fetches (NeMo RL from 0.7 on).

    The host's mixin fetches, packs and writes back; it is imported at the first call, and given
    this worker's methods. NotImplementedError if the host has none.
    """

    policy: MegatronPolicy
    _host_config: Mapping[str, Any]
    """The host's own config mapping, which its mixin reads."""
    _tokenizer: Any
    _made_seat: Any = None

    def setup_data_plane(self, cfg: Any) -> None:
        """Connect to the data plane that the driver has started."""
        self._seat("setup_data_plane").setup_data_plane(cfg)

    def train_presharded(self, **call: Any) -> Any:
        """`train` on the rows that `meta` names."""
        return self._seat("train_presharded").train_presharded(**call)

    def get_logprobs_presharded(self, **call: Any) -> Any:
        """`get_logprobs` on the rows that `meta` names, written back as `prev_logprobs`."""
        return self._seat("get_logprobs_presharded").get_logprobs_presharded(**call)

    def get_reference_policy_logprobs_presharded(self, **call: Any) -> Any:
        """The same under the initial weights, written back as `reference_policy_logprobs`."""
        seat = self._seat("get_reference_policy_logprobs_presharded")
        return seat.get_reference_policy_logprobs_presharded(**call)

    def begin_train_step_presharded(self, **call: Any) -> Any:
        """`begin_train_step`."""
        return self._seat("begin_train_step_presharded").begin_train_step_presharded(**call)

    def train_microbatch_presharded(self, **call: Any) -> Any:
        """`train_microbatch` on the rows that `meta` names."""
        return self._seat("train_microbatch_presharded").train_microbatch_presharded(**call)

    def finish_train_step_presharded(self, **call: Any) -> Any:
        """`finish_train_step`, and whether this rank's result is the one to use."""
        return self._seat("finish_train_step_presharded").finish_train_step_presharded(**call)

    def abort_train_step_presharded(self, **call: Any) -> Any:
        """`abort_train_step`."""
        return self._seat("abort_train_step_presharded").abort_train_step_presharded(**call)

    def _seat(self, method: str) -> Any:
        if self._made_seat is None:
            self._made_seat = _make_seat(self, method)
        if not hasattr(self._made_seat, method):
            raise NotImplementedError(
                f"{method} is not implemented: this NeMo RL's {_MIXIN} lacks it"
            )
        return self._made_seat


def _make_seat(worker: DataPlane, method: str) -> Any:
    """An instance of the host's mixin with the methods of `worker`."""
    try:
        mixin = part(_MODULE, _MIXIN)
    except ImportError as error:
        raise NotImplementedError(
            f"{method} is not implemented: rows come from NeMo RL's data plane, whose {_MODULE} "
            f"cannot be imported here: {error}"
        ) from error
    seat = type("DataPlaneSeat", (mixin,), {})()
    seat.cfg, seat.tokenizer = worker._host_config, worker._tokenizer
    for name in _FORWARDED:
        if hasattr(worker, name):
            setattr(seat, name, getattr(worker, name))
    coords, timeout_s = worker.policy.coords, worker.policy.config.collective_timeout_s
    replica = _replica_group(worker.policy.topology, coords, timeout_s)
    seat._get_replica_group = lambda: replica
    seat._local_coords = lambda: {
        "pipeline_parallel": coords.pp,
        "context_parallel": coords.cp,
        "tensor_parallel": coords.tp,
    }
    return seat


def _replica_group(topology: Topology, own: Coords, timeout_s: float) -> dist.ProcessGroup | None:
    """The ranks of this data-parallel replica, its first rank first; None if it has only one.

    Collective over all ranks: the first call of any method here is on all workers.
    """
    if topology.world_size == topology.dp:
        return None
    found: dist.ProcessGroup | None = None
    for dp in range(topology.dp):
        ranks = [rank for rank in range(topology.world_size) if topology.coords(rank).dp == dp]
        # Torch's default timeout would be three times that of all other groups.
        group = new_group(ranks, timeout_s)
        found = group if dp == own.dp else found
    return found
