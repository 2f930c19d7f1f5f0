"""Refits that send what has changed over a transport of whole tensors, and whole ones to engines
that need them.

Before each refit engines are asked which weights they have. If all have some that this policy has
sent, and the ranks still have the changes since, these are sent, as tensors of bytes; else all
weights.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from megatron_policy.refit.arguments import check_object
from megatron_policy.refit.delivery import Transport, carry_out
from megatron_policy.refit.deltas.changes import OwnShare, SentCopy, list_group_shares
from megatron_policy.refit.deltas.message import encode_message
from megatron_policy.refit.manifest import RefitManifest, StagedVersion, WeightVersion, read_version
from megatron_policy.refit.plan import RefitPlan, RefitTensor
from megatron_policy.refit.shards import ShardPlan
from megatron_policy.refit.streams import Streams, measure_stream
from megatron_policy.refit.transports.collective.shards import ShardRefits

if TYPE_CHECKING:
    from megatron_policy.memory.pinned_pool import PinnedMemoryPool
    from megatron_policy.refit.exporter import Exporter
    from megatron_policy.refit.ranks import RefitRanks

_MOST_VERSIONS = 64
_MOST_FAILURES = 2  # in turn; then an engine gets whole weights
_FAILED, _WHOLE = "failed", "whole"


class AsksEngines(Protocol):
    """What reaches engines that can be asked."""

    def ask(self, exporter: Exporter) -> list[StagedVersion]:
        """Which weights the engines have that this rank serves. RefitError if one is silent."""


class AskingTransport(AsksEngines, Transport, Protocol):
    """A transport whose engines can be asked."""


class _Sent:
    """What a rank has of the weights that were sent: copies, and the changes that led to them."""

    def __init__(self, plan: object, copies: Sequence[SentCopy]) -> None:
        """The copies are of what the `plan` has this rank send, each with messages of its own."""
        self.plan, self.copies = plan, copies
        self.chain, self.number = "", 0
        self._changes: list[list[bytes]] = []
        self.failed = 0
        """How many refits in turn that sent changes have failed."""

    @property
    def oldest(self) -> int:
        """The version since which the changes are here."""
        return self.number - len(self._changes)

    def advance(self) -> None:
        """Make it the weights as they are now. Only so many changes are kept that sending them is
        worth it; after a failure it is of no use.
        """
        self._changes.append([encode_message(copy.advance()) for copy in self.copies])
        self.number += 1
        most = sum(copy.nbytes for copy in self.copies) // 2
        while len(self._changes) > _MOST_VERSIONS or (most and self._nbytes > most):
            self._changes.pop(0)

    def begin_chain(self, name: str) -> None:
        """Begin a chain of versions with the weights as they are."""
        self.chain, self.number = name, 0
        self._changes.clear()

    def since(self, number: int) -> list[list[bytes]]:
        """The messages of each copy that lead from that version on."""
        later = self._changes[number - self.oldest :]
        return [list(messages) for messages in zip(*later, strict=True)] or [
            [] for _ in self.copies
        ]

    @property
    def _nbytes(self) -> int:
        return sum(len(message) for messages in self._changes for message in messages)


class DeltaStream:
    """A transport's engines, to which only the elements are sent whose bits have changed since
    their version; and all weights to all of them if one has none of this policy, or if the changes
    are half as large as the weights.

    A policy keeps, in host memory, one copy of what it has sent so: with transports in turn that
    gather other things, each refit sends all weights.
    """

    def __init__(self, transport: AskingTransport) -> None:
        """`transport` is an `IpcStream`, that of a `Collective`, or vLLM's `WeightPatches`.
        ConfigError for one that cannot ask.
        """
        takes = (
            "a transport that can ask its engines which weights they have, an IpcStream or a "
            "group's transport(); for a directory there is DeltaDirectory, for shards DeltaShards"
        )
        check_object(transport, "DeltaStream", takes, ("ask", "plan", "open"))
        self.transport = transport

    def begin(
        self,
        exporter: Exporter,
        ranks: RefitRanks,
        pool: PinnedMemoryPool,
        step: int,
        *,
        beside: bool,
    ) -> Callable[[], RefitManifest]:
        """Copy what has changed, and `beside` training all weights to the pool too, which an engine
        may need; see `Source`.
        """
        began, plan = time.perf_counter(), self.transport.plan(exporter)
        sent: _Sent | None = exporter.published.pop(DeltaStream, None)
        planned = plan.in_rounds if plan is not None and beside else plan
        frozen, failure = exporter, None
        exporter.restart()
        ranks.begin()
        try:
            with ranks.alive():
                if sent is not None and sent.plan is plan:
                    sent.advance()
                else:
                    sent = None  # before another copy is made
                    sent = _Sent(plan, _copy_shares(exporter, plan))
                frozen = exporter.freeze(planned if beside else None, ranks, pool)
        except Exception as error:
            failure = error
        exporter.restart()
        ranks.agree(failure)
        assert sent is not None
        exporter.published[DeltaStream] = sent

        def send() -> RefitManifest:
            since = _agree_on_version(frozen, sent, self.transport)
            version = WeightVersion(sent.chain, sent.number, since)
            if since is None:
                frozen.ranks.leave_together()
                for copy in sent.copies:
                    copy.forget_sums()  # an engine may have refused what follows from them
                whole = (frozen if beside else exporter).versioned(version)
                whole.begin()
                sent.failed = 0
                return carry_out(whole, self.transport, planned, step, began)
            changes = frozen.versioned(version, _join_streams(frozen, sent.since(since)))
            sent.failed += 1
            carried = carry_out(changes, self.transport, self.transport.plan(changes), step, began)
            sent.failed = 0
            return replace(carried, tensors={}, changed_bytes=carried.total_bytes)

        return send


class DeltaShards:
    """An engine that is split, each rank of which gets only the elements whose bits have changed
    since its version; and all of its elements, as every other rank, if one has none of this policy,
    or if the changes are half as large as the weights.

    A trainer keeps, in host memory, a copy of what it sends, for each engine rank.
    """

    def __init__(self, refits: ShardRefits) -> None:
        """`refits` are those of all elements: what `Collective.shards` has returned, and the same
        at every refit. ConfigError for anything else.
        """
        takes = "what Collective.shards(held) has returned; for whole tensors there is DeltaStream"
        check_object(refits, "DeltaShards", takes, ("ask", "plan", "deliver_changes"))
        self._refits = refits

    def deliver(self, exporter: Exporter, step: int) -> RefitManifest:
        """Send the weights as they are after `step` optimizer steps.

        Collective over all ranks. RefitError on all of them if any failed.
        """
        began, failure = time.perf_counter(), None
        plan, _ = self._refits.plan(exporter)
        sent: _Sent | None = exporter.published.pop(DeltaShards, None)
        exporter.begin()
        try:
            with exporter.ranks.alive():
                if sent is not None and sent.plan is plan:
                    sent.advance()
                else:
                    sent = None  # before other copies are made
                    sent = _Sent(plan, _copy_shards(exporter, plan))
        except Exception as error:
            failure = error
        exporter.agree(failure)
        assert sent is not None
        exporter.published[DeltaShards] = sent
        since = _agree_on_version(exporter, sent, self._refits)
        versioned = exporter.versioned(WeightVersion(sent.chain, sent.number, since))
        if since is None:
            exporter.ranks.leave_together()
            sent.failed = 0
            return self._refits.deliver(versioned, step)
        sent.failed += 1
        changes = zip(sent.copies, sent.since(since), strict=True)
        messages = [of_engine if copy.nbytes else [] for copy, of_engine in changes]
        carried = self._refits.deliver_changes(versioned, messages, step, began)
        sent.failed = 0
        return carried


def _copy_shards(exporter: Exporter, plan: ShardPlan) -> list[SentCopy]:
    """Copies of what this rank sends to each engine rank, by places in that rank's tensors."""
    shares: list[list[OwnShare]] = [[] for _ in range(plan.engine_ranks)]
    for each in plan.by_source.get(exporter.rank, ()):
        shape = each.shape if each.tensor.shape else ()
        part = RefitTensor(each.tensor.name, shape, each.tensor.dtype, each.tensor.stage)
        pieces = tuple((to, own) for own, to in each.moves)
        shares[each.target].append(OwnShare(part, each.entry, pieces))
    return [SentCopy(of_engine, exporter.view) for of_engine in shares]


