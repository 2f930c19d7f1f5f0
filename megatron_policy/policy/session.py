"""What a policy runs on: its process group, coordinates, engine, exporter and memory."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from megatron_policy import device
from megatron_policy.adapters.targets import bind_tables
from megatron_policy.config import PolicyConfig
from megatron_policy.config.layout import checked_topology
from megatron_policy.config.parallel_sizes import parallel_sizes
from megatron_policy.coordination.timeouts import checked_timeout
from megatron_policy.device.process_groups import join_process_group, leave_process_group
from megatron_policy.errors import ConfigError
from megatron_policy.interfaces.engine import EngineBuilder, Trainable, TrainingEngine
from megatron_policy.memory.device_memory import DeviceMemory
from megatron_policy.memory.policy_state import PolicyState
from megatron_policy.refit.exporter import Exporter, Origin
from megatron_policy.training.reference import Reference, reference_of
from megatron_policy.training.step import NEEDS_OPTIMIZER
from megatron_policy.weights.load import DTYPES


class Session:
    """Joins the process group, builds this rank's part of the model and loads its weights, or, with
    `source_dtypes`, leaves them unfilled (see `EngineBuilder.build`).

    ConfigError for an illegal layout, ConversionError for a checkpoint that does not match its
    family's table; nothing is left behind after an error.
    """

    def __init__(
        self,
        config: PolicyConfig,
        *,
        timeout_s: float,
        init_optimizer: bool,
        init_reference_model: bool,
        source_dtypes: Mapping[str, torch.dtype] | None = None,
        builder: EngineBuilder,
        tokenizer: Any = None,
    ) -> None:
        checked_timeout(timeout_s)
        self._table, _ = bind_tables(config, reference=init_reference_model)
        # Tensor parallelism hides its collectives behind matrix products that are launched after
        # them, which must not start first (megatron/core/tensor_parallel/layers.py).
        device.place_process(in_launch_order=parallel_sizes(config).tp > 1)
        builder.prepare()
        self._owns_process_group = join_process_group(timeout_s)
        self._open = True
        self.state = PolicyState(awaits_weights=source_dtypes is not None)
        self._reference: Reference | None = None
        try:
            self.rank = dist.get_rank()
            # Data can carry a driver's plan: who passes some without learns of unequal shares.
            arch, ranks = self._table.architecture, dist.get_world_size()
            self.topology = checked_topology(config, arch, ranks, planned=True)
            self.coords = self.topology.coords(self.rank)
            self.engine: TrainingEngine = builder.build(
                config,
                self._table,
                self.topology,
                init_optimizer=init_optimizer,
                timeout_s=timeout_s,
                source_dtypes=source_dtypes,
            )
            self._reference = reference_of(config, self.engine, wanted=init_reference_model)
            self.exporter = Exporter.of(
                self.engine,
                timeout_s=config.refit_timeout_s,
                bucket_bytes=config.refit_bucket_bytes,
                dtype=None if config.refit_dtype is None else DTYPES[config.refit_dtype],
                origin=Origin(config.model_name, config.reference_model_name, tokenizer),
            )
            self.memory = DeviceMemory(
                self.engine,
                self.state,
                agree=self._agree,
                settle=self.settle,
                still=self.engine.pending_reads.wait,
            )
        except BaseException:
            self.close()
            raise

    def _agree(self, failure: Exception | None) -> None:
        self.exporter.begin()
        self.exporter.agree(failure)

    @property
    def reference(self) -> Reference:
        """The reference policy; ConfigError if there is none."""
        if self._reference is None:
            raise ConfigError(
                "this policy was made with init_reference_model=False, so it has no reference: "
                "leave that out"
            )
        return self._reference

    @property
    def uses_reference(self) -> bool:
        """Whether the model computes with the reference's weights now."""
        return self._reference is not None and self._reference.in_use

    @property
    def reference_bytes(self) -> int:
        """Host memory of the reference's weights; 0 without a reference."""
        return 0 if self._reference is None else self._reference.host_bytes

    @property
    def trainable(self) -> Trainable:
        """What a training step works on; ConfigError if there is no optimizer."""
        if self.engine.trainable is None:
            raise ConfigError(f"train() {NEEDS_OPTIMIZER}")
        return self.engine.trainable

    def settle(self) -> None:
        """Wait for a parameter gather that overlaps what follows a step."""
        if self.state.gather_pending and self.engine.trainable is not None:
            self.engine.trainable.settle()
        self.state.settle()

    def leave(self, lost_a_rank: bool) -> None:
        """To be called before `close`. Rank 0, whose process can host the ranks' store, waits up
        to 30 s for the others to leave too, but not while it handles an error nor after it
        `lost_a_rank`.
        """
        if self._open and not lost_a_rank and sys.exc_info()[0] is None:
            self.exporter.ranks.leave()

    def close(self) -> None:
        """Leave the process groups. A second call does nothing, so that a policy made in between
        keeps its groups.
        """
        if not self._open:
            return
        self._open = False
        self.state.close()
        if hasattr(self, "exporter"):  # missing after a failed start
            self.exporter.ranks.close()
        if hasattr(self, "engine"):
            self.engine.close()
        if self._owns_process_group:
            leave_process_group()
