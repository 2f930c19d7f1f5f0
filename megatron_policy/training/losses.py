"""Calls a loss in the form it was written for, by either generation of the host's contract, and
says what a step in parts is divided by at its end.

Shapes: B rows, S positions, V this rank's slice of the vocabulary.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megatron_policy.batch import BatchedDataDict
from megatron_policy.device import to_device
from megatron_policy.errors import ConfigError
from megatron_policy.interfaces import LossFunction, LossInputType, LossType, MetricNormalizer
from megatron_policy.lm_head.logprobs import gather_vocab
from megatron_policy.lm_head.output import Output, Watch, shifted
from megatron_policy.packing.microbatch import counted, inside
from megatron_policy.parallel.groups import Groups
from megatron_policy.training.checks import candidates_key, loss_kind, rows_per_group
from megatron_policy.training.loss_calls import SCALAR_ARGUMENTS, keep_graph, try_loss
from megatron_policy.training.loss_faults import LossFault

Metrics = dict[str, Any]

_OF_LOSS = {
    LossType.TOKEN_LEVEL.value: MetricNormalizer.TOKENS.value,
    LossType.SEQUENCE_LEVEL.value: MetricNormalizer.SEQUENCES.value,
}
_KINDS = tuple(kind.value for kind in MetricNormalizer)


@dataclass(frozen=True)
class ValidCounts:
    """What a global batch is normalized by: valid sequences and valid next-token positions, 0-d
    fp32 tensors.
    """

    sequences: torch.Tensor
    tokens: torch.Tensor


def count_valid(batch: BatchedDataDict, group: dist.ProcessGroup) -> ValidCounts:
    """Valid sequences and tokens of the whole global batch, summed over the data-parallel `group`,
    on the device; see `count_own`.
    """
    counts = to_device(count_own(batch))
    dist.all_reduce(counts, group=group)
    return ValidCounts(sequences=counts[0], tokens=counts[1])


def count_own(batch: BatchedDataDict) -> torch.Tensor:
    """Valid sequences and tokens of this rank's rows, fp32 `[2]`.

    A token counts where `token_mask[:, 1:]` and its row's `sample_mask` are set: position 0
    predicts nothing. Without a `token_mask` every position within `input_lengths` counts.
    """
    return count_rows(batch).sum(0)


def count_rows(batch: BatchedDataDict) -> torch.Tensor:
    """For each row, what it adds to valid sequences and tokens, fp32 `[B, 2]`; see `count_own`."""
    sample_mask_B = batch["sample_mask"].float()
    masked = "token_mask" in batch
    tokens_BS = batch["token_mask"][:, 1:] if masked else inside(batch)
    tokens_B = tokens_BS.float().sum(-1) * sample_mask_B
    return torch.stack([sample_mask_B, tokens_B], -1)


def evaluate_loss(
    loss_fn: LossFunction,
    output: Output,
    counts: ValidCounts,
    vocab_size: int,
    groups: Groups,
    faults: list[LossFault],
    watch: Watch | None = None,
) -> tuple[torch.Tensor, Metrics]:
    """The loss's scalar and metrics for one microbatch, already divided by the global counts.

    A loss without `input_type` takes this rank's logits and the groups (host up to 0.5). One with
    `input_type` takes what that names (host from 0.6). `logprob`: the fp32 next-token
    log-probabilities `[B, S - 1]` and those of its `candidates`; no logits are held. `logit`: the
    whole vocabulary's fp32 logits `[B, S, vocab_size]`. A loss that takes logits is called once
    per packed sequence, or group of sequences that it reads together. What a loss takes of a scalar
    head it gets for all rows at once; see `LossFunction`.

    Of a loss that fails or breaks the contract the reason is appended to `faults`, and the scalar
    is NaN but has all the gradients it would have had, so that no other rank is left waiting.
    `watch` gets the log-probabilities that the loss is given, if it is given any.
    """
    # A batch without a valid sample is a step of zero gradients, not a division by zero.
    counts = ValidCounts(counts.sequences.clamp(min=1), counts.tokens.clamp(min=1))
    found = []
    for data, arguments in list_loss_inputs(loss_fn, output, vocab_size, groups, watch):
        call = partial(call_loss, loss_fn, data, arguments, counts)
        given = list(select_differentiable(arguments).values())
        found.append(try_loss(loss_fn, call, data, given, faults))
    value, metrics = add_results(found)
    return keep_graph(value, [output.hidden_TRD]), metrics


def mtp_losses(
    output: Output, counts: ValidCounts
) -> tuple[torch.Tensor | float, dict[str, torch.Tensor]]:
    """What layers for multi-token prediction add to the differentiated loss, and the loss of each
    by name, `mtp_1_loss` for the first; 0 and no names without such layers.

    Layer k's loss is the negative log-probability of token t + k + 1, weighted by that token's
    `token_mask` and its row's `sample_mask`, summed and divided by the valid tokens of the whole
    global batch, by which a token-level loss is divided too.
    """
    if output.mtp is None:
        return 0.0, {}
    data = output.microbatch.data
    mask_BS = (data["token_mask"] if "token_mask" in data else inside(data)).float()
    mask_BS = mask_BS * data["sample_mask"].float().unsqueeze(-1)
    wanted_BS = counted(output.microbatch.host.data)
    tokens = counts.tokens.clamp(min=1)
    losses = [
        -(scores_BS * shifted(mask_BS, number)[:, 1:]).sum() / tokens
        for number, scores_BS in enumerate(output.mtp_scores(wanted_BS), start=1)
    ]
    names = {f"mtp_{k}_loss": loss.detach() for k, loss in enumerate(losses, start=1)}
    return output.mtp.loss_factor * torch.stack(losses).mean(), names


def list_loss_inputs(
    loss_fn: LossFunction,
    output: Output,
    vocab_size: int,
    groups: Groups,
    watch: Watch | None = None,
) -> Iterator[tuple[BatchedDataDict, dict[str, Any]]]:
    """For each call of a loss: the rows, and its other arguments but the counts. `watch` as in
    `evaluate_loss`.
    """
    kind, head, data = loss_kind(loss_fn), output.head.scalar, output.microbatch.data
    of_logits = kind == LossInputType.LOGIT.value
    if kind == LossInputType.LOGPROB.value:
        yield data, _score(loss_fn, output, watch)
    elif kind is not None and head is not None:
        if kind == LossInputType.SCORE.value or (of_logits and not head.per_token):
            numbers = output.row_scores()
        else:
            numbers = output.values(inside(output.microbatch.host.data))
        yield data, {SCALAR_ARGUMENTS[kind]: numbers.unsqueeze(-1) if of_logits else numbers}
    else:
        for rows, logits_BSV in output.logits(rows_per_group(loss_fn)):
            if of_logits:
                yield rows, {"logits": gather_vocab(logits_BSV, groups.tp)[..., :vocab_size]}
                continue
            yield (
                rows,
                {
                    "next_token_logits": logits_BSV,
                    "vocab_parallel_rank": groups.tp.rank(),
                    "vocab_parallel_group": groups.tp,
                    # These logits already cover all context-parallel ranks.
                    "context_parallel_group": groups.cp if groups.cp.size() == 1 else None,
                },
            )


def select_differentiable(arguments: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Those of a loss's arguments that it can differentiate."""
    return {
        name: each
        for name, each in arguments.items()
        if isinstance(each, torch.Tensor) and each.is_floating_point()
    }


