"""verl's engines over a policy: what a training worker of verl calls, in process, on every rank.

Sources: verl's `workers/engine/base.py` and `workers/engine_workers.py`, 0.9.1 and main.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id
from verl.workers.engine.base import BaseEngineCtx
from verl.workers.engine.utils import postprocess_batch_func, prepare_micro_batches

from megatron_policy.batch import BatchedDataDict
from megatron_policy.config.layout import topology_of
from megatron_policy.device import to_device
from megatron_policy.hosts.roles import SharedPolicy
from megatron_policy.hosts.verl.checkpoints import VerlFolders
from megatron_policy.hosts.verl.data import (
    TEACHER,
    MicroBatches,
    add_candidates,
    check_supported,
    compare_with_teacher,
    count_tokens,
    count_valid,
    has_losses,
    model_output,
    outcome,
    policy_batch,
    temperature_of,
)
from megatron_policy.hosts.verl.experts import (
    DISABLED,
    R2,
    R3,
    add_experts,
    jagged_experts,
    mode_of,
)
from megatron_policy.hosts.verl.lost_ranks import lost_ranks_named
from megatron_policy.hosts.verl.sections import with_verl_names
from megatron_policy.hosts.verl.state import KeepsState
from megatron_policy.hosts.verl.translate import Translation, translate
from megatron_policy.memory.states import Kind
from megatron_policy.packing.microbatch import ROUTED_EXPERTS
from megatron_policy.policy import MegatronPolicy
from megatron_policy.training.callbacks import TokenScores
from megatron_policy.training.replay import Replay
from megatron_policy.training.sync_microbatches import prepare_together

_log = logging.getLogger(__name__)


class MegatronPolicyEngine(KeepsState):
    """A language model of verl, trained or a reference (`engine_config.forward_only`)."""

    stage = SharedPolicy()
    """The roles of this process that share a policy: verl makes an engine for each."""

    def __init__(
        self,
        model_config: Any,
        engine_config: Any,
        optimizer_config: Any,
        checkpoint_config: Any,
        **_: Any,
    ) -> None:
        """Read the configuration; nothing is built before `initialize`. ConfigError for a key that
        is not supported.
        """
        super().__init__()
        self.model_config, self.engine_config = model_config, engine_config
        self.optimizer_config, self.checkpoint_config = optimizer_config, checkpoint_config
        self.mode: str | None = None
        self._policy: MegatronPolicy | None = None
        self._valid_tokens: float | None = None
        """Those that verl's losses read of the batch that is trained on; None if unknown."""
        self._skipped: list[bool] = []
        """Of each step since the schedule was last asked to advance, whether it was skipped."""
        self._folders = VerlFolders()
        rank, world = dist.get_rank(), dist.get_world_size()
        with with_verl_names():
            self._topology = topology_of(self._translate(1).parse(), world)
        self._coords = self._topology.coords(rank)
        translation = self._translate(self._topology.dp)
        for warning in translation.warnings if rank == 0 else ():
            _log.warning("%s", warning)
        self._translation = translation

    def _translate(self, replicas: int) -> Translation:
        return translate(
            self.model_config,
            self.engine_config,
            self.optimizer_config,
            self.checkpoint_config,
            replicas=replicas,
        )

    # What verl asks before and after `initialize`.

    @lost_ranks_named()
    def initialize(self) -> None:
        """Build the policy, or anew; a reference waits for the policy whose weights it shares.

        verl's trainers set the number of steps between making the engine and this call.
        """
        self._translation = self._translate(self._topology.dp)
        offloads, tokenizer = (
            self._translation.param_offload,
            getattr(self.model_config, "tokenizer", None),
        )
        with with_verl_names():
            config = self._translation.parse()
            if self._translation.forward_only:
                self.stage.enter_reference(config, offloads=offloads)
                return
            self._policy = self.stage.enter_trained(self, config, tokenizer, offloads=offloads)
        # Gradients too: a rollout may start before the first step ends.
        self._offload()

    @property
    def policy(self) -> MegatronPolicy:
        """The policy behind this engine; RuntimeError before `initialize`."""
        if self._translation.forward_only:
            with with_verl_names():
                return self.stage.policy_of_reference()
        if self._policy is None:
            raise RuntimeError("this engine is not initialized: verl calls reset() first")
        return self._policy

    def get_data_parallel_rank(self) -> int:
        """This rank's data-parallel replica."""
        return self._coords.dp

    def get_data_parallel_size(self) -> int:
        """The number of replicas."""
        return self._topology.dp

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        """The ranks with the same part of the model and of sequences."""
        return self.policy.groups.dp

    def is_mp_src_rank_with_outputs(self) -> bool:
        """Whether this is the one rank of its replica whose output verl collects."""
        here = self._coords
        return here.pp == self._topology.pp - 1 and here.tp == 0 and here.cp == 0

    def train_mode(self, **kwargs: Any) -> AbstractContextManager[None]:
        """verl's context of training; gradients are dropped at its end."""
        return _TrainMode(self, **kwargs)

    def eval_mode(self, **kwargs: Any) -> AbstractContextManager[None]:
        """verl's context of scoring."""
        context: AbstractContextManager[None] = BaseEngineCtx(self, mode="eval", **kwargs)
        return context

    # A step.

    def optimizer_zero_grad(self) -> None:
        """Drop all gradients, also of a step that failed."""
        self.policy.pieces.zero_gradients()

    @lost_ranks_named()
    def forward_backward_batch(
        self, data: TensorDict, loss_function: Callable[..., Any] | None, forward_only: bool = False
    ) -> Any:
        """Run verl's microbatches of these rows, with verl's loss on each where there is one.

        Returns what verl's `postprocess_batch_func` makes of their outcomes; on ranks that have no
        output it is empty.
        """
        check_supported(data)
        group = self.get_data_parallel_group()
        valid_tokens = self._prepare(data, group)
        parts, indices = prepare_micro_batches(data=data, dp_group=group, same_micro_num_in_dp=True)
        batches = MicroBatches.of(parts, indices)
        keep = forward_only or tu.get_non_tensor_data(data, "return_model_output", False)
        entropy = bool(tu.get_non_tensor_data(data, "calculate_entropy", False))

        def run(scores: TokenScores) -> tuple[torch.Tensor | None, dict[str, Any]]:
            part = batches.part(scores.rows).to(get_device_id())
            output = model_output(scores, part) | compare_with_teacher(scores, part, loss_function)
            loss, metrics = None, {}
            if loss_function is not None:
                loss, metrics = loss_function(model_output=output, data=part, dp_group=group)
            return loss, outcome(output, loss, metrics, keep)

        if forward_only:
            found = self._read(data, batches, lambda scores: run(scores)[1], entropy)
        else:
            self._valid_tokens = valid_tokens
            found = self._train(data, batches, run, entropy)
        return postprocess_batch_func(output_lst=found, indices=indices, data=data)

    def _prepare(self, data: TensorDict, group: dist.ProcessGroup) -> float | None:
        """What verl's losses and microbatches find in the data. Returns how many tokens of all
        replicas these losses read; None if the data do not say.
        """
        tokens = valid = None
        if has_losses(data):
            counts = to_device(torch.stack([count_tokens(data).cpu(), count_valid(data).cpu()]))
            dist.all_reduce(counts, group=group)
            tokens, valid = counts.tolist()
        tu.assign_non_tensor(
            data,
            sp_size=self._topology.cp,
            dp_size=self._topology.dp,
            # verl's losses divide by it.
            batch_num_tokens=None if tokens is None else max(tokens, 1.0),
        )
        return valid

    def _read(
        self, data: TensorDict, batches: MicroBatches, read: Callable[..., Any], entropy: bool
    ) -> list[Any]:
        batch, temperature = policy_batch(data), temperature_of(data)
        if self._translation.forward_only:
            with self.stage.as_reference() as policy:
                pieces = policy.pieces
                microbatches = pieces.take(
                    batch, batches.rows, temperature=temperature, replay=Replay.NEVER
                )
                return pieces.read(microbatches, read, entropy=entropy)
        pieces, mode = self.policy.pieces, self._replay_of(data)
        replay = self._add_experts(batch, data, mode) if mode == R3 else Replay.NEVER
        microbatches = pieces.take(batch, batches.rows, temperature=temperature, replay=replay)
        if mode != R2:
            return pieces.read(microbatches, read, entropy=entropy)
        found, experts = pieces.read_with_experts(microbatches, read, entropy=entropy)
        # Only the last stage has outcomes, but all ranks have the experts.
        for outcome_, taken, part in zip(found, experts, batches.parts, strict=bool(found)):
            jagged = jagged_experts(taken, part["input_ids"])
            outcome_["model_output"][ROUTED_EXPERTS] = jagged
        return found

    def _train(
        self,
        data: TensorDict,
        batches: MicroBatches,
        run: Callable[[TokenScores], tuple[Any, dict[str, Any]]],
        entropy: bool,
    ) -> list[dict[str, Any]]:
        pieces, replicas = self.policy.pieces, self._topology.dp

        def loss(scores: TokenScores) -> tuple[torch.Tensor, dict[str, Any]]:
            value, kept = run(scores)
            # verl averages over replicas, a policy adds them up.
            return value / replicas, kept

        batch, mode = policy_batch(data), self._replay_of(data)
        add_candidates(batch, data)
        replay = Replay.NEVER if mode == DISABLED else self._add_experts(batch, data, mode)
        microbatches = pieces.take(
            batch, batches.rows, temperature=temperature_of(data), replay=replay
        )
        return pieces.forward_backward(microbatches, loss, entropy=entropy, candidates=TEACHER)

    def _replay_of(self, data: TensorDict) -> str:
        """The mode for these rows. Without its adapters the model is the reference, which chooses
        its own experts.
        """
        return DISABLED if self.adapters_are_off else mode_of(data, self._translation.replay)

    def _add_experts(self, batch: BatchedDataDict, data: TensorDict, mode: str) -> Replay:
        """Add experts to be replayed; BatchError, on every rank, if rows of one lack them."""
        group = self.policy.groups.dp
        prepare_together(lambda: add_experts(batch, data, mode), lambda _: 0, group)
        return Replay.REQUIRED

    @lost_ranks_named()
    def optimizer_step(self) -> float:
        """Clip and update; returns the gradient's norm before clipping, or 0 where verl's mask
        counts no token: then the step is skipped. LossError, on every rank, if it is not finite.
        """
        pieces, tokens = self.policy.pieces, self._valid_tokens
        nothing = None if tokens is None else pieces.empty_steps.reason_of_tokens(tokens)
        stats = pieces.step(nothing_counts=nothing)
        self._skipped.append(bool(stats.skipped))
        return stats.grad_norm

    def lr_scheduler_step(self) -> float:
        """Advance the schedule by one of verl's steps, unless all steps since the last advance were
        skipped; returns the next learning rate.
        """
        idle = bool(self._skipped) and all(self._skipped)
        self._skipped.clear()
        return self.policy.pieces.advance_schedule(0 if idle else self._topology.dp)


class MegatronPolicyValueEngine(MegatronPolicyEngine):
    """A critic of verl: a head of one number for each token. It can be beside an actor in one
    process, in the same layout.
    """

    stage = SharedPolicy()


class _TrainMode(BaseEngineCtx):  # type: ignore[misc]
    """verl's own context, at whose end gradients are dropped; verl moves them with the parameters,
    this also alone.
    """

    def __init__(self, engine: MegatronPolicyEngine, **kwargs: Any) -> None:
        super().__init__(engine=engine, mode="train", **kwargs)

    def __enter__(self) -> None:
        super().__enter__()
        if self._moves_gradients:
            self.engine.stage.onload(frozenset({Kind.GRADIENTS}))

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if getattr(self, "zero_grad_on_exit", True) or kind is not None:
            self.engine.optimizer_zero_grad()
        super().__exit__(kind, error, trace)
        if self._moves_gradients:
            self.engine.to("cpu", model=False, optimizer=False, grad=True)

    @property
    def _moves_gradients(self) -> bool:
        return self.engine.is_grad_offload_enabled and not self.disable_auto_offload
