"""What a checkpoint contains of a policy, as parts to write, and how a policy is restored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_policy.adapters.table import is_same_base
from megatron_policy.checkpoint import local_shards, manifest
from megatron_policy.checkpoint.common_state import OURS, compose, read_ours
from megatron_policy.checkpoint.loading import FoundCheckpoint, LoadPlan
from megatron_policy.checkpoint.manifest import layout_of
from megatron_policy.checkpoint.report import LoadReport
from megatron_policy.checkpoint.saving import DirectoryContents
from megatron_policy.converters.formats.dist_keys import extra_states
from megatron_policy.converters.formats.dist_records import empty_object
from megatron_policy.converters.table import Table
from megatron_policy.device import random_states
from megatron_policy.dtypes import name_dtype
from megatron_policy.errors import CheckpointError
from megatron_policy.interfaces.engine import TrainingEngine
from megatron_policy.parallel.topology import Topology
from megatron_policy.weights.load import Held

_KEPT = 4  # kinds of saves: with and without the optimizer, in one directory or in two


_OTHERS = {
    "base": "of other weights than those of policy.model_name, with other hf_config_overrides, or "
    "of both: set them to what they were trained on",
    "dim": "of another rank: set policy.megatron_cfg.peft.dim",
    "alpha": "of another scale: set policy.megatron_cfg.peft.alpha",
    "modules": "of other modules: set policy.megatron_cfg.peft.target_modules and exclude_modules "
    "to theirs",
}
"""What is wrong with a checkpoint whose adapters differ in one of these."""


@dataclass(frozen=True)
class SavedWeights:
    """What a checkpoint has of a policy's weights."""

    table: Table
    held: Held


def saved_by(engine: TrainingEngine) -> SavedWeights:
    """The whole model, or the adapters alone."""
    adapters = engine.adapters
    if adapters is not None:
        return SavedWeights(adapters.table, adapters.held)
    return SavedWeights(engine.table, engine.held)


@dataclass(frozen=True)
class NonTensorState:
    """What a checkpoint has besides tensors, as far as this rank needs it."""

    ours: Mapping[str, Any]
    random: bytes | None
    no_random_reason: str
    """Why there are no random states to restore, if there are none."""