def call_loss(
    loss_fn: LossFunction, data: BatchedDataDict, arguments: Mapping[str, Any], counts: ValidCounts
) -> Any:
    """Call a loss in the form of its kind with one of its `list_loss_inputs`."""
    named = dict(arguments)
    if loss_kind(loss_fn) is None:
        logits = named.pop("next_token_logits")
        return loss_fn(logits, data, counts.sequences, counts.tokens, **named)
    return loss_fn(
        data=data, global_valid_seqs=counts.sequences, global_valid_toks=counts.tokens, **named
    )


def _score(loss_fn: LossFunction, output: Output, watch: Watch | None) -> dict[str, Any]:
    """What a loss that takes log-probabilities asks for."""
    host, found = output.microbatch.host.data, dict[str, Any]()
    everywhere = getattr(loss_fn, "reads_masked_positions", False)
    wanted_BS = inside(host) if everywhere else counted(host)
    with_entropy = getattr(loss_fn, "needs_entropy", False)
    key = candidates_key(loss_fn)
    if key is None:
        logprobs, entropy = output.next_token_scores(wanted_BS, with_entropy, watch)
    else:
        found["candidate_logprobs"], logprobs, entropy = output.candidate_scores(
            output.microbatch.data[key], wanted_BS, with_entropy, watch
        )
    found["next_token_logprobs"] = logprobs
    if getattr(loss_fn, "needs_unfiltered_logprobs", False):
        whole = output.unfiltered
        plain = logprobs if whole is output else whole.next_token_scores(wanted_BS)[0]
        found["next_token_logprobs_unfiltered"] = plain
    if with_entropy:
        found["next_token_entropy"] = entropy
    return found


