"""Process groups of a topology; the only module that uses Megatron-Core's global parallel state."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_policy.errors import ConfigError
from megatron_policy.parallel.groups import Groups
from megatron_policy.parallel.topology import Topology

MEGATRON_ORDER = "tp-cp-ep-dp-pp"


def make_groups(topology: Topology, timeout_s: float) -> Groups:
    """Create Megatron-Core's process groups for `topology`, every collective bounded by `timeout_s`
    seconds.
    """
    assert dist.get_world_size() == topology.world_size, (dist.get_world_size(), topology)
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
    return Groups(
        tp=parallel_state.get_tensor_model_parallel_group(),
        pp=parallel_state.get_pipeline_model_parallel_group(),
        dp=parallel_state.get_data_parallel_group(),
        cp=parallel_state.get_context_parallel_group(),
        dp_cp=parallel_state.get_data_parallel_group(with_context_parallel=True),
    )


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


def refuse_second_policy() -> None:
    """ConfigError if this process already has Megatron-Core's groups: they are global, so it can
    hold one policy at a time.
    """
    if parallel_state.model_parallel_is_initialized():
        raise ConfigError(
            "another policy is already open in this process: call its shutdown() before making a "
            "new one"
        )


def drop_groups() -> None:
    """Destroy Megatron-Core's process groups, so that another topology can be made in the same
    process.
    """
    if not parallel_state.model_parallel_is_initialized():
        return
    # Megatron-Core only forgets them; each would keep its threads and sockets for good. (`None`
    # stands for the default group, which is not ours to destroy.)
    made = [group for group in parallel_state._global_process_group_list or () if group is not None]
    parallel_state.destroy_model_parallel()
    for group in made:
        dist.destroy_process_group(group)
