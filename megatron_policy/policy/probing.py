"""A policy's side of probes of engines."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TypeVar

import torch

from megatron_policy.batch import BatchedDataDict
from megatron_policy.config import PolicyConfig
from megatron_policy.errors import RefitError
from megatron_policy.memory.states import CHANGE_WEIGHTS
from megatron_policy.policy.session import Session
from megatron_policy.policy.weight_exports import WeightExports
from megatron_policy.refit.comparison import EngineComparison, Logprobs, Rows
from megatron_policy.refit.probe import (
    Disturbance,
    EngineProbe,
    ProbeFacts,
    list_kinds,
    run_probe,
)
from megatron_policy.training.batching import Batcher
from megatron_policy.training.scoring import Scorer
from megatron_policy.training.value_checks import with_temperature

T = TypeVar("T")


class EngineProbing:
    """Probes engines on a rank, and does what a driver's probe asks of one; see `ProbedPolicy`. All
    methods are collective.
    """

    def __init__(
        self, config: PolicyConfig, session: Session, batcher: Batcher, exports: WeightExports
    ) -> None:
        self._session, self._longest, self._exports = session, batcher.longest.tokens, exports
        # As a reference scores: engines say log-probabilities of whole distributions.
        self._scorer = Scorer(session.engine, batcher, config.logprob_batch_size, lambda: True)
        self._disturbance: Disturbance | None = None

    def probe(self, probe: EngineProbe) -> EngineComparison:
        """Compare what an engine computes with what this policy does; see `EngineProbe`.
        RefitError, on every rank, if the engine does not compute with the policy's weights: it
        names the kind that is stale, as far as refits can find out. The policy stays as it is.
        """
        self._session.memory.ready("probe()")
        self._exports.finish_refit()
        return run_probe(probe, self)

    def probe_facts(self, adapters: bool = False) -> ProbeFacts:
        """What a probe has to know of this policy."""
        engine, exporter = self._session.engine, self._session.exporter.select(adapters=adapters)
        sent = {tensor.dtype for tensor in exporter.plan().tensors}
        return ProbeFacts(
            vocabulary=engine.vocab_size,
            longest=self._longest,
            dtypes=tuple({engine.precision, *sent}),
            step=self._session.state.steps,
            kinds=list_kinds(exporter.table.entries),
        )

    def probe_logprobs(self, rows: Rows) -> Logprobs:
        """The policy's log-probabilities of all tokens but the first of each row, at temperature 1
        and without filters.
        """
        self._session.memory.ready("probe()")
        lengths = [len(row) for row in rows]
        tokens_BS = torch.zeros(len(rows), max(lengths), dtype=torch.int64)
        for row, tokens in enumerate(rows):
            tokens_BS[row, : len(tokens)] = torch.tensor(tokens)
        batch = BatchedDataDict(
            {
                "input_ids": tokens_BS,
                "input_lengths": torch.tensor(lengths),
                "mm_token_type_ids": torch.zeros_like(tokens_BS),  # all is text
            }
        )
        found_BS = self._scorer.logprobs(with_temperature(batch, 1.0), None)
        return [found_BS[row, 1:n].tolist() for row, n in enumerate(lengths)]

    def disturb_weights(self, kind: str | None, adapters: bool = False) -> None:
        """Restore weights that were changed, then change all of that kind on this rank, if one is
        given. The optimizer is not informed: restore them before anything else.
        """
        self._session.memory.ready("probe()", CHANGE_WEIGHTS)
        before, self._disturbance = self._disturbance, None
        if before is not None:
            before.undo()
        if kind is not None:
            own = self._session.engine.adapters if adapters else self._session.engine
            assert own is not None, "the exporter has been selected"
            self._disturbance = Disturbance(own.held, kind)

    def once(self, call: Callable[[], T]) -> T:
        """What `call` returns on rank 0, on every rank."""
        ranks, words = self._session.exporter.ranks, None
        ranks.begin()
        if ranks.rank == 0:
            with ranks.alive():
                try:
                    words = json.dumps({"value": call()})
                except Exception as error:
                    failed = f"the engine could not be asked: {type(error).__name__}: {error}"
                    failed = str(error) if isinstance(error, RefitError) else failed
                    words = json.dumps({"failed": failed})
        said = json.loads(ranks.broadcast_text(words))
        ranks.leave_together()
        if "failed" in said:
            raise RefitError(said["failed"])
        value: T = said["value"]
        return value

    def together(self, hand_over: Callable[[], T]) -> T:
        """What it returns here, called on all ranks; all raise if one does."""
        failure: Exception | None = None
        try:
            sent = hand_over()
        except Exception as error:
            failure = error
        self._session.exporter.begin()
        try:
            self._session.exporter.agree(failure)
        except RefitError as error:
            # That of a refit is alike on all ranks already.
            raise failure if isinstance(failure, RefitError) else error from None
        return sent
