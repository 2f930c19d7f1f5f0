"""What an engine of verl keeps: memory on its device, weights for rollouts, and checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from verl.utils.device import get_device_name
from verl.workers.engine.base import BaseEngine

from megatron_policy.errors import ConfigError
from megatron_policy.hosts.roles import SharedPolicy
from megatron_policy.hosts.verl.checkpoints import VerlFolders
from megatron_policy.hosts.verl.lost_ranks import lost_ranks_named
from megatron_policy.hosts.verl.sections import with_verl_names
from megatron_policy.hosts.verl.translate import Translation
from megatron_policy.hosts.verl.weights import WeightStream, base_of_adapters, peft_config
from megatron_policy.memory.states import Kind
from megatron_policy.policy import MegatronPolicy


class KeepsState(BaseEngine):  # type: ignore[misc]
    """The methods of an engine that move, hand over, save and load what its policy has."""

    stage: SharedPolicy
    adapters_are_off = False
    """Whether the model computes without its adapters now."""
    _folders: VerlFolders
    _translation: Translation

    @property
    def policy(self) -> MegatronPolicy:
        """The policy behind this engine; RuntimeError before `initialize`."""
        raise NotImplementedError

    @property
    def is_param_offload_enabled(self) -> bool:
        """Whether parameters leave the device between calls."""
        return self._translation.param_offload

    @property
    def is_optimizer_offload_enabled(self) -> bool:
        """Whether the optimizer's state leaves the device between calls."""
        return self._translation.optimizer_offload and not self._translation.forward_only

    @property
    def is_grad_offload_enabled(self) -> bool:
        """Whether gradients leave the device between calls."""
        return self._translation.grad_offload and not self._translation.forward_only

    def to(
        self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True
    ) -> None:
        """Move these kinds of memory to "cpu" or the device; a reference moves parameters only."""
        kinds = {
            Kind.PARAMETERS: model,
            Kind.OPTIMIZER: optimizer,
            # verl moves them with the parameters only.
            Kind.GRADIENTS: grad and (model or self.is_grad_offload_enabled),
        }
        if self._translation.forward_only:
            kinds = {Kind.PARAMETERS: model}
        chosen = frozenset(kind for kind, moves in kinds.items() if moves)
        if device == "cpu" and get_device_name() != "cpu":
            self.stage.offload(chosen)
        else:
            self.stage.onload(chosen)

    def get_per_tensor_param(
        self, layered_summon: bool = False, base_sync_done: bool | None = None, **_: Any
    ) -> tuple[Iterator[tuple[str, torch.Tensor]], dict[str, Any] | None]:
        """All weights by their Hugging Face names, whole, in turn; every rank iterates to the end.
        With adapters that are not merged, these alone by PEFT's names, and their configuration; or
        the base that they adapt, to rollouts that do not have it yet (`base_sync_done` is false).
        Checkpoint engines, which do not say, get merged weights.

        Parameters that are not on the device are moved there first.
        """
        policy = self.policy
        self.stage.onload(frozenset({Kind.PARAMETERS}))
        apart = policy.config.megatron_cfg.peft.enabled and not self._translation.merge_adapters
        if not apart or base_sync_done is None:
            return WeightStream(policy), None
        if not base_sync_done:
            return base_of_adapters(policy), peft_config(policy)
        return WeightStream(policy, adapters=True), peft_config(policy)

    @lost_ranks_named()
    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
        **_: Any,
    ) -> None:
        """Write what `checkpoint_config.save_contents` names below `local_path`, and keep the
        newest `max_ckpt_to_keep` of those written. It is whole when this returns, also with
        `async_save`, with which verl leaves it to the engine to name the latest step. ConfigError
        for an `hdfs_path`.
        """
        if hdfs_path is not None:
            raise ConfigError(
                "this engine writes to file systems only: set trainer.default_hdfs_dir to null, "
                "and the local directory to one that all nodes share"
            )
        self.stage.onload(frozenset({Kind.PARAMETERS, Kind.OPTIMIZER}))
        with with_verl_names():
            self._folders.save(
                self.policy,
                local_path,
                self._translation.save_contents,
                most=max_ckpt_to_keep,
                names_latest=self._translation.names_latest,
            )
        self._offload()

    @lost_ranks_named()
    def load_checkpoint(
        self,
        local_path: str | None,
        hdfs_path: str | None = None,
        del_local_after_load: bool = False,
        **_: Any,
    ) -> None:
        """Go on from what `save_checkpoint` wrote; nothing for no path."""
        if local_path is None:
            return
        self.stage.onload(frozenset({Kind.PARAMETERS, Kind.OPTIMIZER}))
        self._folders.load(self.policy, local_path, self._translation.load_contents)
        self._offload()

    def _offload(self) -> None:
        self.to("cpu", self.is_param_offload_enabled, self.is_optimizer_offload_enabled, True)

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """In this context the model computes without its adapters, if it has any."""
        if not self.policy.config.megatron_cfg.peft.enabled:
            yield
            return
        with self.policy.reference():
            self.adapters_are_off = True
            try:
                yield
            finally:
                self.adapters_are_off = False
