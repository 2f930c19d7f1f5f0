"""The interfaces of a language-model head and of what predicts further tokens, for any training
engine; and what heads have in common whose logits are products with one matrix.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol, Self

from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_policy.converters.architecture import ScalarHead
from megatron_policy.lm_head.fused import HeadShape, fused_scores, fused_topk
from megatron_policy.packing.microbatch import Microbatch


class LanguageModelHead(Protocol):
    """The head of a rank on the last pipeline stage.

    Shapes: S positions that this rank holds after the last layer (a share of them under sequence
    parallelism), R parallel rows, N chosen positions, D model, V this rank's slice of the
    vocabulary, K candidates. Logits are divided by a temperature, at first the policy's. Scores are
    of the entries that the policy's filters keep (top-k, top-p, min-p), or of all if it has none.
    """

    @property
    def scalar(self) -> ScalarHead | None:
        """What the head is if it gives one number for each token: then it only has `values`, which
        no other head has.
        """

    def values(self, hidden_SRD: Tensor) -> Tensor:
        """fp32 `[S, R]`: the numbers of all positions of this context-parallel rank,
        differentiable, the same on every tensor-parallel rank.
        """

    def at(self, temperature: float) -> LanguageModelHead:
        """The same head at another temperature."""

    @property
    def plain(self) -> LanguageModelHead:
        """The same head at temperature 1, without filters."""

    @property
    def unfiltered(self) -> LanguageModelHead:
        """The same head without filters; itself if it has none."""

    def whole(self, hidden_SRD: Tensor) -> Tensor:
        """Hidden states of all positions of this context-parallel rank, ready for `scores`."""

    def scores(
        self, hidden_ND: Tensor, targets: Tensor, entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """fp32: the log-probability of each of `targets`, int64 `[N]` or `[N, K]`, and the entropy
        `[N]` in nats if asked for; differentiable, the same on every tensor-parallel rank. A target
        that the filters drop has minus infinity.
        """

    def topk(self, hidden_ND: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The `k` largest logits, fp32, and their vocabulary entries, int64: `[N, K]`."""

    def logits(self, hidden_SRD: Tensor) -> Tensor:
        """fp32 `[S, R, V]` of all positions of this context-parallel rank; padding entries of the
        vocabulary have probability 0.
        """


@dataclass(frozen=True)
class MatrixHead:
    """A `LanguageModelHead` whose logits are products with one matrix. At most `chunk` times V
    logits are held at a time unless logits themselves are asked for.
    """

    shape: HeadShape
    group: ProcessGroup
    """The ranks that share the vocabulary."""
    chunk: int

    @property
    def weight(self) -> Tensor:
        """`[V, D]`."""
        raise NotImplementedError

    def at(self, temperature: float) -> Self:
        return replace(self, shape=replace(self.shape, temperature=temperature))

    @property
    def plain(self) -> Self:
        return replace(self, shape=replace(self.shape, temperature=1.0, filters=None))

    @property
    def unfiltered(self) -> Self:
        if self.shape.filters is None:
            return self
        return replace(self, shape=replace(self.shape, filters=None))

    def scores(
        self, hidden_ND: Tensor, targets: Tensor, entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        return fused_scores(
            hidden_ND, self.weight, targets, self.shape, self.group, self.chunk, entropy
        )

    def topk(self, hidden_ND: Tensor, k: int) -> tuple[Tensor, Tensor]:
        return fused_topk(hidden_ND, self.weight, k, self.shape, self.group, self.chunk)


class MtpLayers(Protocol):
    """The layers for multi-token prediction of a rank on the last pipeline stage."""

    @property
    def head(self) -> LanguageModelHead:
        """The model's head at temperature 1 without filters, as these layers use it."""

    @property
    def loss_factor(self) -> float:
        """The factor on the mean of their losses in what is differentiated."""

    def hidden_states(self, hidden_SRD: Tensor, microbatch: Microbatch) -> list[Tensor]:
        """From the model's hidden states, for k = 1, 2, ...: `[S, R, D]`, from which `head`
        predicts token t + k + 1 at the position of token t. Collective over the ranks that share
        the microbatch, and over those that share its experts.
        """
