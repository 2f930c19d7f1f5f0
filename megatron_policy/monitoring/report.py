"""A policy's memory, speed and balance, as numbers and as a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from statistics import fmean
from typing import Any

from megatron_policy.estimate.sizes import show_size

Numbers = dict[str, float]
_NAME = 26
"""Columns of a name."""


@dataclass(frozen=True)
class MemoryUse:
    """Bytes of one rank."""

    parameters: int
    """On its device now, as `gradients` and `optimizer` are."""
    gradients: int
    optimizer: int
    reference_on_host: int
    """The reference's weights, in host memory."""
    offloaded_on_host: int
    """Host memory kept for what leaves the device, in use or for reuse."""
    activations_expected: int | None
    """The most that a step over rows of full length keeps beside these, by `estimate/`; None where
    it is not known.
    """
    peak: int
    """The most that torch has allocated on the GPU since the last reset; on the CPU the most host
    memory that the process has ever had.
    """

    def joined(self, other: MemoryUse, choose: Callable[[int, int], int]) -> MemoryUse:
        """Each number chosen from both, where both have it."""
        own, others = asdict(self), asdict(other)
        known = [name for name in own if own[name] is not None and others[name] is not None]
        return replace(self, **{name: choose(own[name], others[name]) for name in known})


@dataclass(frozen=True)
class StepSpeed:
    """The last `calls` that trained: sums over them, and rates of all of them together."""

    calls: int
    seconds: float
    forward_backward_seconds: float
    reduce_seconds: float
    step_seconds: float
    tokens: float
    tokens_per_second: float
    mfu: float | None
    """Model FLOPs utilisation; None where the device's figures are not known."""

    @classmethod
    def of(cls, speeds: Sequence[Numbers]) -> StepSpeed:
        """From the `speed` of each call's result; KeyError for one without a time or its tokens."""

        def total(name: str) -> float:
            return sum(each[name] for each in speeds)

        seconds, tokens = total("seconds"), total("tokens")
        known = all("mfu" in each for each in speeds)
        return cls(
            len(speeds),
            seconds,
            total("forward_backward_seconds"),
            total("reduce_seconds"),
            total("step_seconds"),
            tokens,
            tokens / seconds,
            sum(each["mfu"] * each["seconds"] for each in speeds) / seconds if known else None,
        )

    @property
    def other_seconds(self) -> float:
        """Cutting batches, exchanging metrics, starting work."""
        parts = self.forward_backward_seconds + self.reduce_seconds + self.step_seconds
        return max(self.seconds - parts, 0.0)


@dataclass(frozen=True)
class StepBalance:
    """Means over the same calls; docs/interface.md says what each is."""

    packing_efficiency: float
    data_parallel_imbalance: float
    pipeline_bubble: float

    @classmethod
    def of(cls, speeds: Sequence[Numbers]) -> StepBalance:
        """From the `speed` of each call's result."""
        return cls(*(fmean(each[f.name] for each in speeds) for f in fields(cls)))


@dataclass(frozen=True)
class PolicyReport:
    """Memory, speed and balance of one rank or, from a driver, of all, and the mismatch of training
    and rollouts; prints as a table.

    `memory` is each kind's most on any rank and `memory_least` its least; `speed` and `balance` are
    those of the slowest rank, None before anything is trained. `mismatch` is the last one that was
    measured, over all ranks, by the names of metrics; None before any.
    """

    step: int
    """Optimizer steps taken."""
    ranks: int
    memory: MemoryUse
    memory_least: MemoryUse
    speed: StepSpeed | None
    balance: StepBalance | None
    mismatch: Numbers | None = None

    @classmethod
    def of_rank(
        cls,
        step: int,
        memory: MemoryUse,
        speeds: Sequence[Numbers],
        mismatch: Numbers | None = None,
    ) -> PolicyReport:
        """Of one rank, from its last training calls' `speeds`, and the last mismatch."""
        speed = StepSpeed.of(speeds) if speeds else None
        balance = StepBalance.of(speeds) if speeds else None
        return cls(step, 1, memory, memory, speed, balance, mismatch)

    @classmethod
    def merged(cls, reports: Sequence[PolicyReport]) -> PolicyReport:
        """Of several ranks."""
        most, least = reports[0].memory, reports[0].memory_least
        for each in reports[1:]:
            most, least = most.joined(each.memory, max), least.joined(each.memory_least, min)
        slowest = max(reports, key=lambda each: each.speed.seconds if each.speed else 0.0)
        ranks = sum(each.ranks for each in reports)
        trained = (slowest.speed, slowest.balance, slowest.mismatch)
        return cls(slowest.step, ranks, most, least, *trained)

    def as_dict(self) -> dict[str, Any]:
        """The same as plain values: a section is a dictionary."""
        return asdict(self)

    def __str__(self) -> str:
        several = self.ranks > 1
        steps = f"{self.step} step{'s' * (self.step != 1)}"
        lines = [
            f"after {steps}, on {self.ranks} rank{'s' * several}",
            _row("memory", "most", "least") if several else "memory",
        ]
        for name, label in _MEMORY.items():
            most, least = getattr(self.memory, name), getattr(self.memory_least, name)
            if most is not None:
                size = show_size(least) if several else ""
                lines.append(_row(f"  {label}", show_size(most), size))
        lines += self._speed_lines()
        if self.mismatch is not None:
            lines.append("training against rollouts, last measured")
            for name, number in self.mismatch.items():
                label = name.removeprefix("train_rollout_").replace("_", " ")
                shown = f"{number:.3g}" if number % 1 else f"{number:.0f}"
                lines.append(_row(f"  {label}", shown))
        return "\n".join(lines)

    def _speed_lines(self) -> Iterator[str]:
        speed, balance = self.speed, self.balance
        if speed is None or balance is None:
            yield "speed: nothing was trained yet"
            return
        calls = "last call" if speed.calls == 1 else f"last {speed.calls} calls"
        yield f"speed of the {calls}" + (", slowest rank" if self.ranks > 1 else "")
        parts = {
            "  seconds a call": speed.seconds,
            "    forward, backward": speed.forward_backward_seconds,
            "    reducing gradients": speed.reduce_seconds,
            "    clipping, update": speed.step_seconds,
            "    other": speed.other_seconds,
        }
        for label, seconds in parts.items():
            share = seconds / speed.seconds
            yield _row(label, f"{seconds / speed.calls:.3g}", f"{share:.0%}")
        yield _row("  tokens per second", f"{speed.tokens_per_second:,.0f}")
        yield _row("  MFU", "not known" if speed.mfu is None else f"{speed.mfu:.1%}")
        yield "balance"
        yield _row("  packing efficiency", f"{balance.packing_efficiency:.1%}")
        yield _row("  data-parallel imbalance", f"{balance.data_parallel_imbalance:.3f}")
        yield _row("  pipeline bubble", f"{balance.pipeline_bubble:.1%}")


_MEMORY = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "activations_expected": "activations, expected",
    "peak": "peak of the process",
    "reference_on_host": "reference, on the host",
    "offloaded_on_host": "offloaded, on the host",
}


def _row(name: str, value: str, second: str = "") -> str:
    return f"{name:<{_NAME}}{value:>10}{second:>10}".rstrip()
