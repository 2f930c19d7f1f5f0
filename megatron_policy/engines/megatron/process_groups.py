"""Process groups of a topology; the only module that uses Megatron-Core's global parallel state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_policy.device import is_accelerated
from megatron_policy.device.process_groups import sharing_gloo_devices
from megatron_policy.errors import ConfigError
from megatron_policy.parallel.groups import Groups
from megatron_policy.parallel.topology import Topology

MEGATRON_ORDER = "tp-cp-ep-dp-pp"


@dataclass
class _Open:
    """Megatron-Core's groups, which are global, and how many policies of this process use them."""

    topology: Topology
    groups: Groups
    policies: int = 1


_open: _Open | None = None


def make_groups(topology: Topology, timeout_s: float) -> Groups:
    """Create Megatron-Core's process groups for `topology`, every collective bounded by `timeout_s`
    seconds. A further policy of the process gets those of the first, with their bound, if it has
    the same layout; ConfigError otherwise. `drop_groups` is to follow for each.
    """
    global _open
    assert dist.get_world_size() == topology.world_size, (dist.get_world_size(), topology)
    if (shared := _current()) is not None:
        check_same_layout(shared.topology, topology)
        shared.policies += 1
        return replace(shared.groups)  # which a policy forgets when it ends
    if parallel_state.model_parallel_is_initialized():
        raise ConfigError(
            "this process has process groups of Megatron-Core that are not of a policy, and there "
            "can be one set of them: make the policy in another process, or destroy them first"
        )
    with sharing_gloo_devices(), _one_group_of_each_rank_alone():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=topology.tp,
            pipeline_model_parallel_size=topology.pp,
            virtual_pipeline_model_parallel_size=topology.vpp if topology.vpp > 1 else None,
            context_parallel_size=topology.cp,
            expert_model_parallel_size=topology.ep,
            expert_tensor_parallel_size=topology.expert_tp,
            distributed_timeout_minutes=timedelta(seconds=timeout_s).total_seconds() / 60,
            order=MEGATRON_ORDER,
            create_gloo_process_groups=False,
        )
    groups = Groups(
        tp=parallel_state.get_tensor_model_parallel_group(),
        pp=parallel_state.get_pipeline_model_parallel_group(),
        dp=parallel_state.get_data_parallel_group(),
        cp=parallel_state.get_context_parallel_group(),
        dp_cp=parallel_state.get_data_parallel_group(with_context_parallel=True),
    )
    _open = _Open(topology, groups)
    return replace(groups)


@contextmanager
def _one_group_of_each_rank_alone() -> Iterator[None]:
    """Within this context Megatron-Core gets the same gloo group for every group that has a rank
    alone: up to seventeen, each with two threads, and with nobody to exchange anything with.
    """
    create = parallel_state.create_group
    alone: dict[int, Any] = {}

    def create_group(ranks: Sequence[int], *args: Any, **kwargs: Any) -> Any:
        if len(ranks) > 1 or is_accelerated():
            return create(ranks, *args, **kwargs)
        if (rank := ranks[0]) not in alone:
            alone[rank] = create(ranks, *args, **kwargs)
        return alone[rank]

    parallel_state.create_group = create_group
    try:
        yield
    finally:
        parallel_state.create_group = create


def _current() -> _Open | None:
    """The groups that policies of this process use, unless somebody else has destroyed them."""
    global _open
    if _open is not None and not (
        parallel_state.model_parallel_is_initialized()
        and parallel_state.get_tensor_model_parallel_group() is _open.groups.tp
    ):
        _open = None
    return _open


def check_same_layout(here: Topology, topology: Topology) -> None:
    """ConfigError naming the sizes in which a second layout of a process differs from the first."""
    pairs = [
        (each.name, getattr(here, each.name), getattr(topology, each.name))
        for each in fields(Topology)
    ]
    different = [
        f"{name} {wanted} (not {open_})" for name, open_, wanted in pairs if open_ != wanted
    ]
    if different:
        raise ConfigError(
            f"another policy is open in this process, in another layout: {', '.join(different)}. "
            "Policies of one process have one layout: give both the same sizes, or call the "
            "other's shutdown() first"
        )


def are_shared() -> bool:
    """Whether several policies of this process use the groups, and all else that Megatron-Core has
    once in a process.
    """
    shared = _current()
    return shared is not None and shared.policies > 1


def schedule_groups() -> ProcessGroupCollection:
    """The groups that a pipeline schedule uses by default, for one that is given its communicator:
    it then has to be given its groups too.
    """
    names = ["tp", "cp", "pp", "dp", "dp_cp", "tp_dp_cp", "embd", "pos_embd"]
    return ProcessGroupCollection.use_mpu_process_groups(names)


def embedding_group() -> dist.ProcessGroup:
    """The first and the last stage of this rank's pipeline, which can hold copies of an embedding.
    Only these two can ask for it.
    """
    group: dist.ProcessGroup = parallel_state.get_embedding_group()
    return group


def drop_groups() -> None:
    """Leave the groups of `make_groups`. The last policy of the process destroys them, so that
    another topology can be made in it.
    """
    global _open
    shared = _current()
    if shared is None:
        return
    shared.policies -= 1
    if shared.policies:
        return
    _open = None
    # Megatron-Core forgets most of them, and destroys none: each would keep its threads and sockets
    # for good. (`None` stands for the default group, which is not ours to destroy.)
    made = dict.fromkeys(parallel_state._global_process_group_list or ())
    made.pop(None, None)
    parallel_state.destroy_model_parallel()
    for name, value in vars(parallel_state).items():
        if isinstance(value, dist.ProcessGroup):
            setattr(parallel_state, name, None)
    for group in made:
        dist.destroy_process_group(group)
