"""verl's checkpoint engine "megatron_policy": weights in broadcasts to rollouts in other processes,
with a manifest. A set that is incomplete or damaged is refused, on both sides.

Importing this module registers it (`rollout.checkpoint_engine.custom_backend_module`). Processes of
rollouts import it too: neither Megatron-Core nor a policy is imported here.
"""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from megatron_policy import device
from megatron_policy.coordination.authenticated_connection import new_secret
from megatron_policy.coordination.timeouts import DEFAULT_TIMEOUT_S
from megatron_policy.errors import ConfigError, RefitError
from megatron_policy.hosts.verl.weights import WeightStream
from megatron_policy.refit.receive.collective import CollectiveGroup, join_collective
from megatron_policy.refit.receive.receiver import Receiver

if TYPE_CHECKING:
    from megatron_policy.refit.exporter import Exporter
    from megatron_policy.refit.transports.collective.transport import Collective

NAME = "megatron_policy"
Named = tuple[str, torch.Tensor]


@dataclass(frozen=True)
class Rendezvous:
    """Where the first training rank listens, and the secret that lets an engine in."""

    ip: str
    port: int
    secret: str


@dataclass(frozen=True)
class Membership:
    """One process's place in the group: training ranks first, then rollouts."""

    rendezvous: Rendezvous
    rank: int
    world_size: int
    train_world_size: int


