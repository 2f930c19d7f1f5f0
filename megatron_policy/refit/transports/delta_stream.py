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
from megatron_policy.refit.delivery import Transport, carry_out, explain_whole
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


class AsksEngines(Protocol):
    """What reaches engines that can be asked."""

    def ask(self, exporter: Exporter) -> list[StagedVersion]:
        """Which weights the engines have that this rank serves. RefitError if one is silent."""


class AskingTransport(AsksEngines, Transport, Protocol):
    """A transport whose engines can be asked."""


class _Sent:
    """What a rank has of the weights that were sent: copies, and the changes that led to them."""

    def __init__(self, plan: object, copies: Sequence[SentCopy], begun: str) -> None:
        """The copies are of what the `plan` has this rank send, each with messages of its own;
        `begun` says why there is nothing older.
        """
        self.plan, self.copies, self.begun = plan, copies, begun
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
                    begun, sent = _explain_new(sent), None  # before another copy is made
                    sent = _Sent(plan, _copy_shares(exporter, plan), begun)
                frozen = exporter.freeze(planned if beside else None, ranks, pool)
        except Exception as error:
            failure = error
        exporter.restart()
        ranks.agree(failure)
        assert sent is not None
        exporter.published[DeltaStream] = sent

        def send() -> RefitManifest:
            since, why = _agree_on_version(frozen, sent, self.transport)
            version = WeightVersion(sent.chain, sent.number, since)
            if since is None:
                frozen.ranks.leave_together()
                for copy in sent.copies:
                    copy.forget_sums()  # an engine may have refused what follows from them
                whole = (frozen if beside else exporter).versioned(version)
                whole.begin()
                sent.failed = 0
                carried = carry_out(whole, self.transport, planned, step, began)
                return explain_whole(exporter, carried, why)
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
        plan = self._refits.plan(exporter)
        sent: _Sent | None = exporter.published.pop(DeltaShards, None)
        exporter.begin()
        try:
            with exporter.ranks.alive():
                if sent is not None and sent.plan is plan:
                    sent.advance()
                else:
                    begun, sent = _explain_new(sent), None  # before other copies are made
                    sent = _Sent(plan, _copy_shards(exporter, plan), begun)
        except Exception as error:
            failure = error
        exporter.agree(failure)
        assert sent is not None
        exporter.published[DeltaShards] = sent
        since, why = _agree_on_version(exporter, sent, self._refits)
        versioned = exporter.versioned(WeightVersion(sent.chain, sent.number, since))
        if since is None:
            exporter.ranks.leave_together()
            sent.failed = 0
            return explain_whole(exporter, self._refits.deliver(versioned, step), why)
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
        part = RefitTensor(each.tensor.name, each.shape, each.tensor.dtype, each.tensor.stage)
        pieces = tuple((to, own) for own, to in each.moves)
        shares[each.target].append(OwnShare(part, each.entry, pieces))
    return [SentCopy(of_engine, exporter.view) for of_engine in shares]


def _explain_new(before: _Sent | None) -> str:
    if before is None:
        return "nothing is kept of a refit before: this is the first, or the last one has failed"
    return "the refit before was to a transport that gathers other tensors"


def _agree_on_version(
    exporter: Exporter, sent: _Sent, engines: AsksEngines
) -> tuple[int | None, str]:
    """Since which version to send what has changed; or None, and why all weights are to be sent.
    Collective; begins an operation.
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
    own = [failure is not None, [sent.chain, sent.number], oldest, asked, sent.begun]
    words = ranks.gather_text(json.dumps(own))
    text = ranks.broadcast_text(json.dumps(_decide(words)) if exporter.rank == 0 else None)
    decided = json.loads(text)
    if not decided:
        exporter.agree(failure)  # raises on every rank
    since, why, chain = decided
    if chain:
        sent.begin_chain(chain)
    return since, why


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


def _decide(words: Sequence[str]) -> tuple[int | None, str, str] | None:
    """What all ranks do, by what each has said: since which version they send what has changed, or
    why all weights and, if they are not of one chain, the name of a new one. None if one has
    failed.
    """
    failed, at, oldest, asked, begun = zip(*map(json.loads, words), strict=True)
    if any(failed):
        return None
    first, engines = read_version(at[0]), [read_version(e) for each in asked for e in each]
    if first is None or not first[0] or any(read_version(each) != first for each in at):
        return None, begun[0], secrets.token_hex(8)
    chain, number = first
    since = min((engine[1] for engine in engines if engine is not None), default=number)
    why = ""
    if None in engines:
        why = "an engine has none that could be changed: it is new, released them or is not staged"
    elif any(engine is not None and engine[0] != chain for engine in engines):
        why = "an engine has weights that were not sent in this chain of refits"
    elif max(oldest) > number:
        why = f"the last {_MOST_FAILURES} refits of what has changed have failed"
    elif not max(oldest) <= since <= number:
        why = (
            f"what has changed since version {since}, which an engine has, is half as much as the "
            f"weights or of more than {_MOST_VERSIONS} refits"
        )
    return (None, why, "") if why else (since, "", "")


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
