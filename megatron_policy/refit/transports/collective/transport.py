"""The trainer's side of a refit over a process group that it shares with the engines.

The engine's side is in `refit.receive.collective`, the protocol in `handshake`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megatron_policy.coordination.authenticated_connection import checked_secret, new_secret
from megatron_policy.coordination.control_store import ControlStore
from megatron_policy.coordination.process_group import BoundedProcessGroup
from megatron_policy.coordination.timeouts import ENGINE_SHARE, checked_timeout
from megatron_policy.errors import ConfigError
from megatron_policy.refit.arguments import check_count, check_group
from megatron_policy.refit.buffers import BufferSlice
from megatron_policy.refit.manifest import RefitManifest, StagedVersion
from megatron_policy.refit.shards import EngineShards
from megatron_policy.refit.transports.collective.handshake import (
    Sender,
    raise_peer_failure,
)
from megatron_policy.refit.transports.collective.shards import ShardRefits
from megatron_policy.refit.transports.collective.stream import Stream, StreamLayout, Writer
from megatron_policy.refit.transports.movers.named import find_mover

if TYPE_CHECKING:
    from megatron_policy.refit.exporter import Exporter
    from megatron_policy.refit.plan import RefitPlan, RefitTensor


class Collective:
    """A trainer's membership in a group with inference engines; every training rank has one.

    It is kept from refit to refit; `transport` returns the transport for each of them.
    """

    @classmethod
    def join(
        cls,
        exporter: Exporter,
        ip: str,
        port: int,
        world_size: int,
        train_world_size: int | None = None,
        timeout_s: float | None = None,
        *,
        secret: str | None = None,
        of_shards: bool = False,
    ) -> Collective:
        """Join the group: rank 0 listens at (ip, port) and nowhere else; engines join any time.

        Without `train_world_size` the group is rank 0 and `world_size - 1` engines, and rank 0
        sends everything. With it, the group is all training ranks followed by the engines, and the
        first rank of each pipeline stage sends that stage's tensors, or `of_shards` every rank its
        own. ConfigError for sizes that do
        not fit, RefitError if rank 0 cannot listen there. `timeout_s` defaults to the exporter's.

        Engines need `secret`, the same on all ranks. Without one, rank 0 makes it, collectively,
        and the result's `secret` has it on every rank.
        """
        check_group(ip, port, world_size=world_size)
        trains = exporter.topology.world_size
        if train_world_size not in (None, trains):
            raise ConfigError(f"train_world_size={train_world_size}, but {trains} ranks train")
        if of_shards and train_world_size is None:
            raise ConfigError("of_shards=True needs train_world_size: every rank sends its own")
        engines = world_size - (train_world_size or 1)
        if engines < 1:
            raise ConfigError(
                f"world_size={world_size} leaves no rank for an engine: world_size counts "
                f"{train_world_size or 1} training rank(s) plus engines"
            )
        by_stage, at, member = train_world_size is not None, exporter.coords, None
        sender = None if exporter.rank else 0
        if by_stage:
            sender = at.pp if (at.dp, at.cp, at.tp) == (0, 0, 0) else None
            sender = exporter.rank if of_shards else sender
        limit_s = exporter.timeout_s if timeout_s is None else checked_timeout(timeout_s)
        engine_timeout_s = limit_s * ENGINE_SHARE
        if secret is None:
            secret = new_secret()
            if trains > 1:
                letters = torch.tensor(
                    list(secret.encode()), dtype=torch.uint8, device=exporter.device
                )
                dist.broadcast(letters, 0)
                secret = bytes(letters.tolist()).decode()
        checked_secret(secret)
        if sender is not None:
            store = ControlStore(ip, port, engine_timeout_s, secret, host=sender == 0)
            member = Sender(store, sender, engines, engine_timeout_s)
        return cls(by_stage, member, secret, of_shards)

    def __init__(
        self, by_stage: bool, member: Sender | None, secret: str, of_shards: bool = False
    ) -> None:
        """See `join`; `member` is None on ranks that send nothing."""
        self.by_stage, self.member, self.secret = by_stage, member, secret
        self.of_shards = of_shards

    @property
    def broadcasts(self) -> int:
        """Number of broadcasts that this rank has sent."""
        return 0 if self.member is None else self.member.broadcasts

    def transport(
        self, bucket_bytes: int | None = None, dtype: torch.dtype | None = None
    ) -> CollectiveTransport:
        """The transport for refits in broadcasts of `bucket_bytes` (None: the policy's), with
        tensors in their own dtypes or in `dtype`.
        """
        if self.of_shards:
            raise ConfigError("this group sends shards: give refit() what shards(held) returns")
        if bucket_bytes is not None:
            check_count(bucket_bytes, "bucket_bytes")
        if not isinstance(dtype, torch.dtype | None):
            raise ConfigError(f"dtype is {dtype!r:.80}: give one of torch, as torch.bfloat16")
        return CollectiveTransport(self, bucket_bytes, dtype)

    def shards(self, held: Mapping[str, EngineShards], mover: str | None = None) -> ShardRefits:
        """Refits of an engine of which `held` says which ranks have which part of each tensor, by
        the ranks' numbers among the engine's. A process group sends them, or a `mover` writes them
        into the engine ranks' host memory: "shared_memory" on one machine, or "nixl". ConfigError
        for another mover, and for a group that was not joined `of_shards`.
        """
        if self.member is None or not self.of_shards:
            raise ConfigError(
                "this group sends whole tensors: join it with train_world_size and of_shards=True"
            )
        if mover is not None:
            find_mover(mover)
        return ShardRefits(self.member, held, mover)

    def close(self) -> None:
        """Leave for good; once rank 0 has left, engines cannot connect any more."""
        if self.member is not None:
            self.member.close()


class CollectiveTransport:
    """Refits over a `Collective`."""

    def __init__(
        self, group: Collective, bucket_bytes: int | None, dtype: torch.dtype | None
    ) -> None:
        """See `Collective.transport`."""
        self._group, self._bucket_bytes, self._dtype = group, bucket_bytes, dtype

    def plan(self, exporter: Exporter) -> RefitPlan | None:
        """All tensors or, by stage, those of this rank's stage; on the ranks that gather with the
        first of a stage.
        """
        if exporter.topology.block_of(exporter.rank) != 0:
            return None
        return self._plan(exporter, self._group.by_stage)

    def open(self, exporter: Exporter, plan: RefitPlan) -> CollectiveSession | None:
        """The sender's end, once all engines are ready; RefitError if one is not, or refuses."""
        member = self._group.member
        if member is None:
            return None
        member.begin()
        try:
            if member.sender == 0:
                every = self._plan(exporter, False)
                stages = every.stages if self._group.by_stage else ()
                parts = [[t for t in every.tensors if t.stage == stage] for stage in stages]
                layout = StreamLayout(tuple(map(Stream.of, parts or [[*every.tensors]])))
                member.offer(layout, plan.bucket_bytes, exporter.served_model)
            return CollectiveSession(member, member.meet(), plan, exporter)
        except BaseException as error:
            member.give_up(str(error))
            raise

    def ask(self, exporter: Exporter) -> list[StagedVersion]:
        """The engines' versions, on rank 0; see `AskingTransport`."""
        member = self._group.member
        if member is None:
            return []
        member.begin()  # on all senders, which number handshakes alike
        return member.ask()

    def _plan(self, exporter: Exporter, own_stage: bool) -> RefitPlan:
        return exporter.plan(
            own_stage=own_stage, bucket_bytes=self._bucket_bytes, dtype=self._dtype
        )


class CollectiveSession:
    """Sends this sender's stream of one refit, chunk by chunk; a `TransportSession`."""

    def __init__(
        self, member: Sender, channel: BoundedProcessGroup, plan: RefitPlan, exporter: Exporter
    ) -> None:
        self._exporter = exporter
        self._member, self._accepted = member, False
        stream, size = Stream.of(plan.tensors), plan.bucket_bytes
        send = partial(channel.broadcast, source=0)
        self._writer = Writer(stream, size, exporter.device, send)

    def place(self, tensor: RefitTensor) -> BufferSlice:
        with raise_peer_failure(self._member.find_failure):
            return self._writer.place(tensor.name)

    def filled(self, tensor: RefitTensor, target: BufferSlice) -> None:
        with raise_peer_failure(self._member.find_failure):
            self._writer.filled(tensor.name, target)

    def finish(self, manifest: RefitManifest) -> None:
        with self._exporter.ranks.alive():  # for ranks that wait: engines may be slow to load
            with raise_peer_failure(self._member.find_failure):
                self._writer.settle()
            self._member.finish(manifest.encode())
        self._accepted = True

    def close(self) -> None:
        if not self._accepted:
            self._member.give_up("its log says what failed")