@CheckpointEngineRegistry.register(NAME)
class MegatronPolicyCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """One process's end, a training rank's or a rollout's. The group is kept from update to update
    while its members stay the same.
    """

    def __init__(
        self,
        bucket_size: int,
        is_master: bool = False,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        staged: bool = True,
    ) -> None:
        """`bucket_size` is the bytes of a broadcast; the others are `engine_kwargs`.

        With `staged`, a rollout keeps all weights until they are checked, in memory that is freed
        after each update, and begins to load then. Without, it loads them as they arrive: a set
        that is refused has been loaded in part. No wait for another process is longer than
        `timeout_s`.
        """
        self.bucket_size, self.timeout_s, self.staged = bucket_size, timeout_s, staged
        self._is_master = is_master
        self._rendezvous: Rendezvous | None = None
        self._membership: Membership | None = None
        self._trainers: Collective | None = None
        self._exporter: Exporter | None = None
        self._rollouts: CollectiveGroup | None = None
        self._receiver: Receiver | None = None
        self._stream: Any = None

    def prepare(self) -> Rendezvous | None:
        """Where to meet, of the first training rank; the same at each update."""
        if self._is_master and self._rendezvous is None:
            from megatron_policy.workers.cluster.virtual_cluster import address_and_port

            ip, port = address_and_port(set())
            self._rendezvous = Rendezvous(ip.strip("[]"), port, new_secret())
        return self._rendezvous

    @classmethod
    def build_topology(
        cls,
        actor_wg_world_size: int,
        rollout_world_size: int,
        metadata: Sequence[Rendezvous | None],
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """The arguments of `init_process_group`: for each training rank, and for each rollout."""
        rendezvous = metadata[0]
        if rendezvous is None:
            raise ConfigError(f"the first training rank of the checkpoint engine {NAME!r} is none")
        world = actor_wg_world_size + rollout_world_size
        places = [Membership(rendezvous, rank, world, actor_wg_world_size) for rank in range(world)]
        trainers, rollouts = places[:actor_wg_world_size], places[actor_wg_world_size:]
        return {"membership": trainers}, {"membership": rollouts}

    def init_process_group(self, membership: Membership) -> None:
        """Take this place. Processes connect when weights are sent."""
        if membership == self._membership:
            return
        self._leave()
        self._membership = membership
        if membership.rank >= membership.train_world_size:
            self._rollouts = join_collective(
                membership.rendezvous.ip,
                membership.rendezvous.port,
                membership.rank,
                membership.world_size,
                membership.train_world_size,
                self.timeout_s,
                secret=membership.rendezvous.secret,
            )

    def finalize(self) -> None:
        """Free the memory of an update."""
        if self._receiver is not None:
            self._receiver.release()
            self._receiver = None

    async def send_weights(
        self, weights: Iterable[Named], global_steps: int | None = None
    ) -> dict[str, float]:
        """Send what `get_per_tensor_param` of this package's engine has returned; returns when all
        rollouts have loaded it, with how fast it went. RefitError, on every rank, if one refuses.
        """
        if not isinstance(weights, WeightStream):
            raise ConfigError(
                f"the checkpoint engine {NAME!r} sends weights of this package's engine, not a "
                f"{type(weights).__name__}: set rollout.checkpoint_engine.backend to one of verl's"
            )
        from megatron_policy.refit.transports.collective.transport import Collective

        place, exporter = self._membership, weights.policy.exporter
        if place is None or place.rank >= place.train_world_size:
            raise RefitError("this process is no training rank: init_process_group() comes first")
        if self._trainers is None or self._exporter is not exporter:  # a policy's first update
            if self._trainers is not None:
                self._trainers.close()
            self._exporter = exporter
            self._trainers = Collective.join(
                exporter,
                place.rendezvous.ip,
                place.rendezvous.port,
                place.world_size,
                place.train_world_size,
                self.timeout_s,
                secret=place.rendezvous.secret,
            )
        speed = weights.refit(self._trainers.transport(self.bucket_size)).speed or {}
        return {f"checkpoint_engine/{name}": value for name, value in speed.items()}

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[Named]:
        """The weights of one update. RefitError if they are not complete and undamaged; the
        trainer hears that, and also if the caller does not take all of them.
        """
        if self._rollouts is None:
            raise RefitError("this process is no rollout: init_process_group() comes first")
        parts, loop = _Parts(), asyncio.get_running_loop()
        self._stream = self._stream or device.make_side_stream()
        # verl pairs the two sides of an update, so that no earlier one can arrive.
        self._receiver = Receiver(parts.load, timeout_s=self.timeout_s, staged=self.staged)
        job = partial(self._receive, self._receiver, self._rollouts, parts, device.queued())
        receiving = loop.run_in_executor(None, job)
        try:
            while (part := await loop.run_in_executor(None, parts.next)) is not None:
                for name, tensor in part:
                    yield name, tensor
                parts.taken()
        except BaseException:
            parts.refuse("the rollout has not taken all weights")
            raise
        await receiving

    def _receive(
        self, receiver: Receiver, group: CollectiveGroup, parts: _Parts, point: Any
    ) -> None:
        try:
            with device.on_side_stream(point, self._stream):
                receiver.receive_collective(group)
        finally:
            parts.end()

    def _leave(self) -> None:
        for group in (self._trainers, self._rollouts):
            if group is not None:
                group.close()
        self._trainers = self._exporter = self._rollouts = None


class _Parts:
    """Weights on their way from the thread that receives them to the loop of verl that takes them,
    a part at a time: their memory is used again afterwards.
    """

    def __init__(self) -> None:
        self._parts: queue.Queue[list[Named] | None] = queue.Queue()
        self._answers: queue.Queue[str] = queue.Queue()

    def load(self, tensors: list[Named]) -> None:
        """Hand over a part, and wait until it was taken; RuntimeError if it is not."""
        device.synchronize()  # what is done with it runs on another stream
        self._parts.put(tensors)
        if why := self._answers.get():
            raise RuntimeError(why)
        device.synchronize()

    def end(self) -> None:
        """There is no further part."""
        self._parts.put(None)

    def next(self) -> list[Named] | None:
        """Wait for the next part; None at the end."""
        return self._parts.get()

    def taken(self) -> None:
        """The last part was taken."""
        self._answers.put("")

    def refuse(self, why: str) -> None:
        """No part will be taken any more."""
        self._answers.put(why)