def _agree_on_version(exporter: Exporter, sent: _Sent, engines: AsksEngines) -> int | None:
    """Since which version to send what has changed; None for all weights. Collective; begins an
    operation.
    """
    ranks, failure, asked = exporter.ranks, None, list[StagedVersion]()
    exporter.begin()
    try:
        with ranks.alive():
            asked = engines.ask(exporter)
    except Exception as error:
        failure = error
    # The engine that takes part may be another than the one that was asked.
    oldest = sent.oldest if sent.failed < _MOST_FAILURES else sent.number + 1
    own = [failure is not None, [sent.chain, sent.number], oldest, asked]
    words = ranks.gather_text(json.dumps(own))
    decided = ranks.broadcast_text(_decide(words) if exporter.rank == 0 else None)
    if decided == _FAILED:
        exporter.agree(failure)  # raises on every rank
    kind, _, value = decided.partition(" ")
    if kind != _WHOLE:
        return int(value)
    if value:
        sent.begin_chain(value)
    return None


def _copy_shares(exporter: Exporter, plan: RefitPlan | None) -> list[SentCopy]:
    """Copies of this rank's own shares of a plan, for each kind of group."""
    kinds = [False, *([True] if exporter.topology.experts_apart else [])]
    architecture, at = exporter.table.architecture, (exporter.topology, exporter.rank)
    return [
        SentCopy(
            [
                share
                for exchange in (plan.exchanges if plan else ())
                if exchange.of_experts == kind
                for share in list_group_shares(exchange, architecture, *at)
            ],
            exporter.view,
        )
        for kind in kinds
    ]


