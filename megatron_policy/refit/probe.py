"""A probe of an engine: whether it computes with the weights that it was sent, and if not, with
which kind of them. Digests say what has arrived, not what kernels read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from megatron_policy.converters.rows import Role
from megatron_policy.converters.table import EMBEDDING, HEAD, LAYER, Entry
from megatron_policy.errors import ConfigError, RefitError, WorkerError
from megatron_policy.refit.comparison import (
    EngineComparison,
    Logprobs,
    Rows,
    Tolerance,
    check_rows,
    checked,
    compare,
    draw_rows,
)

T = TypeVar("T")
ROWS, LENGTH = 8, 32  # of a probe that is given no rows
DOUBLE, SHRINK = 2.0, 2.0**-60
"""Weights are changed by a power of two, which is undone without a copy, bit for bit."""
BRANCHES = ("attention", "mlp", "experts", "shared experts")
"""Kinds without which a model still computes: shrunk, they add nothing, in whatever form kernels
read them. Others are doubled.
"""
LEAST_SHARE = 0.1
"""An engine that moves by less than this share of what the policy does has not followed."""
_OF_ROLES = {
    Role.BIAS: "biases",
    Role.NORM: "norms",
    Role.SINK: "attention sinks",
    Role.ACTIVATION: "activations",
}
_OF_NAMES = {  # the first that is in a name
    "router": ("router", "mlp.gate.", "block_sparse_moe.gate."),
    "shared experts": ("shared_expert",),
    "experts": ("expert",),
    "attention": ("attn", "attention"),
    "other mixers": ("mixer",),
    "mlp": ("mlp", "feed_forward", "linear_fc"),
}


@dataclass(frozen=True)
class ProbeFacts:
    """What a probe has to know of a policy; the same on every rank."""

    vocabulary: int
    longest: int
    """The most tokens of a row."""
    dtypes: tuple[torch.dtype, ...]
    """Of training, and of what is sent."""
    step: int
    kinds: tuple[str, ...]
    """The kinds of parameters that are sent, and that log-probabilities depend on."""


class ProbedPolicy(Protocol):
    """What a probe asks of a policy: on each rank, collectively, or in a driver."""

    def probe_facts(self, adapters: bool) -> ProbeFacts:
        """What it is; `adapters`: if they alone are sent."""

    def probe_logprobs(self, rows: Rows) -> Logprobs:
        """The policy's own log-probabilities, at temperature 1 and without filters."""

    def disturb_weights(self, kind: str | None, adapters: bool) -> None:
        """Change all weights of this kind, once those that were changed before are restored; None
        only restores them.
        """

    def once(self, call: Callable[[], T]) -> T:
        """What `call` returns, in JSON's types, where it is called once: on every rank. RefitError
        everywhere if it raises.
        """

    def together(self, hand_over: Callable[[], T]) -> T:
        """Call this on all ranks; if it raises on one, all raise."""


@dataclass
class EngineProbe:
    """The probes of one engine, on all ranks of a policy, or in a driver; make another one for
    another engine.

    `ask` is called on rank 0 with rows of tokens, and returns the engine's log-probabilities of all
    but the first of each, at temperature 1 and without filters. `hand_over` is one whole refit of
    the engine, both sides of it: `refit` calls it, and so does a probe that looks for what is
    stale, meanwhile with changed weights, so that nothing may be sampled then; without it a probe
    only tells. `mark_mixed` is called on rank 0 if the engine's weights are not to be used.
    """

    ask: Callable[[Rows], Any] | None
    hand_over: Callable[[], Any] | None = None
    mark_mixed: Callable[[], object] | None = None
    every: int = 10
    """`refit` probes after the first refit, then after each `every`-th, and after each that follows
    a probe or a refit that has failed.
    """
    thorough: bool = False
    """The first probe changes each kind of parameters in turn, at the cost of a refit each, and
    looks whether the engine follows. Without it nothing is known of weights that have not moved.
    """
    rows: Rows | None = None
    """By default some of the vocabulary's tokens, other ones at each probe."""
    seed: int = 0
    tolerance: float | None = None
    """The largest mean difference; by default that of `comparison.ROUNDING`."""
    engine_dtype: torch.dtype | None = None
    """What the engine computes in; by default what it is sent."""
    adapters: bool = False
    """Whether `hand_over` sends the adapters alone."""
    probes: int = field(default=0, init=False)
    """How many have succeeded."""
    _left: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ConfigError(f"every is {self.every}: a probe closes each so many refits, from 1")
        if self.rows is not None:
            check_rows(self.rows)
        if self.thorough and self.hand_over is None:
            raise ConfigError("a thorough probe refits: give it `hand_over`, one whole refit")

    def refit(self, policy: Any) -> Any:
        """Call `hand_over`, then `policy.probe(self)` if it is time; returns what the refit has."""
        if self.hand_over is None:
            raise ConfigError("this probe cannot refit: give it `hand_over`, one whole refit")
        due, left, self._left = self._left == 0, self._left, 0
        # Of ranks all have to fail alike; a driver is alone.
        ranks = getattr(policy, "probing", None)
        sent = self.hand_over() if ranks is None else ranks.together(self.hand_over)
        if due:
            policy.probe(self)
        self._left = (self.every if due else left) - 1
        return sent