def add_results(calls: Sequence[tuple[torch.Tensor, Metrics]]) -> tuple[torch.Tensor, Metrics]:
    """Combine the results for a microbatch's sequences into one."""
    if len(calls) == 1:
        return calls[0]
    metrics: Metrics = {}
    for _, found in calls:
        for name, value in found.items():
            join = min if "_min" in name else max if "_max" in name else operator.add
            metrics[name] = join(metrics[name], value) if name in metrics else value
    return torch.stack([value for value, _ in calls]).sum(), metrics


def to_plain_metrics(metrics: Metrics) -> Metrics:
    """Metrics as Python numbers, so that they can be sent between processes and pickle small."""
    return {
        key: value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
        for key, value in metrics.items()
    }


@dataclass(frozen=True)
class LossNormalization:
    """What a loss is divided by, and which of its metrics are divided by something else; each is a
    value of `MetricNormalizer`.
    """

    loss: str
    metrics: Mapping[str, str]

    @classmethod
    def of(cls, loss_fn: LossFunction) -> LossNormalization:
        """Read `loss_type` and `metric_normalizations` of a loss; ConfigError if one is unknown."""
        loss_kind(loss_fn)  # refuse an unsupported input_type this early
        name = type(loss_fn).__name__
        level = _value(getattr(loss_fn, "loss_type", None))
        if level not in _OF_LOSS:
            raise ConfigError(
                f"{name}.loss_type is {level!r}: a step in parts is divided by it in the end, so "
                f"it must be one of {', '.join(_OF_LOSS)}"
            )
        given = getattr(loss_fn, "metric_normalizations", None)
        metrics = {key: _value(value) for key, value in dict(given or {}).items()}
        for key, value in metrics.items():
            if value not in _KINDS:
                raise ConfigError(
                    f"{name}.metric_normalizations has {value!r} for {key!r}; legal: "
                    f"{', '.join(_KINDS)}"
                )
        return cls(_OF_LOSS[level], metrics)

    def check_mtp(self) -> None:
        """ConfigError unless layers for multi-token prediction can be trained along: their losses
        are divided by tokens, and a step in parts has one divisor for all gradients.
        """
        if self.loss != MetricNormalizer.TOKENS.value:
            raise ConfigError(
                "the loss of a step in parts is divided by valid sequences, but those of layers "
                "for multi-token prediction are divided by valid tokens: train() takes both, or "
                "set policy.megatron_cfg.mtp_num_layers to 0"
            )

    def gradient(self, counts: ValidCounts) -> float:
        """The divisor of gradient and loss; at least 1, as for a loss that divides itself."""
        return _divisors_of(counts)[self.loss]

    def divisors(self, counts: ValidCounts) -> Callable[[str], float]:
        """The divisor of a metric, by its name."""
        numbers = _divisors_of(counts)
        return lambda name: numbers[self.metrics.get(name, self.loss)]


def is_by_sequence(loss_fn: Callable[..., object]) -> bool:
    """Whether a loss says that it is divided by valid sequences; others count by tokens."""
    return bool(_value(getattr(loss_fn, "loss_type", None)) == LossType.SEQUENCE_LEVEL.value)


def weigh_rows(
    loss_fn: Callable[..., object], batch: BatchedDataDict, counts: ValidCounts
) -> torch.Tensor:
    """What each row of `batch` weighs in a mean over the global batch, fp32 `[B]`: as much as in
    the loss. That is a sequence in a loss that says it is at sequence level, otherwise its tokens.
    """
    number_B2 = count_rows(batch)
    if is_by_sequence(loss_fn):
        return number_B2[:, 0] / counts.sequences.clamp(min=1)
    return number_B2[:, 1] / counts.tokens.clamp(min=1)


def _divisors_of(counts: ValidCounts) -> dict[str, float]:
    return {
        MetricNormalizer.TOKENS.value: float(counts.tokens.clamp(min=1)),
        MetricNormalizer.SEQUENCES.value: float(counts.sequences.clamp(min=1)),
        MetricNormalizer.NONE.value: 1.0,
    }


def _value(member: Any) -> Any:
    """A host brings its own enumerations: compare values, not members."""
    return getattr(member, "value", member)
