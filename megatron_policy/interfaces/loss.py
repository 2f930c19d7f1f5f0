"""The contract of a loss."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor


class LossType(enum.Enum):
    """What a loss is divided by: all valid tokens of a global batch, or all its valid sequences."""

    TOKEN_LEVEL = "token_level"
    SEQUENCE_LEVEL = "sequence_level"


class LossInputType(enum.Enum):
    """What a loss with an `input_type` takes: logits, or next-token log-probabilities; of a policy
    with a scalar head the values of all tokens, or one score for each row.
    """

    LOGIT = "logit"
    LOGPROB = "logprob"
    VALUE = "value"
    SCORE = "score"


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
    batch: nothing is averaged afterwards. Hosts bring their own enumerations: compare `.value`.

    There are two forms, distinguished by the attribute `input_type`:

    without it (NeMo RL up to 0.5), with this rank's slice of the vocabulary V,
        `loss(logits [B, S, V / tp], data, global_valid_seqs, global_valid_toks,
        vocab_parallel_rank=, vocab_parallel_group=, context_parallel_group=)`;
    with it (NeMo RL from 0.6), by the input it names,
        `loss(data=, global_valid_seqs=, global_valid_toks=, next_token_logprobs=[B, S - 1])` or
        `loss(data=, global_valid_seqs=, global_valid_toks=, logits=[B, S, V])`.

    Of a policy with a scalar head, `VALUE` and `SCORE` are called like these with
        `values=[B, S]`, at position t of the tokens up to t, 0 beyond `input_lengths`, or
        `scores=[B]`, the value at the last token of each row;
    and `LOGIT`, as the host's losses of values and rewards expect, with `logits=[B, S, 1]` of a
    head for each token and `logits=[B, 1]` of one for each sequence.

    Both return (scalar tensor to differentiate, metrics). B and S are those of a microbatch, and
    losses must not rely on them: rows and padding are cut as the configuration says. A loss that
    takes logits is called for each sequence of a packed microbatch, one that takes
    log-probabilities once for all of them.

    A loss that reads rows together says how many in an attribute `rows_per_group`: 2 for pairs, of
    which rows 0 and 1 of the caller's batch are the first. The rows of a group are given to it in
    one call, in their order, under every layout and batching; each call has whole groups, so that
    row 0 of `data` is the first of a group.

    `next_token_logprobs` are computed only for tokens that `token_mask` and `sample_mask` count,
    and are 0 elsewhere; an attribute `reads_masked_positions = True` asks for all. With filters of
    sampling they are 0, without a gradient, for tokens that these drop; with
    `needs_unfiltered_logprobs = True` such a loss also gets
    `next_token_logprobs_unfiltered=[B, S - 1]`, those of the whole distributions. With
    `needs_entropy = True` such a loss also gets `next_token_entropy=[B, S - 1]`, in nats. With
    `candidates`, the name of a key of its data, int64 `[B, S, K]` as `get_topk_logits` returns
    `topk_indices`, it also gets `candidate_logprobs=[B, S - 1, K]`: those of these vocabulary
    entries after the tokens up to each position.

    A step that is trained in parts (`begin_train_step`) calls the loss with global counts of 1 and
    divides afterwards: loss and gradient by what `loss_type` says, and each metric likewise, unless
    an attribute `metric_normalizations`, names to `MetricNormalizer`, says otherwise for it.
    """

    if TYPE_CHECKING:
        # Read-only: a class variable serves as well as an instance's.
        @property
        def loss_type(self) -> Any: ...
    else:  # no property, so that a loss that derives from this class can set its own
        loss_type: Any

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Tensor, dict[str, Any]]: ...
