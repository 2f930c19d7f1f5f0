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

    def in_flight(self, stage: int) -> tuple[int, ...]:
        """For each model chunk of `stage`, how many microbatches' activations it holds at the same
        time, when the stage holds most.
        """
        passes = self.microbatches * self.vpp
        if self.vpp == 1:
            return (min(self.microbatches, self.pp - stage),)
        warmup = (self.pp - stage - 1) * 2 + (self.vpp - 1) * self.pp
        held = min(passes, warmup + 1)
        # The chunks take turns, `pp` microbatches each.
        whole, rest = divmod(held, self.pp * self.vpp)
        return tuple(
            whole * self.pp + min(self.pp, max(0, rest - chunk * self.pp))
            for chunk in range(self.vpp)
        )

    @property
    def bubble(self) -> float:
        """The share of a step in which a stage waits, if all stages are equally slow."""
        wait = Fraction(self.pp - 1, self.vpp)
        return float(wait / (self.microbatches + wait))

    def seconds(self, stages: Sequence[float]) -> float:
        """The least time of a step in which each stage needs so many seconds for a microbatch."""
        slowest = max(stages)
        return self.microbatches * slowest + (sum(stages) - slowest) / self.vpp