def run_probe(probe: EngineProbe, policy: ProbedPolicy) -> EngineComparison:
    """Compare the engine with the policy; see `EngineProbe`. RefitError, alike on all ranks, if
    they differ by more than rounding, or the engine does not follow a kind of weights.
    """
    facts = policy.probe_facts(probe.adapters)
    engine = [] if probe.engine_dtype is None else [probe.engine_dtype]
    tolerance = Tolerance.of((*facts.dtypes, *engine), probe.tolerance)
    length = min(LENGTH, facts.longest)
    drawn = draw_rows(facts.vocabulary, length, ROWS, probe.seed, probe.probes)
    found = _Probing(probe, policy, facts, tolerance, probe.rows or drawn).run()
    probe.probes += 1
    return found


def find_kind(entry: Entry) -> str | None:
    """The kind that a parameter belongs to; None if no log-probability of a token depends on it."""
    name = entry.adapts or entry.megatron
    if name.startswith("mtp."):
        return None
    if not entry.adapts and entry.row.role in _OF_ROLES:
        return _OF_ROLES[entry.row.role]
    if entry.where != LAYER:
        tied = entry.where == HEAD and not entry.row.owns
        return "embedding" if tied or entry.where == EMBEDDING else "head"
    found = (kind for kind, words in _OF_NAMES.items() if any(word in name for word in words))
    return next(found, "other weights of layers")


def list_kinds(entries: Iterable[Entry]) -> tuple[str, ...]:
    """The kinds that there are, in the entries' order."""
    kinds = dict.fromkeys(map(find_kind, entries))
    return tuple(kind for kind in kinds if kind is not None)


class Disturbance:
    """Changed parameters, until they are restored, bit for bit."""

    def __init__(self, held: Iterable[tuple[Entry, Tensor]], kind: str) -> None:
        """Change all parameters of that kind: those of zeros to ones, if they are no matrices or
        belong to adapters, others by a factor.
        """
        own = {
            parameter.data_ptr(): (entry, parameter.detach())
            for entry, parameter in held
            if find_kind(entry) == kind and parameter.is_floating_point() and parameter.numel()
        }
        self._scaled = list[tuple[Tensor, float]]()
        self._copied = list[tuple[Tensor, Tensor]]()
        try:
            for entry, tensor in own.values():
                factor = SHRINK if kind in BRANCHES and not entry.adapts else DOUBLE
                can_fill = bool(entry.adapts) or entry.row.role is not Role.MATRIX
                if can_fill and not tensor.contiguous().view(torch.uint8).any():
                    self._scaled.append((tensor.fill_(1.0), math.inf))
                elif torch.equal((tensor * factor).div_(factor), tensor):
                    self._scaled.append((tensor.mul_(factor), factor))
                else:  # too small, or too large
                    before = tensor.cpu().clone()
                    tensor.mul_(factor)
                    self._copied.append((tensor, before))
        except BaseException:
            self.undo()
            raise

    def undo(self) -> None:
        """Restore what was changed."""
        while self._scaled:
            tensor, factor = self._scaled.pop()
            tensor.div_(factor)  # ones by infinity are zeros
        while self._copied:
            tensor, before = self._copied.pop()
            tensor.copy_(before)


