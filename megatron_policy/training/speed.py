"""How fast training was, and where time was lost: what the ranks compute is counted when a batch is
cut, times are read when a call has ended. Neither adds a collective or waits for the device.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_policy.batch import BatchedDataDict
from megatron_policy.converters.architecture import Architecture
from megatron_policy.device import is_accelerated, memory_info
from megatron_policy.device.profiling import device_name
from megatron_policy.device.timing import Stopwatch
from megatron_policy.estimate.adapters import ModelAdapters
from megatron_policy.estimate.devices import figures_of
from megatron_policy.estimate.flops import ForwardFlops, forward_flops
from megatron_policy.interfaces.engine import REDUCE, Trainable
from megatron_policy.packing.cost import Cost
from megatron_policy.packing.microbatch import Microbatch, count_patches
from megatron_policy.parallel.topology import Topology
from megatron_policy.training.results import TrainResult

FORWARD_BACKWARD, STEP = "forward_backward", "step"
"""Parts of a training step: the schedule, which reduces gradients too; clipping and the update."""

Speed = dict[str, float]
_RATES = ("tokens_per_second", "mfu")


class Share(NamedTuple):
    """What one data-parallel rank has of a global batch: its `tokens`, the `positions` that it
    computes for them, padding included, its estimated `cost`, and the operations of a `forward` and
    of a `backward` pass without the head.
    """

    microbatches: int
    tokens: int
    positions: int
    cost: float
    forward: int
    backward: int

    @classmethod
    def of(cls, numbers: Sequence[float]) -> Share:
        """The share that was sent as these numbers."""
        microbatches, tokens, positions, cost, *flops = numbers
        return cls(int(microbatches), int(tokens), int(positions), cost, *map(int, flops))


@dataclass(frozen=True)
class Workload:
    """What all data-parallel ranks compute together: sums over global batches.

    `largest` adds up the cost of each batch's costliest rank, `mean` that of the mean. `steps` are
    the microbatches that each chunk of a stage runs, times chunks; `idle` are the steps for which a
    stage waits while the pipeline fills and drains.
    """

    tokens: int = 0
    positions: int = 0
    forward: int = 0
    backward: int = 0
    largest: float = 0.0
    mean: float = 0.0
    steps: int = 0
    idle: int = 0

    def __add__(self, other: Workload) -> Workload:
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Workload(*(own + more for own, more in pairs))

    @property
    def packing_efficiency(self) -> float:
        """Tokens for each computed position."""
        return self.tokens / max(self.positions, 1)

    @property
    def data_parallel_imbalance(self) -> float:
        """The costliest rank's cost over the mean; 1 where all have the same."""
        return self.largest / self.mean if self.mean else 1.0

    @property
    def pipeline_bubble(self) -> float:
        """The share of its steps for which a stage waits. Source: Narayanan et al. 2021, "Efficient
        Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", section 2.2.
        """
        return self.idle / max(self.idle + self.steps, 1)


