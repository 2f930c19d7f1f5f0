"""Megatron-Core's pipeline schedules in numbers: what is in flight, and how long stages wait.

Source: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM", sections 2.2 and 2.3; the counts of warm-up passes are those of Megatron-Core's
`get_pp_rank_microbatches`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from megatron_policy.parallel.topology import Topology


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
        warmup = self.pp - stage - 1
        if self.vpp == 1:
            steps = 1  # all are alike
        else:
            warmup = warmup * 2 + (self.vpp - 1) * self.pp
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

    @property
    def bubble(self) -> float:
        """The share of a step in which a stage waits, if all stages are equally slow."""
        wait = Fraction(self.pp - 1, self.vpp)
        return float(wait / (self.microbatches + wait))

    def seconds(self, stages: Sequence[float]) -> float:
        """The least time of a step in which each stage needs so many seconds for a microbatch."""
        slowest = max(stages)
        return self.microbatches * slowest + (sum(stages) - slowest) / self.vpp
