"""Roles of one process, trained policy and reference, on one model.

Hosts that make an engine for each role in the same process share one policy between them: the
reference answers with the policy's own reference weights. Host frameworks are not imported here.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from megatron_policy.config import PolicyConfig
from megatron_policy.config.section import Section
from megatron_policy.errors import ConfigError
from megatron_policy.memory.states import Kind
from megatron_policy.policy import MegatronPolicy

Builder = Callable[..., MegatronPolicy]

MAY_DIFFER: Mapping[str, str] = {
    "the reference has weights of its own, and no adapters": (
        "model_name tokenizer megatron_cfg.peft"
    ),
    "the reference is never updated": """
        train_global_batch_size train_micro_batch_size max_grad_norm learning_rate optimizer
        scheduler megatron_cfg.optimizer megatron_cfg.scheduler megatron_cfg.train_iters
        skip_empty_steps megatron_cfg.empty_unused_memory_level megatron_cfg.freeze_moe_router
        megatron_cfg.freeze_config megatron_cfg.freeze_vision_model
        megatron_cfg.freeze_vision_projection megatron_cfg.freeze_sound_encoder
        megatron_cfg.freeze_sound_projection megatron_cfg.moe_router_bias_update_rate
        dtensor_cfg.automodel_kwargs.freeze_config
        dtensor_cfg.weight_decay_of dtensor_cfg.clear_cache_every_n_steps
        fsdp_cfg.weight_decay_of fsdp_cfg.clear_cache_every_n_steps""",
    "the reference has no backward pass": """
        activation_checkpointing_enabled megatron_cfg.activation_checkpointing
        megatron_cfg.recompute_granularity megatron_cfg.recompute_method
        megatron_cfg.recompute_num_layers megatron_cfg.recompute_modules
        megatron_cfg.distributed_data_parallel_config dtensor_cfg.activation_checkpointing
        fsdp_cfg.activation_checkpointing_enabled""",
    "the reference has no losses": """
        megatron_cfg.moe_router_load_balancing_type megatron_cfg.moe_aux_loss_coeff
        megatron_cfg.moe_z_loss_coeff megatron_cfg.mtp_num_layers
        megatron_cfg.mtp_loss_scaling_factor megatron_cfg.mtp_use_repeated_layer
        megatron_cfg.mtp_detach_heads""",
    "the reference draws nothing": "seed",
    "the reference chooses its experts itself": "router_replay",
    "the reference is not saved": "megatron_cfg.checkpoint checkpoint_timeout_s",
    "the reference is not handed to engines": (
        "refit_buffer_size_gb refit_bucket_bytes refit_dtype refit_timeout_s"
    ),
    "the reference reports nothing": (
        "metrics rollout_mismatch megatron_cfg.moe_per_layer_logging"
    ),
}
"""Keys, or sections of them, in which the roles of one policy may differ, by the reason. In all
others they agree.
"""

_FREE = frozenset(key for keys in MAY_DIFFER.values() for key in keys.split())


class SharedPolicy:
    """The roles of a process that share one policy: one that trains, and a reference. A role enters
    when its engine is made ready, and again when that is repeated.

    The policy is built when the trained role enters, with a reference if one has entered. A
    reference that computes before there is a trained role gets a policy of its own, which gives way
    to the trained one. Roles with models of their own, such as a critic, share one of their own:
    policies of one process share their process groups.
    """

    def __init__(self, build: Builder = MegatronPolicy) -> None:
        self._build = build
        self._policy: MegatronPolicy | None = None
        self._trained: PolicyConfig | None = None
        self._reference: PolicyConfig | None = None
        self._trains: weakref.ref[object] = weakref.ref(self)
        self._keeps: dict[str, bool] = {}

    def enter_reference(self, config: PolicyConfig, *, offloads: bool) -> None:
        """The role that never trains; it leaves the device between calls if it `offloads`.
        ConfigError if a trained role is here whose policy it cannot share.
        """
        if self._trained is not None:
            check_alike(self._trained, config)
            if self._reference is None or self._reference.model_name != config.model_name:
                raise ConfigError(
                    f"the reference {config.model_name!r} comes after the policy "
                    f"{self._trained.model_name!r} was built, which does not have its weights: "
                    "make the reference first"
                )
        elif self._reference is not None and self._reference != config:
            self._drop()
        self._reference = config
        self._keeps["reference"] = not offloads

    def enter_trained(
        self, engine: object, config: PolicyConfig, tokenizer: Any = None, *, offloads: bool
    ) -> MegatronPolicy:
        """The role that trains, of this `engine`: a new policy, in place of its last one or of the
        reference's own. ConfigError if another engine trains here, or if the reference's
        configuration is another one; what was there then stays.
        """
        if self._trained is not None:
            if self._trains() not in (None, engine):
                gc.collect()  # it can be one that nobody uses, in a cycle
            if self._trains() not in (None, engine):
                raise ConfigError(
                    f"{self._trained.model_name!r} is trained in this process already: one engine "
                    f"of a kind trains in each process, so give {config.model_name!r} processes of "
                    "its own"
                )
        built = config
        if self._reference is not None:
            check_alike(config, self._reference)
            name = self._reference.model_name
            if config.model_name != name and config.reference_model_name is None:
                built = config.model_copy(update={"reference_model_name": name})
        self._drop()
        adapters = config.megatron_cfg.peft.enabled
        self._policy = self._build(
            built, tokenizer, init_reference_model=self._reference is not None or adapters
        )
        self._trained, self._trains = config, weakref.ref(engine)
        self._keeps["trained"] = not offloads
        return self._policy

    def policy_of_reference(self) -> MegatronPolicy:
        """The policy with which the reference computes, within `as_reference`. RuntimeError before
        it has entered.
        """
        if self._reference is None:
            raise RuntimeError("the reference is not initialized")
        if self._policy is None:
            self._policy = self._build(
                self._reference, None, init_optimizer=False, init_reference_model=False
            )
        return self._policy

    @contextmanager
    def as_reference(self) -> Iterator[MegatronPolicy]:
        """In this context the policy has the reference's weights."""
        policy = self.policy_of_reference()
        if self._trained is None:
            yield policy
        else:
            with policy.reference():
                yield policy

    def offload(self, kinds: frozenset[Kind]) -> None:
        """Move these kinds off the device. Parameters stay while a role here keeps them there."""
        if self._policy is None:
            return
        if any(self._keeps.values()):
            kinds -= {Kind.PARAMETERS}
        if kinds:
            self._policy.memory.offload(kinds)

    def onload(self, kinds: frozenset[Kind]) -> None:
        """Move these kinds onto the device."""
        if self._policy is not None and kinds:
            self._policy.memory.onload(kinds)

    def leave(self) -> None:
        """Drop the policy and all roles."""
        self._drop()
        self._reference = None
        self._keeps.clear()

    def _drop(self) -> None:
        policy, self._policy, self._trained = self._policy, None, None
        self._keeps.pop("trained", None)
        if policy is not None:
            policy.shutdown()


def check_alike(trained: PolicyConfig, reference: PolicyConfig) -> None:
    """ConfigError naming the keys, with both values, in which roles of one process differ that have
    to agree to share a policy: all but those of `MAY_DIFFER`, and the adapters of a reference.
    """
    free = _FREE - {"megatron_cfg.peft"} if reference.megatron_cfg.peft.enabled else _FREE
    different = [*_find_differences(trained, reference, free)]
    if different:
        raise ConfigError(
            "the policy and its reference are in one process and share one model, so they have to "
            f"agree in {'; '.join(different)}: give both the same values"
        )


def _find_differences(
    trained: Section, reference: Section, free: frozenset[str], at: str = ""
) -> Iterator[str]:
    for name in type(trained).model_fields:
        key, one, other = at + name, getattr(trained, name), getattr(reference, name)
        if one == other or key in free:
            continue
        if isinstance(one, Section) and isinstance(other, type(one)):
            yield from _find_differences(one, other, free, f"{key}.")
        elif name == "env_vars":  # values can be secrets
            yield f"policy.{key}"
        else:
            yield f"policy.{key}: {one!r} and {other!r}"