def _decide(words: Sequence[str]) -> str:
    """What all ranks do, by what each has said: `whole` and, if they are not of one chain, the name
    of a new one; or `since` and a version.
    """
    failed, at, oldest, asked = zip(*map(json.loads, words), strict=True)
    if any(failed):
        return _FAILED
    first, engines = read_version(at[0]), [read_version(e) for each in asked for e in each]
    if first is None or not first[0] or any(read_version(each) != first for each in at):
        return f"{_WHOLE} {secrets.token_hex(8)}"
    chain, number = first
    numbers = [engine[1] for engine in engines if engine is not None and engine[0] == chain]
    if len(numbers) < len(engines) or not max(oldest) <= min(numbers, default=number) <= number:
        return _WHOLE
    return f"since {min(numbers, default=number)}"


def _join_streams(exporter: Exporter, messages: Sequence[Sequence[bytes]]) -> list[Streams]:
    """This rank's streams, with the lengths of all ranks'. Collective."""
    topology, ranks = exporter.topology, exporter.ranks
    own = json.dumps([measure_stream(each) for each in messages])
    lengths = json.dumps([json.loads(each) for each in ranks.gather_text(own)])
    of_ranks = json.loads(ranks.broadcast_text(lengths if exporter.rank == 0 else None))
    sizes = (topology.tp, topology.ep * topology.expert_tp)
    per_stage = topology.world_size // topology.pp
    of_stages = [of_ranks[n : n + per_stage] for n in range(0, len(of_ranks), per_stage)]
    return [
        Streams(bool(kind), sizes[kind], each, [max(rank[kind] for rank in of) for of in of_stages])
        for kind, each in enumerate(messages)
    ]