@dataclass(frozen=True)
class Estimator:
    """Counts what a policy's ranks compute.

    A microbatch that only keeps ranks synchronised has `dummy` positions or, if `alike`, as many
    as the rank's others. `mtp_depth` tokens are predicted besides the next one (MTP). Beside
    `adapters` nothing else is trained.
    """

    architecture: Architecture
    topology: Topology
    cost: Cost
    dummy: int
    alike: bool
    mtp_depth: int
    adapters: ModelAdapters | None = None

    def share(self, data: BatchedDataDict, microbatches: Iterable[Microbatch]) -> Share:
        """This rank's share: the rows of `data`, cut into `microbatches`."""
        rows, width = data["input_ids"].shape
        lengths = data["input_lengths"].tolist() if "input_lengths" in data else [width] * rows
        layouts = [each.layout for each in microbatches]
        costs = (
            layout.sources_CTR.size(2) * sum(self.cost(part.length) for part in layout.segments)
            for layout in layouts
        )
        pictures = self.cost(0, sum(count_patches(data)))
        flops = self._flops(lengths, 0)
        return Share(
            len(layouts),
            sum(lengths),
            sum(layout.sources_CTR.numel() for layout in layouts),
            sum(costs) + pictures,
            flops.total,
            flops.backward,
        )

    def workload(self, shares: Sequence[Share], microbatches: int) -> Workload:
        """All ranks' shares of one global batch, filled up to as many `microbatches` each."""
        positions, costs = 0, []
        for share in shares:
            each, cost = self.dummy, self.cost(self.dummy)
            if self.alike and share.microbatches:
                each = share.positions // share.microbatches
                cost = share.cost / share.microbatches
            missing = microbatches - share.microbatches
            positions += share.positions + missing * each
            costs.append(share.cost + missing * cost)
        return Workload(
            sum(share.tokens for share in shares),
            positions,
            sum(share.forward for share in shares),
            sum(share.backward for share in shares),
            max(costs),
            sum(costs) / len(costs),
            microbatches * self.topology.vpp,
            self.topology.pp - 1,
        )

    def flops(self, workload: Workload, predicted: int, trained: bool) -> int:
        """Operations of `workload`, forward and, if `trained`, backward, with the head for
        `predicted` tokens.
        """
        head = self._flops((), predicted)
        forward, backward = workload.forward + head.total, workload.backward + head.backward
        return forward + backward if trained else forward

    def _flops(self, lengths: Sequence[int], predicted: int) -> ForwardFlops:
        return forward_flops(self.architecture, lengths, predicted, self.mtp_depth, self.adapters)


class SpeedMeter:
    """Measures one call that trains, or the calls of a step in parts: it runs from the start, and
    does not count what passes between `pause` and `resume`.
    """

    def __init__(self, estimator: Estimator, trainable: Trainable | None) -> None:
        """Without `trainable` nothing but a forward pass is measured."""
        self._estimator, self._trained = estimator, trainable is not None
        self.stopwatch = Stopwatch() if trainable is None else trainable.stopwatch
        self.stopwatch.restart()
        self.workload = Workload()
        self._seconds, self._began = 0.0, time.perf_counter()

    def pause(self) -> None:
        """Stop the clock."""
        self._seconds += time.perf_counter() - self._began

    def resume(self) -> None:
        """Start the clock, also if an error has kept it from being stopped."""
        self._began = time.perf_counter()

    def add_to(self, result: TrainResult) -> TrainResult:
        """The result with its `speed`. Its losses are in host memory, so the device has finished,
        and reading times does not wait.
        """
        self.pause()
        work, seconds = self.workload, self._seconds
        predicted = round(sum(result["valid_tokens"]))
        flops = self._estimator.flops(work, predicted, self._trained)
        reduced = self.stopwatch.seconds(REDUCE)
        peak = "peak_memory_bytes" if is_accelerated() else "peak_resident_bytes"
        found: Speed = {
            "seconds": seconds,
            "forward_backward_seconds": self.stopwatch.seconds(FORWARD_BACKWARD) - reduced,
            "reduce_seconds": reduced,
            "step_seconds": self.stopwatch.seconds(STEP),
            "tokens": work.tokens,
            "tokens_per_second": work.tokens / seconds,
            "packing_efficiency": work.packing_efficiency,
            "data_parallel_imbalance": work.data_parallel_imbalance,
            "pipeline_bubble": work.pipeline_bubble,
            peak: memory_info().peak,
        }
        if self._estimator.architecture.in_full:
            found["model_flops"] = flops
            figures = figures_of(device_name()) if is_accelerated() else None
            if figures is not None:
                devices = self._estimator.topology.world_size
                found["mfu"] = flops / (seconds * devices * figures.bf16_flops)
        result["speed"] = found
        return result


def merge_speeds(speeds: Sequence[Mapping[str, float]]) -> Speed:
    """One for several ranks of a call: the longest times, the largest peak, and the rates of the
    slowest rank; what is counted is the same on all.
    """
    slowest = max(speeds, key=lambda each: each["seconds"])
    return {
        name: slowest[name] if name in _RATES else max(each[name] for each in speeds)
        for name in slowest
    }
