"""How policies, losses and results meet their callers; knows no implementation of any of them."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from typing import Any, Protocol, TypedDict

from torch import Tensor

from megatron_policy.batch import BatchedDataDict


class LogprobOutputSpec(TypedDict):
    """`logprobs`: fp32 `[batch, seq]`, position t of token t given those before it, 0 at t = 0."""

    logprobs: Tensor


class ReferenceLogprobOutputSpec(TypedDict):
    """`reference_logprobs`: as `logprobs`, under the weights the policy started from."""

    reference_logprobs: Tensor


class GenerationOutputSpec(TypedDict):
    """Prompts with their continuations, right padded.

    `output_ids` int64 `[batch, seq]`; `generation_lengths` int64 `[batch]`, new tokens only;
    `unpadded_sequence_lengths` int64 `[batch]`, prompt and new tokens; `logprobs` fp32
    `[batch, seq]`, 0 at prompt and padding.
    """

    output_ids: Tensor
    generation_lengths: Tensor
    unpadded_sequence_lengths: Tensor
    logprobs: Tensor


class LossType(enum.Enum):
    """What a loss is divided by: all valid tokens of a global batch, or all its valid sequences."""

    TOKEN_LEVEL = "token_level"
    SEQUENCE_LEVEL = "sequence_level"


class LossInputType(enum.Enum):
    """What a loss of the newer generation takes: logits, or next-token log-probabilities."""

    LOGIT = "logit"
    LOGPROB = "logprob"


class MetricNormalizer(enum.Enum):
    """What a metric of a loss has been divided by: the global count of valid tokens, of valid
    sequences, or nothing.
    """

    TOKENS = "tokens"
    SEQUENCES = "sequences"
    NONE = "none"


class LossFunction(Protocol):
    """A loss, already divided by the global counts it is given, with its metrics.

    Losses and metrics of all microbatches and data-parallel ranks add up to those of the global
    batch: nothing is averaged afterwards. Hosts bring enumerations of their own: compare `.value`.

    Two generations are called, told apart by the attribute `input_type`:

    without it (NeMo RL up to 0.5), with this rank's slice of the vocabulary V,
        `loss(logits [B, S, V / tp], data, global_valid_seqs, global_valid_toks,
        vocab_parallel_rank=, vocab_parallel_group=, context_parallel_group=)`;
    with it (NeMo RL from 0.6), by the input it names,
        `loss(data=, global_valid_seqs=, global_valid_toks=, next_token_logprobs=[B, S - 1])` or
        `loss(data=, global_valid_seqs=, global_valid_toks=, logits=[B, S, V])`.

    Both return (scalar tensor to differentiate, metrics). B and S are those of a microbatch, which
    losses must not rely on: rows and padding are cut as the configuration says. A loss that takes
    logits is called for each sequence of a packed microbatch, one that takes log-probabilities for
    all of them.

    For `next_token_logprobs` only tokens that `token_mask` and `sample_mask` count are computed,
    the others are 0; an attribute `reads_masked_positions = True` asks for all. With
    `needs_entropy = True` such a loss also gets `next_token_entropy=[B, S - 1]`, in nats. With
    `candidates`, the name of a key of its data, int64 `[B, S, K]` as `get_topk_logits` returns
    `topk_indices`, it also gets `candidate_logprobs=[B, S - 1, K]`: of those entries of the
    vocabulary, after the tokens up to each position.

    A step that is trained in parts (`begin_train_step`) calls the loss with global counts of 1 and
    divides afterwards: loss and gradient by what `loss_type` says, and each metric likewise, unless
    an attribute `metric_normalizations`, names to `MetricNormalizer`, says otherwise for it.
    """

    loss_type: Any

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Tensor, dict[str, Any]]: ...


class PolicyInterface(ABC):
    """What an algorithm asks of a policy. Batches hold `input_ids` and `input_lengths`."""

    @abstractmethod
    def get_logprobs(self, data: BatchedDataDict) -> BatchedDataDict:
        """Log-probabilities of the tokens of `data`: a LogprobOutputSpec."""

    @abstractmethod
    def get_reference_policy_logprobs(self, data: BatchedDataDict) -> BatchedDataDict:
        """The same under the weights the policy started from: a ReferenceLogprobOutputSpec."""

    @abstractmethod
    def train(
        self,
        data: BatchedDataDict,
        loss_fn: LossFunction,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
    ) -> dict[str, Any]:
        """One optimizer step for every `gbs` samples of `data`; with `eval_mode` losses only."""

    @abstractmethod
    def prepare_for_training(self, *args: Any, **kwargs: Any) -> None:
        """Bring onto the device what training needs."""

    @abstractmethod
    def finish_training(self, *args: Any, **kwargs: Any) -> None:
        """Give back what only training needed."""

    @abstractmethod
    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Write what is needed to go on training later."""

    @abstractmethod
    def shutdown(self) -> bool:
        """End all workers; True when none is left."""


class ColocatablePolicyInterface(PolicyInterface):
    """A policy that can hand its weights to an inference engine, on the same devices or others."""

    @abstractmethod
    def init_collective(self, ip: str, port: int, world_size: int) -> list[Any]:
        """Join the group over which weights are broadcast; returns Ray object references."""

    @abstractmethod
    def offload_before_refit(self) -> None:
        """Free the device memory that handing weights over does not need."""

    @abstractmethod
    def offload_after_refit(self) -> None:
        """Free the rest, so that the engine has the device to itself."""

    @abstractmethod
    def prepare_refit_info(self) -> dict[str, Any] | None:
        """Name, shape and dtype of every tensor that will be handed over."""

    @abstractmethod
    def prepare_weights_for_ipc(self, *args: Any, **kwargs: Any) -> list[list[str]]:
        """Names of the tensors in groups that fit a transfer buffer."""

    @abstractmethod
    def get_weights_ipc_handles(self, keys: list[str]) -> dict[str, Any]:
        """Handles of one group's tensors by device identifier."""

    @abstractmethod
    def broadcast_weights_for_collective(self) -> list[Any]:
        """Broadcast all weights over the joined group; returns Ray object references."""


class GenerationInterface(ABC):
    """What an algorithm asks of whatever continues prompts."""

    @abstractmethod
    def generate(self, data: BatchedDataDict, greedy: bool = False) -> BatchedDataDict:
        """Continue right-padded prompts (`input_ids`, `input_lengths`): a GenerationOutputSpec."""

    @abstractmethod
    def prepare_for_generation(self, *args: Any, **kwargs: Any) -> bool:
        """Get ready to generate; calling it twice does no harm."""

    @abstractmethod
    def finish_generation(self, *args: Any, **kwargs: Any) -> bool:
        """Give back what only generating needed."""
