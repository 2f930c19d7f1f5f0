"""What every cell must reproduce: Hugging Face's model in one process and in fp64, which computes
each sequence alone, without padding, and is trained by torch's AdamW.

Shapes: B rows, S positions, L tokens of one row, V vocabulary.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from megatron_policy.batch import BatchedDataDict
from tests import oracle
from tests.checkpoints import saved_tensors
from tests.dist.layouts import LENGTH
from tests.exact import InDouble, furthest, load_hf
from tests.invariance import cases, losses
from tests.losses import Result


@dataclass(frozen=True)
class Reading:
    """What a model makes of the rows: values of token t given those before it at t, logits after it
    at t; 0 where there is no such token.
    """

    logprobs_BS: torch.Tensor
    entropy_BS: torch.Tensor
    logits_BSV: torch.Tensor


@dataclass(frozen=True)
class Truth:
    """A model before, in and after its training; `evaluated` are the losses of all global batches
    under the starting weights, `metrics` a dict for each step. Weights are those of a checkpoint,
    under the names they have there. `closest` is the least difference between the score of the
    last expert or group of experts that was chosen and that of the first that was not; it is
    infinite without experts.
    """

    before: Reading
    after: Reading
    evaluated: list[float]
    losses: list[float]
    grad_norms: list[float]
    metrics: list[dict[str, Any]]
    gradients: list[oracle.Gradients]
    start: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]
    closest: float


class Choices(TorchFunctionMode):
    """Watches every choice of the largest scores, which only routers make: `closest` is how much
    the last that was chosen and the first that was not differ, at least.
    """

    closest = math.inf

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in (torch.topk, torch.Tensor.topk):
            scores, k = args[0].detach(), (*args, *(kwargs or {}).values())[1]
            if k < scores.size(-1):
                largest = scores.sort(-1, descending=True).values
                gaps = largest[..., k - 1] - largest[..., k]
                self.closest = min(self.closest, float(gaps.min()))
        return func(*args, **(kwargs or {}))


RESULTS = {
    "token": losses.token_result,
    "sequence": losses.sequence_result,
    "policy gradient": losses.policy_gradient_result,
    "entropy of logits": losses.entropy_result,
}
READING_MASKED = ("token",)
"""Losses that are given the scores of all tokens, the others only of those that count."""


@cache
def data_of(path: Path, temperature: float = 1.0) -> BatchedDataDict:
    """The rows for the checkpoint `path`, with earlier log-probabilities at a temperature."""
    plain = cases.rows(torch.zeros(len(cases.LENGTHS), LENGTH))
    return cases.rows(read(load_hf(path), plain, temperature).logprobs_BS)


def few(data: BatchedDataDict, count: int) -> BatchedDataDict:
    """The first `count` rows of both global batches, numbered anew."""
    chosen = data.select_indices([*range(count), *range(cases.ROWS, cases.ROWS + count)])
    chosen["row"] = torch.arange(chosen.size)
    return chosen


def _alone(model: PreTrainedModel, tokens_S: torch.Tensor, length: int) -> torch.Tensor:
    """Logits `[L, V]` of one sequence."""
    logits: torch.Tensor = model(tokens_S[None, :length]).logits[0]
    return logits


def _next_tokens(
    logits_LV: torch.Tensor, tokens_L: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, ...]:
    """Log-probabilities and entropies of the tokens from the second on, `[L - 1]`."""
    scores_LV = (logits_LV[:-1] / temperature).log_softmax(-1)
    logprobs_L = scores_LV.gather(-1, tokens_L[1:, None]).squeeze(-1)
    return logprobs_L, -(scores_LV.exp() * scores_LV).sum(-1)


def scores(
    model: PreTrainedModel, data: BatchedDataDict, temperature: float = 1.0
) -> losses.Scores:
    """Next-token log-probabilities and entropies, differentiable; 0 beyond the end of a row."""
    found = []
    for tokens_S, length in zip(data["input_ids"], data["input_lengths"].tolist(), strict=True):
        own = _next_tokens(_alone(model, tokens_S, length), tokens_S[:length], temperature)
        missing = len(tokens_S) - length
        found.append([torch.nn.functional.pad(part_L, (0, missing)) for part_L in own])
    logprobs, entropies = zip(*found, strict=True)
    return losses.Scores(torch.stack(logprobs), torch.stack(entropies))


@torch.no_grad()
def read(model: PreTrainedModel, data: BatchedDataDict, temperature: float = 1.0) -> Reading:
    """All there is to read of the rows; logits always at temperature 1."""
    rows, width = data["input_ids"].shape
    vocab = model.config.get_text_config().vocab_size
    logits_BSV = torch.zeros(rows, width, vocab, dtype=model.dtype)
    logprobs_BS, entropy_BS = torch.zeros(2, rows, width, dtype=model.dtype)
    for row, length in enumerate(data["input_lengths"].tolist()):
        tokens_S = data["input_ids"][row]
        logits_LV = logits_BSV[row, :length] = _alone(model, tokens_S, length)
        logprobs_L, entropy_L = _next_tokens(logits_LV, tokens_S[:length], temperature)
        logprobs_BS[row, 1:length], entropy_BS[row, 1:length] = logprobs_L, entropy_L
    return Reading(logprobs_BS, entropy_BS, logits_BSV)


def _evaluate(loss: str, scores: losses.Scores, batch: BatchedDataDict) -> Result:
    """Of a whole global batch, whose scores are cut to what such a loss is given."""
    seen = scores if loss in READING_MASKED else losses.only_counted(scores, batch)
    return RESULTS[loss](seen, batch, *losses.counts(batch))


def truth(cell: cases.Cell, path: Path, dtype: torch.dtype = torch.float64) -> Truth:
    """What a cell must reproduce; computed once for all cells of which it is the same."""
    return _truth(path, cell.loss, cell.rows, cell.temperature, cell.clip, dtype)


@cache
def _truth(
    path: Path, loss: str, rows: int, temperature: float, clip: float, dtype: torch.dtype
) -> Truth:
    """Two steps of training over global batches of the first `rows` rows of each."""
    with Choices() as choices:
        found = _trained_and_read(path, loss, rows, temperature, clip, dtype)
    return replace(found, closest=min(found.closest, choices.closest))


@cache
def _before(path: Path, rows: int, temperature: float, dtype: torch.dtype) -> tuple[Reading, float]:
    """What the untrained model makes of the rows, and its least `closest`."""
    with Choices() as choices:
        reading = _reading(load_hf(path, dtype), few(data_of(path, temperature), rows), temperature)
    return reading, choices.closest


def _reading(model: PreTrainedModel, data: BatchedDataDict, temperature: float) -> Reading:
    """As `read`, in fp64 throughout if the model is in fp64."""
    with InDouble() if model.dtype is torch.float64 else nullcontext():
        return read(model, data, temperature)


def _trained_and_read(
    path: Path, loss: str, rows: int, temperature: float, clip: float, dtype: torch.dtype
) -> Truth:
    data = few(data_of(path, temperature), rows)
    metrics = []

    def step(model: PreTrainedModel, batch: BatchedDataDict) -> torch.Tensor:
        value, found = _evaluate(loss, scores(model, batch, temperature), batch)
        metrics.append(found)
        return value

    trained = oracle.train(path, data, rows, step, dtype, clip=clip)
    model = load_hf(path, dtype)
    start = saved_tensors(model)
    before, closest = _before(path, rows, temperature, dtype)
    evaluated = []
    for index in range(cases.STEPS):
        own = slice(index * rows, (index + 1) * rows)
        known = losses.Scores(before.logprobs_BS[own, 1:], before.entropy_BS[own, 1:])
        evaluated.append(_evaluate(loss, known, data.get_batch(index, rows))[0].item())
    with torch.no_grad():
        for name, parameter in oracle.list_parameters(model).items():
            parameter.copy_(trained.weights[name])
    return Truth(
        before=before,
        after=_reading(model, data, temperature),
        evaluated=evaluated,
        losses=trained.losses,
        grad_norms=trained.grad_norms,
        metrics=metrics,
        gradients=trained.gradients,
        start=start,
        weights=saved_tensors(model),
        closest=closest,
    )


@cache
def rounding(cell: cases.Cell, path: Path) -> dict[str, float]:
    """How far Hugging Face in fp32 is from its truth in fp64, by quantity of the table."""
    exact, rounded = truth(cell, path), truth(cell, path, torch.float32)
    trained = oracle.Rounding.of(rounded, exact)
    logprobs = [
        furthest(one.logprobs_BS, other.logprobs_BS)
        for one, other in ((rounded.before, exact.before), (rounded.after, exact.after))
    ]
    return {
        "loss": trained.loss,
        # Sums and extrema of what the loss is given: they cannot be further off than that is.
        "metrics": max(logprobs),
        "grad norm": trained.grad_norm,
        "weights": trained.weights,
        "logprobs before": logprobs[0],
        "logprobs after": logprobs[1],
        "reference": logprobs[0],
        "top-k": furthest(rounded.before.logits_BSV, exact.before.logits_BSV),
        "entropy": furthest(rounded.before.entropy_BS, exact.before.entropy_BS),
    }