class Contents:
    """One rank's policy, as checkpoints see it."""

    def __init__(
        self,
        engine: TrainingEngine,
        topology: Topology,
        generators: Mapping[str, torch.Generator],
    ) -> None:
        """`topology` is how ranks share a batch; `generators` are the policy's own random
        generators, by name.
        """
        self._engine, self._generators = engine, generators
        self._saved = saved_by(engine)
        place = engine.place
        self._topology, self._rank = topology, place.topology.rank(place.coords)
        trainable = engine.trainable
        self._training = None if trainable is None else trainable.state
        self._found: dict[tuple[object, ...], list[local_shards.WriteItem]] = {}

    @property
    def has_optimizer(self) -> bool:
        """Whether there is any state to save or load besides weights."""
        return self._training is not None

    @property
    def kept_states(self) -> tuple[str, ...] | None:
        """The kinds of state that the optimizer keeps; None without an optimizer."""
        return None if self._training is None else self._training.kinds

    @property
    def nbytes(self) -> int:
        """Approximate bytes of this rank's share of everything that can be saved."""
        place = self._engine.place
        own = self._items(self.held(with_states=False))
        nbytes = sum(item.tensor.nbytes for item in own)
        if self._training is None:
            return nbytes
        sharers = 1 if self._training.distributed else place.topology.dp * place.topology.cp
        return nbytes + self._training.nbytes // sharers

    def held(self, *, with_states: bool) -> list[local_shards.LocalShard]:
        """Weights and the optimizer's state, which is created if there is none yet."""
        where = (self._saved.held, self._saved.table.architecture, self._engine.place)
        found = local_shards.list_weights(*where)
        if with_states and self._training is not None:
            self._training.materialize()
            found += local_shards.list_states(*where, self._training)
        return found

    def parts(
        self, step: int, weights: Path, optimizer: Path | None, host_data: Mapping[str, Any]
    ) -> list[DirectoryContents]:
        """The directories of a save; that of the weights, which loads look for, comes last."""
        table = self._saved.table
        together = optimizer == weights
        objects = {self._random_key: random_states.capture(self._engine, self._generators)}
        if self._rank == 0:
            objects |= dict.fromkeys(extra_states(table), empty_object())
        held = self.held(with_states=optimizer is not None)
        of_weights = [each for each in held if each.kind == local_shards.WEIGHTS]
        of_optimizer = [each for each in held if each.kind != local_shards.WEIGHTS]
        engine = self._engine
        ours: dict[str, Any] = {"host_data": dict(host_data)}
        dtypes = dict(engine.source_dtypes)
        if engine.adapters is not None:
            ours["adapters_of"] = engine.adapters.spec.identity(engine.adapters.table)
            dtypes |= engine.adapters.dtypes
        ours["source_dtypes"] = {name: name_dtype(dtype) for name, dtype in dtypes.items()}
        if optimizer is not None and self._training is not None and engine.trainable is not None:
            ours["optimizer_step"] = self._training.step
            ours["schedule"] = engine.trainable.schedule_state()
        common = compose(engine.table.architecture, step, ours)
        kept = held if together else of_weights
        contains = (manifest.WEIGHTS, manifest.RANDOM)
        parts = [
            DirectoryContents(
                weights,
                (*contains, manifest.OPTIMIZER) if together else contains,
                self._items(kept),
                objects,
                common,
                optimizer_elsewhere=optimizer is not None and not together,
            )
        ]
        if optimizer is not None and not together:
            items = self._items(of_optimizer)
            parts.insert(0, DirectoryContents(optimizer, (manifest.OPTIMIZER,), items, {}, common))
        return parts

    def _items(self, held: Sequence[local_shards.LocalShard]) -> list[local_shards.WriteItem]:
        """What this rank writes of them; cached for tensors that have not moved."""
        key = tuple((each.kind, each.tensor.data_ptr(), each.tensor.numel()) for each in held)
        if key not in self._found:
            if len(self._found) >= _KEPT:
                self._found.clear()  # memory has moved several times
            place = self._engine.place
            found = local_shards.plan_items(held, self._engine.table.architecture, place)
            self._found[key] = found
        return self._found[key]

    @property
    def _random_key(self) -> str:
        return f"{OURS}.random/shard_{self._rank}_{self._topology.world_size}"

    def check_kind(self, found: FoundCheckpoint) -> None:
        """CheckpointError unless it has what this policy saves: adapters of its own base, or the
        whole model.
        """
        adapters, other = self._engine.adapters, read_ours(found.root).get("adapters_of")
        if adapters is None and other is not None:
            raise CheckpointError(
                f"{found.root} has adapters alone: load it in a policy with the same "
                "policy.megatron_cfg.peft, on the model that they were trained on"
            )
        if adapters is not None and other is None:
            raise CheckpointError(
                f"{found.root} has a whole model, but this policy trains adapters: export it with "
                "megatron-policy convert and set policy.model_name to that"
            )
        if adapters is None or other is None:
            return
        for name, own in adapters.spec.identity(adapters.table).items():
            stated = other.get(name)
            if stated != own and not (name == "base" and is_same_base(stated, own)):
                raise CheckpointError(
                    f"{found.root} has adapters {_OTHERS[name]} ({stated}, not {own})"
                )

    def examine(self, found: FoundCheckpoint, plan: LoadPlan) -> NonTensorState:
        """What the checkpoint has besides tensors; CheckpointError if any of it is unusable."""
        ours = read_ours(found.root)
        if found.optimizer is not None and not {"schedule", "optimizer_step"} <= ours.keys():
            raise CheckpointError(
                f"{found.root} does not say where the optimizer's schedule is: it was saved "
                "without optimizer_path. Load it without optimizer_path, with fresh_optimizer=True"
            )
        if dict(found.weights.layout) != layout_of(self._topology):
            why = "they belong to the ranks of another layout, and start from the seed here"
            return NonTensorState(ours, None, why)
        content = plan.weights.object_bytes(self._random_key)
        if content is not None:
            random_states.parse(content)
        return NonTensorState(ours, content, "the checkpoint has none for this rank")

    def restore(self, found: FoundCheckpoint, rest: NonTensorState) -> LoadReport:
        """Restore counters, schedule and random states, and report on the load."""
        restored = ["weights"]
        missing: dict[str, str] = {}
        if found.optimizer is not None:
            assert self._training is not None and self._engine.trainable is not None
            counted = rest.ours["optimizer_step"]
            self._training.set_step(found.weights.step if counted is None else counted)
            changed = self._engine.trainable.restore_schedule(rest.ours["schedule"])
            for name, (old, new) in changed.items():
                missing[f"schedule.{name}"] = (
                    f"{old} in the checkpoint; the configuration's {new} is used"
                )
            restored += ["optimizer", "schedule"]
        else:
            missing["optimizer"] = found.no_optimizer
            if self._training is not None:
                assert self._engine.trainable is not None
                self._training.restart()
                self._found.clear()  # the cache would keep the old state alive
                self._engine.trainable.restore_schedule({"num_steps": 0})
                missing["schedule"] = "it starts anew with the optimizer"
        why = rest.no_random_reason
        if rest.random is not None:
            why = random_states.restore(rest.random, self._engine, self._generators) or ""
        if why:
            missing["random numbers"] = why
        else:
            restored.append("random numbers")
        host_data = rest.ours["host_data"]
        return LoadReport(str(found.root), found.weights.step, tuple(restored), missing, host_data)
