"""What has changed of a policy's weights, as the trainer engine of vLLM's backend `sparse_nccl`
takes it: flat indices into tensors of the checkpoint, and values.

    policy.refit(DeltaStream(WeightPatches(engine)))

This file imports nothing of vLLM: of its engine it asks for methods, and its patch is any object
with the fields of `Patch`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from megatron_policy.errors import ConfigError, RefitError
from megatron_policy.inference.vllm.transfer import EngineCalls, LateAnswer
from megatron_policy.inference.vllm.weight_source import SyncClient
from megatron_policy.refit.buffers import Buffer, BufferSlice
from megatron_policy.refit.deltas.arrays import Positions
from megatron_policy.refit.deltas.message import Fragment, decode_message
from megatron_policy.refit.exporter import Exporter
from megatron_policy.refit.manifest import RefitManifest, StagedVersion
from megatron_policy.refit.plan import RefitPlan, RefitTensor
from megatron_policy.refit.streams import read_streams

_MOST_ELEMENTS = 2**31 - 1
"""Of a tensor: vLLM's indices are int32."""


class Patch(NamedTuple):
    """Elements of a tensor of the checkpoint: `values` `[N]` at the flat `indices` `[N]`, int32."""

    name: str
    indices: Tensor
    values: Tensor
    full_shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes on the way."""
        return self.indices.nbytes + self.values.nbytes


class PatchEngine(Protocol):
    """What is used of vLLM's `SparseNCCLTrainerWeightTransferEngine`."""

    client: SyncClient

    def send_weight_chunk(self, patches: Iterable[Any]) -> None:
        """Send patches, between the client's `start_weight_update` and `finish_weight_update`."""


class WeightPatches:
    """A transport for `DeltaStream`: rank 0 sends to the workers of one vLLM, whose weights change
    in place. The first refit sends all elements, as does the one after a failure, which leaves vLLM
    with weights of two versions.
    """

    def __init__(self, engine: PatchEngine) -> None:
        """`engine` is vLLM's, made by its `trainer_init` on every rank; that of rank 0 sends."""
        self._engine, self._calls = engine, EngineCalls()
        self._has: StagedVersion = None

    def ask(self, exporter: Exporter) -> list[StagedVersion]:
        """On rank 0 the version that vLLM has by what it has accepted from here."""
        return [self._has] if exporter.rank == 0 else []

    def plan(self, exporter: Exporter) -> RefitPlan | None:
        """Everything, on all ranks that gather with rank 0. ConfigError for a tensor that vLLM's
        indices cannot count.
        """
        plan = exporter.plan()
        for tensor in plan.tensors:
            if (elements := math.prod(tensor.shape)) > _MOST_ELEMENTS:
                raise ConfigError(
                    f"{tensor.name} has {elements} elements, and patches of vLLM count "
                    f"at most {_MOST_ELEMENTS}: use its dense backend"
                )
        return plan if exporter.topology.block_of(exporter.rank) == 0 else None

    def open(self, exporter: Exporter, plan: RefitPlan) -> _Session | None:
        """Begin an update on rank 0."""
        if exporter.rank != 0:
            return None
        self._has = None
        return _Session(self, self._engine, self._calls, exporter)

    def accept(self, version: StagedVersion) -> None:
        """vLLM has the weights of that version."""
        self._has = version


class _Session:
    """Rank 0's end of one update; see `TransportSession`."""

    def __init__(
        self, owner: WeightPatches, engine: PatchEngine, calls: EngineCalls, exporter: Exporter
    ) -> None:
        version = exporter.served_model.version
        if version is None:
            raise ConfigError("WeightPatches is a transport for DeltaStream: wrap it in one")
        self._owner, self._engine, self._calls = owner, engine, calls
        self._exporter, self._waiting, self._nbytes = exporter, list[Patch](), 0
        self._version, self._changes = version, version.since is not None
        self._streams: dict[str, Tensor] = {}
        begin = partial(self._call, "begin a weight update", engine.client.start_weight_update)
        try:
            begin()
        except LateAnswer:
            raise
        except RefitError:
            # It may be in the update of a trainer that is gone, which one without tensors ends.
            with suppress(RefitError):
                self._call("end an update", lambda: engine.client.update_weights({"names": []}))
            begin()

    def place(self, tensor: RefitTensor) -> BufferSlice:
        device = torch.device("cpu") if self._changes else self._exporter.device
        return BufferSlice(Buffer.on(device, tensor.nbytes), 0)

    def filled(self, tensor: RefitTensor, target: BufferSlice) -> None:
        value = target.tensor(tensor.shape, tensor.dtype)
        if self._changes:
            self._streams[tensor.name] = value
            return
        every = torch.arange(value.numel(), dtype=torch.int32, device=value.device)
        self._add(Patch(tensor.name, every, value.flatten(), tensor.shape))

    def finish(self, manifest: RefitManifest) -> None:
        changed = [f for each in read_streams(self._streams) for f in decode_message(each)]
        to = self._exporter.device
        for patch in make_patches(changed):
            moved = patch._replace(indices=patch.indices.to(to), values=patch.values.to(to))
            self._add(moved)
        self._send()
        finish = self._engine.client.finish_weight_update
        self._call("finish the weight update", lambda: finish(str(manifest.step)))
        self._owner.accept((self._version.chain, self._version.number))

    def close(self) -> None:
        self._streams.clear()
        self._waiting.clear()

    def _add(self, patch: Patch) -> None:
        """Send it with others, which together have at most the bytes of a bucket; or alone."""
        if patch.values.isnan().any():
            raise RefitError(
                f"weights of {patch.name} are NaN, by which vLLM marks "
                "what has not changed: go back to a step before they were"
            )
        if self._nbytes + patch.nbytes > self._exporter.bucket_bytes:
            self._send()
        self._waiting.append(patch)
        self._nbytes += patch.nbytes

    def _send(self) -> None:
        patches, self._waiting, self._nbytes = self._waiting, [], 0
        if patches:
            self._call("take the weights", lambda: self._engine.send_weight_chunk(patches))

    def _call(self, what: str, call: Callable[[], None]) -> None:
        with self._exporter.ranks.alive():
            self._calls.run(what, call, self._exporter.timeout_s)


def make_patches(fragments: Iterable[Fragment]) -> Iterator[Patch]:
    """One patch for each tensor, with its indices in order; of an element that several fragments
    change, the last value. Pure.
    """
    of_tensors: dict[str, list[Fragment]] = {}
    for fragment in fragments:
        of_tensors.setdefault(fragment.tensor, []).append(fragment)
    for name, own in of_tensors.items():
        places: list[Positions] = []
        values = []
        for fragment in own:
            for change in fragment.decode():
                places.append(fragment.locate(change.positions))
                values.append(change.values)
        # The first of equal ones is kept: the last one, backwards.
        where, last = np.unique(np.concatenate(places)[::-1], return_index=True)
        bits = np.concatenate(values)[::-1][last]
        kept = torch.from_numpy(bits.view(np.uint8)).view(own[0].dtype)
        yield Patch(name, torch.from_numpy(where.astype(np.int32)), kept, own[0].shape)
