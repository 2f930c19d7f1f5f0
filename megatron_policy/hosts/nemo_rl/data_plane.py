"""Training and inference on rows that the worker fetches from the host's data plane (NeMo RL from
0.7 on), by the host's own mixin.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from megatron_policy.device.process_groups import new_group
from megatron_policy.hosts.nemo_rl.host_imports import import_part

if TYPE_CHECKING:
    from megatron_policy.policy import MegatronPolicy

_MODULE, _MIXIN = "nemo_rl.data_plane.worker_mixin", "TQWorkerMixin"
_CALLED = (
    "train",
    "get_logprobs",
    "get_reference_policy_logprobs",
    "begin_train_step",
    "train_microbatch",
    "finish_train_step",
    "abort_train_step",
)
"""The methods that the mixin calls on the worker it is mixed into."""


def fetch_rows(method: str) -> Callable[..., Any]:
    """A worker's `method` that the host's mixin carries out: it fetches the rows that `meta` names,
    packs them, calls the worker and writes back. NotImplementedError if the host has none.
    """

    def call(self: Any, **arguments: Any) -> Any:
        """What the host's mixin does under this name, with rows of its data plane and this worker.
        NotImplementedError if the host has none.
        """
        if self.data_plane is None:
            self.data_plane = _connect(self, method)
        if not hasattr(self.data_plane, method):
            raise NotImplementedError(
                f"{method} is not implemented: this NeMo RL's {_MIXIN} lacks it"
            )
        return getattr(self.data_plane, method)(**arguments)

    call.__name__ = call.__qualname__ = method
    return call


def _connect(worker: Any, method: str) -> Any:
    """An instance of the host's mixin with the methods of `worker`."""
    try:
        mixin = import_part(_MODULE, _MIXIN)
    except ImportError as error:
        raise NotImplementedError(
            f"{method} is not implemented: rows come from NeMo RL's data plane, whose {_MODULE} "
            f"cannot be imported here: {error}"
        ) from error
    seat = type("DataPlaneSeat", (mixin,), {})()
    seat.cfg, seat.tokenizer = worker.host_config, worker.policy.tokenizer
    for name in _CALLED:
        setattr(seat, name, getattr(worker, name))
    coords, replica = worker.policy.coords, _replica_group(worker.policy)
    seat._get_replica_group = lambda: replica
    seat._local_coords = lambda: {
        "pipeline_parallel": coords.pp,
        "context_parallel": coords.cp,
        "tensor_parallel": coords.tp,
    }
    return seat


def _replica_group(policy: MegatronPolicy) -> dist.ProcessGroup | None:
    """The ranks of this data-parallel replica, its first rank first; None if it has only one.

    Collective over all ranks: the first call of any method here is on all workers.
    """
    topology, found = policy.topology, None
    if topology.world_size == topology.dp:
        return None
    for dp in range(topology.dp):
        ranks = [rank for rank in range(topology.world_size) if topology.coords(rank).dp == dp]
        # Torch's default timeout would be three times that of all other groups.
        group = new_group(ranks, policy.config.collective_timeout_s)
        found = group if dp == policy.coords.dp else found
    return found
