"""The policy interface that algorithms use, and the form of the results."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, TypedDict

from torch import Tensor

from megatron_policy.batch import BatchedDataDict
from megatron_policy.interfaces.loss import LossFunction


class LogprobOutputSpec(TypedDict):
    """`logprobs`: fp32 `[batch, seq]`, position t of token t given those before it, 0 at t = 0 and
    for tokens that the filters of `policy.generation` drop.
    """

    logprobs: Tensor


class ReferenceLogprobOutputSpec(TypedDict):
    """`reference_logprobs`: as `logprobs`, under the weights the policy started from and without
    filters.
    """

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


class PolicyInterface(ABC):
    """A policy as algorithms use it. Batches hold `input_ids` and `input_lengths`."""

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
        """Take one optimizer step per `gbs` samples of `data`; with `eval_mode` only get losses."""

    @abstractmethod
    def prepare_for_training(self, *args: Any, **kwargs: Any) -> None:
        """Bring what training needs onto the device."""

    @abstractmethod
    def finish_training(self, *args: Any, **kwargs: Any) -> None:
        """Release what only training needs."""

    @abstractmethod
    def save_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """Write what is needed to resume training later."""

    @abstractmethod
    def shutdown(self) -> bool:
        """Stop all workers; True when none is left."""


class ColocatablePolicyInterface(PolicyInterface):
    """A policy that can send its weights to an inference engine, on the same or other devices."""

    @abstractmethod
    def init_collective(self, ip: str, port: int, world_size: int) -> list[Any]:
        """Join the group over which weights are broadcast; returns Ray object references."""

    @abstractmethod
    def offload_before_refit(self) -> None:
        """Free the device memory that sending weights does not need."""

    @abstractmethod
    def offload_after_refit(self) -> None:
        """Free the rest, so that the inference engine has the device to itself."""

    @abstractmethod
    def prepare_refit_info(self) -> dict[str, Any] | None:
        """Name, shape and dtype of every tensor that will be sent."""

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
    """Text generation as algorithms use it."""

    @abstractmethod
    def generate(self, data: BatchedDataDict, greedy: bool = False) -> BatchedDataDict:
        """Continue right-padded prompts (`input_ids`, `input_lengths`): a GenerationOutputSpec."""

    @abstractmethod
    def prepare_for_generation(self, *args: Any, **kwargs: Any) -> bool:
        """Get ready to generate; calling it twice is harmless."""

    @abstractmethod
    def finish_generation(self, *args: Any, **kwargs: Any) -> bool:
        """Release what only generation needs."""