@dataclass(frozen=True)
class _Seen:
    """What experiments show: kinds that the engine does not follow, those without which it agrees,
    and those of which nothing can be said.
    """

    stale: list[str] = field(default_factory=list)
    needless: list[str] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)

    def conclude(self, again: EngineComparison) -> str:
        """In words; `again` is what was found in the end."""
        if self.stale:
            words = f"It does not follow its {', '.join(self.stale)}: these arrive, and it "
            words += "computes with others"
        elif again.agrees:
            words = "Another refit has put it right: weights that had arrived were changed, or "
            words += "not taken"
        elif self.needless:
            words = f"Without its {' or its '.join(self.needless)} it agrees: its kernels read "
            words += "them in another form, a part of them is stale, or their router or rotary "
            words += "embedding is another"
        else:
            words = "It follows each kind of weights: a part of one is stale, or it computes "
            words += "another model (its config.json, the rotary embedding, filters, a dtype)"
        unseen = f". Nothing can be said of its {', '.join(self.unseen)}" if self.unseen else ""
        return f". {words}{unseen}"


@dataclass(frozen=True)
class _Probing:
    """One probe under way."""

    probe: EngineProbe
    policy: ProbedPolicy
    facts: ProbeFacts
    tolerance: Tolerance
    rows: Rows

    def run(self) -> EngineComparison:
        probe = self.probe
        found = self._first()
        thorough = probe.thorough and not probe.probes
        words, seen, agrees = str(found), _Seen(), found.agrees
        if not found.agrees:
            words += self._mark()
        if probe.hand_over is not None and (thorough or not found.agrees):
            try:
                again, seen = self._experiment(always=thorough)
            except Exception as error:
                words += self._mark()
                raise RefitError(f"{words}. The search for the reason failed: {error}") from error
            if found.agrees and not again.agrees:
                words, agrees = str(again), False
            words += seen.conclude(again)
            if seen.stale or not again.agrees:
                words += self._mark()
        if seen.stale or not agrees:
            step = self.facts.step
            raise RefitError(
                f"the engine does not compute with the policy's weights of step {step}: {words}"
            )
        return found

    def _first(self) -> EngineComparison:
        ours, theirs = self._read()
        try:
            return self._compare(ours, theirs)
        except RefitError:
            self._mark()
            raise

    def _experiment(self, *, always: bool) -> tuple[EngineComparison, _Seen]:
        """Refit again and, if that does not help, or `always`, with each kind of weights changed,
        then without. What is found in the end, and what was seen of the kinds.
        """
        seen, before = _Seen(), self._read_anew()
        again = self._compare(*before)
        if again.agrees and not always:
            return again, seen
        try:
            for kind in self.facts.kinds:
                self.policy.disturb_weights(kind, self.probe.adapters)
                after = self._read_anew()
                ours, theirs = map(_distance, after, before)
                if not self.tolerance.token < ours < math.inf:
                    seen.unseen.append(kind)
                elif theirs < LEAST_SHARE * ours:
                    seen.stale.append(kind)
                elif kind in BRANCHES and theirs < math.inf and self._compare(*after).agrees:
                    seen.needless.append(kind)
        finally:
            self.policy.disturb_weights(None, self.probe.adapters)
        return self._compare(*self._read_anew()), seen

    def _read_anew(self) -> tuple[Logprobs, Logprobs]:
        assert self.probe.hand_over is not None
        self.policy.together(self.probe.hand_over)
        return self._read()

    def _read(self) -> tuple[Logprobs, Logprobs]:
        """What both sides say of the rows."""
        own = self.policy.probe_logprobs(self.rows)

        def ask() -> tuple[Logprobs, Logprobs]:
            if self.probe.ask is None:
                raise RefitError("the probe has no `ask` where it is needed, on rank 0")
            theirs = self.probe.ask(self.rows)
            return own, checked(self.rows, theirs, "engine")

        # The policy's go along: replicas can round differently, and all have to decide alike.
        ours, theirs = self.policy.once(ask)
        return ours, theirs

    def _compare(self, ours: Logprobs, theirs: Logprobs) -> EngineComparison:
        return compare(self.rows, ours, theirs, self.tolerance)

    def _mark(self) -> str:
        """Mark the engine; in words, if that fails."""

        def mark() -> None:
            if self.probe.mark_mixed is not None:
                self.probe.mark_mixed()

        try:
            self.policy.once(mark)
        except (RefitError, WorkerError) as error:
            return f". It could not be marked as mixed: {error}"
        return ""


def _distance(after: Logprobs, before: Logprobs) -> float:
    """The mean distance; infinite if a number of `after` is."""
    pairs = [pair for rows in zip(after, before, strict=True) for pair in zip(*rows, strict=True)]
    apart = math.fsum(abs(new - old) for new, old in pairs) / len(pairs)
    return apart if math.isfinite(apart) else math.inf
