"""verl's rows as a policy's batch, and a policy's scores as verl's losses and callers read them.

Shapes: B rows, S positions of the longest; a jagged tensor `[B, j]` has each row's own length.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from tensordict import TensorDict, is_tensor_collection
from verl.utils import tensordict_utils as tu

from megatron_policy.batch import BatchedDataDict
from megatron_policy.device import to_device
from megatron_policy.errors import BatchError
from megatron_policy.training.callbacks import TokenScores

_SQUARES, _MEDIA = "calculate_sum_pi_squared", "multi_modal_inputs"
_LEFT_OUT = {"images_seqlens", "mm_token_type_ids", "token_type_ids"}
"""What verl's rows say of their pictures that follows from the rest."""


def check_supported(data: TensorDict) -> None:
    """BatchError for rows in another form than verl's workers make them, and for what no engine
    here computes, by verl's names.
    """
    if _SQUARES in _keys(data) and tu.get_non_tensor_data(data, _SQUARES, None):
        raise BatchError(
            f"verl's data ask for {_SQUARES}, which is not supported: the sum of squared "
            "probabilities is not computed"
        )
    tokens = data["input_ids"]
    if not tokens.is_nested:
        raise BatchError(
            f"verl's input_ids are a dense tensor {tuple(tokens.shape)}: pass rows without padding "
            "(jagged), as verl's workers make them"
        )
    media, positions = _media_of(data), data.get("position_ids", None)
    if positions is not None and positions.dim() == 3:
        for row, own in enumerate(positions.unbind()):
            if not media[row] and (own != torch.arange(own.size(-1), device=own.device)).any():
                raise BatchError(
                    f"verl's position_ids turn row {row} as pictures do, but its {_MEDIA} have none"
                )


def _keys(data: TensorDict) -> set[str]:
    return set(data.keys())  # `in` asks a TensorDict something else


def _media_of(data: TensorDict) -> list[Mapping[str, torch.Tensor]]:
    """What each row has for the towers of a model, by key; BatchError unless there is one entry for
    each row, or none at all.
    """
    found = data[_MEDIA] if _MEDIA in _keys(data) else {}
    # A stack of rows without pictures is a TensorDict without keys.
    if is_tensor_collection(found) or isinstance(found, Mapping):
        if _keys(found):
            raise BatchError(
                f"verl's {_MEDIA} are one entry with {sorted(_keys(found))}: pass a list with one "
                "for each row"
            )
        found = [None] * len(data)
    return [
        {
            key: value
            for key, value in ({} if row is None else row).items()
            if value is not None and key not in _LEFT_OUT
        }
        for row in found
    ]


def policy_batch(data: TensorDict) -> BatchedDataDict:
    """`input_ids` `[B, S]` right padded with 0, `input_lengths`, `sample_mask`, as `token_mask` the
    tokens that are read: of a response, or those that `loss_mask` counts; and what rows have for
    the towers of a model, a list under each key.
    """
    media = _media_of(data)
    keys = dict.fromkeys(key for row in media for key in row)
    pictures = {key: [row[key].cpu() if key in row else None for row in media] for key in keys}
    tokens = data["input_ids"].cpu()
    lengths_B = tokens.offsets().diff()
    tokens_BS = _pad_rows(tokens)
    return BatchedDataDict(
        {
            "input_ids": tokens_BS.long(),
            "input_lengths": lengths_B,
            "token_mask": _read_tokens(data, lengths_B, tokens_BS.size(1)),
            "sample_mask": torch.ones(len(lengths_B)),
            **pictures,
        }
    )


def _read_tokens(data: TensorDict, lengths_B: torch.Tensor, width: int) -> torch.Tensor:
    """Int64 `[B, S]`: the tokens whose scores losses and callers read. A response is the end of its
    row; rows of supervised training have a mask of their whole length.
    """
    positions_S = torch.arange(width)
    inside_BS = positions_S < lengths_B.unsqueeze(1)
    responses = data.get("responses", None)
    if responses is not None:
        if responses.is_nested:
            read_B = offsets_of(responses).diff()
        else:
            read_B = data["attention_mask"].cpu()[:, -responses.size(1) :].sum(1)
        starts_B = lengths_B - read_B
        read_BS: torch.Tensor = inside_BS & (positions_S >= starts_B.unsqueeze(1))
        return read_BS.long()
    mask: Any = data.get("loss_mask", None)
    if mask is None or not mask.is_nested:
        return inside_BS.long()
    mask = mask.cpu()
    if not torch.equal(offsets_of(mask).diff(), lengths_B):
        return inside_BS.long()
    counted_BS: torch.Tensor = _pad_rows(mask) != 0
    return counted_BS.long()


def _pad_rows(jagged: Any) -> torch.Tensor:
    """The rows of a jagged tensor in host memory, right padded with 0 to the longest. torch's own
    method pads to the sum of all lengths where it does not know the longest.
    """
    lengths_B = offsets_of(jagged).diff()
    inside_BS = torch.arange(int(lengths_B.max())) < lengths_B.unsqueeze(1)
    values: torch.Tensor = jagged.values().cpu()
    return values.new_zeros(inside_BS.shape).masked_scatter(inside_BS, values)


def offsets_of(jagged: Any) -> torch.Tensor:
    """Where the rows of a jagged tensor begin and end, on the host."""
    offsets: torch.Tensor = jagged.offsets()
    return offsets.cpu()


def temperature_of(data: TensorDict) -> float | torch.Tensor | None:
    """The temperature of these rows, a number or one for each; None if verl names none."""
    given = data.get("temperature", None) if "temperature" in _keys(data) else None
    if isinstance(given, torch.Tensor):
        return given.detach().cpu().double().flatten() if given.dim() else float(given)
    value = tu.get_non_tensor_data(data, "temperature", None)
    return None if value is None else float(value)


