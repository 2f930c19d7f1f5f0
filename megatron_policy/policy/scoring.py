"""What a policy reads of given sequences without training.

Shapes: B rows of this data-parallel rank, S positions, K candidates, or experts that a token takes
in each of L layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, overload

import torch

from megatron_policy.batch import BatchedDataDict
from megatron_policy.config import PolicyConfig
from megatron_policy.memory.states import EXCHANGE_WEIGHTS
from megatron_policy.packing.microbatch import ROUTED_EXPERTS
from megatron_policy.policy.session import Session
from megatron_policy.training.batching import Batcher
from megatron_policy.training.scoring import Scorer
from megatron_policy.training.value_checks import with_temperature


class PolicyScoring:
    """Reads what the policy, or its reference, makes of sequences; all methods are collective."""

    def __init__(self, config: PolicyConfig, session: Session, batcher: Batcher) -> None:
        self._session = session
        rows, of_reference = config.logprob_batch_size, lambda: session.uses_reference
        self._scorer = Scorer(session.engine, batcher, rows, of_reference)

    @overload
    def logprobs(
        self,
        data: BatchedDataDict,
        *,
        micro_batch_size: int | None = None,
        temperature: float | torch.Tensor | None = None,
        return_routed_experts: Literal[False] = False,
    ) -> torch.Tensor: ...

    @overload
    def logprobs(
        self,
        data: BatchedDataDict,
        *,
        micro_batch_size: int | None = None,
        temperature: float | torch.Tensor | None = None,
        return_routed_experts: Literal[True],
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def logprobs(
        self,
        data: BatchedDataDict,
        *,
        micro_batch_size: int | None = None,
        temperature: float | torch.Tensor | None = None,
        return_routed_experts: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """fp32 `[B, S]`: `log p(token t | tokens before t)`; 0 at t = 0, of padding, if filtered.

        With `return_routed_experts` also the experts `[B, S, L, K]` that each token took in each
        of the L layers with experts, as `train` replays them; -1 beyond `input_lengths`.
        `temperature` is a number or one for each row `[B]`, by default that of `generation`.
        """
        self._session.memory.ready("logprobs()")
        data = with_temperature(data, temperature)
        if return_routed_experts:
            return self._scorer.logprobs_and_experts(data, micro_batch_size)
        return self._scorer.logprobs(data, micro_batch_size)

    def get_logprobs(
        self,
        data: BatchedDataDict,
        micro_batch_size: int | None = None,
        return_routed_experts: bool = False,
    ) -> BatchedDataDict:
        """`logprobs` as the driver returns it: a batch, on request also with `routed_experts`."""
        if not return_routed_experts:
            scores = self.logprobs(data, micro_batch_size=micro_batch_size)
            return BatchedDataDict({"logprobs": scores})
        scores, taken = self.logprobs(
            data, micro_batch_size=micro_batch_size, return_routed_experts=True
        )
        return BatchedDataDict({"logprobs": scores, ROUTED_EXPERTS: taken})

    def entropy(
        self,
        data: BatchedDataDict,
        *,
        micro_batch_size: int | None = None,
        temperature: float | torch.Tensor | None = None,
    ) -> torch.Tensor:
        """fp32 `[B, S]`, in nats: of the distribution token t is drawn from, at the `temperature`
        of `logprobs`; 0 at t = 0.
        """
        self._session.memory.ready("entropy()")
        data = with_temperature(data, temperature)
        return self._scorer.entropy(data, micro_batch_size)

    def get_entropy(
        self, data: BatchedDataDict, micro_batch_size: int | None = None
    ) -> BatchedDataDict:
        """`entropy` as the driver returns it."""
        return BatchedDataDict({"entropy": self.entropy(data, micro_batch_size=micro_batch_size)})

    def topk_logits(
        self, data: BatchedDataDict, k: int, *, micro_batch_size: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The `k` largest logits at each position, fp32, and their tokens, int64: `[B, S, K]`."""
        self._session.memory.ready("topk_logits()")
        return self._scorer.topk_logits(data, k, micro_batch_size)

    def get_topk_logits(
        self, data: BatchedDataDict, k: int, micro_batch_size: int | None = None
    ) -> BatchedDataDict:
        """`topk_logits` as the driver returns them: with their tokens, `topk_indices`."""
        values, indices = self.topk_logits(data, k, micro_batch_size=micro_batch_size)
        return BatchedDataDict({"topk_logits": values, "topk_indices": indices})

    def values(self, data: BatchedDataDict, *, micro_batch_size: int | None = None) -> torch.Tensor:
        """fp32 `[B, S]`: what the scalar head of `reward_model_cfg` makes of the tokens up to each
        position; 0 beyond `input_lengths`.
        """
        self._session.memory.ready("values()")
        return self._scorer.values(data, micro_batch_size)

    def get_values(
        self, data: BatchedDataDict, micro_batch_size: int | None = None
    ) -> BatchedDataDict:
        """`values` as the driver returns them."""
        return BatchedDataDict({"values": self.values(data, micro_batch_size=micro_batch_size)})

    def score(self, data: BatchedDataDict, *, micro_batch_size: int | None = None) -> torch.Tensor:
        """fp32 `[B]`: `values` at the last token of each row."""
        self._session.memory.ready("score()")
        return self._scorer.scores(data, micro_batch_size)

    def reference_logprobs(
        self,
        data: BatchedDataDict,
        *,
        micro_batch_size: int | None = None,
        temperature: float | torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`logprobs` under the reference's weights, of whole distributions."""
        with self.reference():
            return self.logprobs(data, micro_batch_size=micro_batch_size, temperature=temperature)

    @contextmanager
    def reference(self) -> Iterator[None]:
        """In this context the policy has the weights of its reference, those that it started from
        unless `reference_model_name` says otherwise; afterwards its own, bit for bit.
        """
        reference = self._session.reference
        self._session.memory.ready("reference_logprobs()", EXCHANGE_WEIGHTS)
        with reference.active(), self._session.memory.in_use("the reference policy"):
            yield

    def get_reference_policy_logprobs(
        self, data: BatchedDataDict, micro_batch_size: int | None = None
    ) -> BatchedDataDict:
        """`reference_logprobs` as the driver returns them."""
        scores = self.reference_logprobs(data, micro_batch_size=micro_batch_size)
        return BatchedDataDict({"reference_logprobs": scores})
