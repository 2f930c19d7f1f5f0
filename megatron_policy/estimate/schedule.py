"""Megatron-Core's pipeline schedules in numbers: what is in flight, and how long stages wait.

Source: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM", sections 2.2 and 2.3; the counts of warm-up passes are those of Megatron-Core's
`get_pp_rank_microbatches`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from megatron_policy.parallel.topology import Topology


class Pass(NamedTuple):
    """A forward or a `backward` pass of one microbatch through one model chunk of a stage."""

    backward: bool
    microbatch: int
    chunk: int


@dataclass(frozen=True)
class Schedule:
    """The schedule of `microbatches` on each data-parallel replica."""

    pp: int
    vpp: int
    microbatches: int

    @classmethod
    def of(cls, topology: Topology, microbatches: int) -> Schedule:
        return cls(topology.pp, topology.vpp, microbatches)

    def most(self, stage: int, kept: Sequence[int], most: Sequence[int]) -> int:
        """The most that `stage` holds at the same time, if it keeps `kept[i]` of a microbatch in
        model chunk i between its passes and holds `most[i]` during its backward pass.
        """
        passes, steps = self.microbatches * self.vpp, self.pp * self.vpp
        if self.vpp == 1:
            steps = 1  # all are alike
        warmup = self._warmup(stage)
        highest = held = 0
        for number in range(min(passes, warmup)):
            held += kept[self._chunk(number)]
        for number in range(min(passes, steps)):
            if number + warmup < passes:
                held += kept[self._chunk(number + warmup)]
            # The backward passes visit the chunks in the other order.
            chunk = self.vpp - 1 - self._chunk(number)
            highest = max(highest, held - kept[chunk] + most[chunk])
            held -= kept[chunk]
        return highest

    def _chunk(self, number: int) -> int:
        """The chunk of forward pass `number`: they take turns, `pp` microbatches each."""
        return number % (self.pp * self.vpp) // self.pp

    def _warmup(self, stage: int) -> int:
        """Forward passes of `stage` before its first backward pass follows a forward pass."""
        if self.vpp == 1:
            return self.pp - stage - 1
        return (self.pp - stage - 1) * 2 + (self.vpp - 1) * self.pp

    def order(self, stage: int) -> list[Pass]:
        """The passes of `stage` in Megatron-Core's order: warm-up, then a forward and a backward
        pass in turn, then the backward passes that are left.
        """
        forward, backward = [], []
        # As Megatron-Core's `get_schedule_table`: groups of `pp` microbatches, each through all
        # chunks; the last group can be smaller.
        for first in range(0, self.microbatches, self.pp):
            group = range(first, min(first + self.pp, self.microbatches))
            for chunk in range(self.vpp):
                forward += [Pass(False, number, chunk) for number in group]
                backward += [Pass(True, number, self.vpp - 1 - chunk) for number in group]
        warmup = min(self._warmup(stage), len(forward))
        turns = [each for pair in zip(forward[warmup:], backward, strict=False) for each in pair]
        return [*forward[:warmup], *turns, *backward[len(forward) - warmup :]]

    @property
    def bubble(self) -> float:
        """The share of a step in which a stage waits, if all stages are equally slow."""
        wait = Fraction(self.pp - 1, self.vpp)
        return float(wait / (self.microbatches + wait))

    def seconds(self, stages: Sequence[float]) -> float:
        """The least time of a step in which each stage needs so many seconds for a microbatch."""
        slowest = max(stages)
        return self.microbatches * slowest + (sum(stages) - slowest) / self.vpp