def has_losses(data: TensorDict) -> bool:
    """Whether the data say which tokens a loss is divided by."""
    return "loss_mask" in _keys(data)


def count_tokens(data: TensorDict) -> torch.Tensor:
    """How many tokens `loss_mask` counts here, a 0-d fp32 tensor."""
    return _total(data["loss_mask"])


def count_valid(data: TensorDict) -> torch.Tensor:
    """How many tokens verl's losses read here, a 0-d fp32 tensor: those of `response_mask` where
    there is one, of which verl can have rejected some that `loss_mask` still counts.
    """
    return _total(data["response_mask" if "response_mask" in _keys(data) else "loss_mask"])


def _total(mask: Any) -> torch.Tensor:
    counted: torch.Tensor = mask.values() if mask.is_nested else mask
    return counted.sum().float()


@dataclass(frozen=True)
class MicroBatches:
    """verl's own microbatches of some rows, each found by the numbers of its rows."""

    parts: Sequence[TensorDict]
    rows: Sequence[Sequence[int]]

    @classmethod
    def of(
        cls, parts: Sequence[TensorDict], indices: Sequence[Sequence[int]] | None
    ) -> MicroBatches:
        """`indices` are the rows of each part; None if they are in order."""
        if indices is not None:
            return cls(parts, [list(map(int, own)) for own in indices])
        rows, first = [], 0
        for part in parts:
            rows.append(list(range(first, first + part.batch_size[0])))
            first += part.batch_size[0]
        return cls(parts, rows)

    def part(self, rows: Sequence[int]) -> TensorDict:
        """The microbatch that has these rows."""
        return self.parts[self._places[tuple(rows)]]

    @cached_property
    def _places(self) -> Mapping[tuple[int, ...], int]:
        return {tuple(own): place for place, own in enumerate(self.rows)}


TEACHER = "teacher_ids"
"""verl's key of the vocabulary entries that a teacher finds likeliest after each token."""


def add_candidates(batch: BatchedDataDict, data: TensorDict) -> None:
    """Add a teacher's entries, `[B, S, K]`, where verl distils with them."""
    if not tu.get_non_tensor_data(data, "distillation_use_topk", False) or TEACHER not in _keys(
        data
    ):
        return
    entries: Any = data[TEACHER]
    width = batch["input_ids"].size(1)
    rows = [row.cpu().long() for row in entries.unbind()]
    batch[TEACHER] = torch.stack([F.pad(row, (0, 0, 0, width - len(row))) for row in rows])


def compare_with_teacher(
    scores: TokenScores, part: TensorDict, loss: Callable[..., Any] | None
) -> dict[str, torch.Tensor]:
    """What verl's forward KL over a teacher's K entries reads, jagged `[B, j]`: the divergence of
    these entries at each position, and their mass in both models. `loss` carries verl's
    `distillation_config`.
    """
    if scores.candidates is None:
        return {}
    config = getattr(loss, "keywords", {}).get("distillation_config")
    least = getattr(getattr(config, "distillation_loss", None), "log_prob_min_clamp", None)
    tokens, given = part["input_ids"], part["teacher_logprobs"]
    width = scores.data["input_ids"].size(1)
    rows = [F.pad(row.float(), (0, 0, 0, width - len(row))) for row in given.unbind()]
    teacher = torch.stack(rows)[:, :-1].to(scores.candidates.device)
    student, clamped = scores.candidates, teacher
    found = {"student_mass": student.exp().sum(-1), "teacher_mass": teacher.exp().sum(-1)}
    if least is not None:
        student, clamped = student.clamp_min(least), teacher.clamp_min(least)
    found["distillation_losses"] = (clamped.exp() * (clamped - student)).sum(-1)
    return {name: _make_jagged(F.pad(each, (0, 1)), tokens) for name, each in found.items()}


def model_output(scores: TokenScores, part: TensorDict) -> dict[str, torch.Tensor]:
    """What verl calls a model's output, jagged `[B, j]`: `log_probs`, and `entropy` if there are
    any, of which position t has token t + 1 and the last one 0; or `values` of each position.
    """
    tokens = part["input_ids"]
    if scores.values is not None:
        return {"values": _make_jagged(scores.values, tokens)}
    found = {"log_probs": scores.logprobs, "entropy": scores.entropy}
    return {
        name: _make_jagged(F.pad(each, (0, 1)), tokens)
        for name, each in found.items()
        if each is not None
    }


def _make_jagged(values_BS: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The rows of `values_BS`, each as long as that of `like`; differentiable."""
    offsets = offsets_of(like)
    lengths_B, width = offsets.diff(), values_BS.size(1)
    # Indices are made on the host: a mask would have it wait for the device.
    rows_N = torch.repeat_interleave(torch.arange(len(lengths_B)), lengths_B)
    places_N = torch.arange(int(offsets[-1])) - offsets[rows_N] + rows_N * width
    chosen = values_BS.flatten()[to_device(places_N)]
    return torch.nested.nested_tensor_from_jagged(chosen, offsets=to_device(offsets))


def outcome(
    output: Mapping[str, torch.Tensor], loss: torch.Tensor | None, metrics: Any, keep_output: bool
) -> dict[str, Any]:
    """What verl joins over microbatches. Metrics are verl's own objects, untouched."""
    found: dict[str, Any] = {
        "loss": 1.0 if loss is None else loss.detach().item(),
        "metrics": metrics,
    }
    if keep_output:
        found["model_output"] = {name: each.detach() for name, each in output.items()}
    return found
