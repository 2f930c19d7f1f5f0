"""Adapts the host's losses to this policy's calls: with the host's batches, and with inputs that
only the host's own code prepares.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from megatron_policy.batch import BatchedDataDict
from megatron_policy.hosts.nemo_rl.host_imports import import_part, to_host_batch
from megatron_policy.training.checks import loss_kind

_PREPARED = "distillation"
_OF_PAIRS = "split_output_tensor"
"""The method by which the host's preference losses separate the rows of pairs."""
_UNFILTERED = "next_token_logprobs_unfiltered"


def adapt_loss(loss_fn: Any, aside: Iterable[str] = ()) -> Any:
    """`loss_fn` as this policy calls it; `aside` are the keys given to `set_aside`.

    NotImplementedError, naming the reason, for an input type that is not supported, LossError for
    one that nobody has.
    """
    kind = getattr(loss_fn, "input_type", None)
    kind = getattr(kind, "value", kind)
    if kind == _PREPARED:
        return PreparedLoss(loss_fn, tuple(aside))
    loss_kind(loss_fn)
    return HostLoss(loss_fn, tuple(aside))


class HostLoss:
    """A loss that gets the host's batch, and is otherwise called as it is.

    Its own attributes (`loss_type`, `input_type`, `metric_normalizations`, ...) show through. With
    a penalty on the divergence from the reference, which the host computes without filters of
    sampling, it also gets log-probabilities without them, in the data.
    """

    def __init__(self, loss_fn: Any, aside: tuple[str, ...]) -> None:
        self._loss_fn, self._aside = loss_fn, aside
        self.__name__ = getattr(loss_fn, "__name__", None) or type(loss_fn).__name__

    def __getattr__(self, name: str) -> Any:
        if name == "needs_unfiltered_logprobs":
            return bool(getattr(self.__dict__["_loss_fn"], "reference_policy_kl_penalty", 0))
        return getattr(self.__dict__["_loss_fn"], name)

    @property
    def rows_per_group(self) -> int:
        """What the loss says, and otherwise 2 for the host's preference losses, among them DPO's:
        they take every second row for the one that is chosen and the next for the rejected one.
        """
        pairs = hasattr(self._loss_fn, _OF_PAIRS)
        number: int = getattr(self._loss_fn, "rows_per_group", 2 if pairs else 1)
        return number

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        if "data" in kwargs:
            data, given = kwargs["data"], kwargs.get("next_token_logprobs")
            unfiltered = kwargs.pop(_UNFILTERED, given)
            if given is not None:
                kwargs["next_token_logprobs"] = _fill_masked(data, given)
            if unfiltered is not given:
                whole = {"curr_logprobs_unfiltered": _fill_masked(data, unfiltered)}
                data = BatchedDataDict(dict(data) | whole)
            kwargs["data"] = self._data(data)
        else:
            logits, data, *rest = args
            # The host's backward passes take views that a transposed tensor does not support.
            args = (logits.contiguous(), self._data(data), *rest)
        result: tuple[torch.Tensor, dict[str, Any]] = self._loss_fn(*args, **kwargs)
        return result

    def _data(self, data: BatchedDataDict) -> Any:
        return to_host_batch(restore_tensors(data, self._aside))


class PreparedLoss(HostLoss):
    """A loss whose input the host prepares from this rank's slice of the logits, `[B, S, V]`.

    This policy calls it like losses without `input_type`, with the groups.
    """

    def __getattr__(self, name: str) -> Any:
        if name == "input_type":
            raise AttributeError(name)
        return super().__getattr__(name)

    def __call__(
        self,
        logits_BSV: torch.Tensor,
        data: BatchedDataDict,
        global_valid_seqs: torch.Tensor,
        global_valid_toks: torch.Tensor,
        **groups: Any,
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        prepare = import_part("nemo_rl.algorithms.loss.utils", "prepare_loss_input")
        # The logits already cover all context-parallel ranks.
        groups["context_parallel_group"] = None
        given, prepared = prepare(
            logits=logits_BSV.contiguous(), data=self._data(data), loss_fn=self._loss_fn, **groups
        )
        result: tuple[torch.Tensor, dict[str, Any]] = self._loss_fn(
            data=prepared,
            global_valid_seqs=global_valid_seqs,
            global_valid_toks=global_valid_toks,
            **given,
        )
        return result


def _fill_masked(data: Any, next_token_logprobs: torch.Tensor) -> torch.Tensor:
    """Fill in the log-probabilities of masked tokens, which are not computed, from the data's
    `prev_logprobs`.

    The host's ratios are then 1 there, as with the host's own worker: an overflowing exponential
    would make the masked sum NaN.
    """
    before_BS = data.get("prev_logprobs")
    if before_BS is None or before_BS[:, 1:].shape != next_token_logprobs.shape:
        return next_token_logprobs
    # Not at the top: it imports Megatron-Core, which this module's importers may lack.
    from megatron_policy.packing.microbatch import counted

    return torch.where(counted(data)[:, 1:], next_token_logprobs, before_BS[:, 1:])


def set_aside(data: BatchedDataDict, keys: Iterable[str]) -> BatchedDataDict:
    """`data` with the tensors under `keys` as lists of rows, so that their dimension 1, which is
    not the sequence, is neither checked nor sliced.
    """
    put = [key for key in keys if isinstance(data.get(key), torch.Tensor)]
    if not put:
        return data
    changed = BatchedDataDict(data)
    for key in put:
        changed[key] = list(data[key])
    return changed


def restore_tensors(data: BatchedDataDict, keys: Iterable[str]) -> BatchedDataDict:
    """`data` with the lists of `set_aside` as tensors again, on the batch's device."""
    put = [key for key in keys if isinstance(data.get(key), list)]
    if not put:
        return data
    changed, where = BatchedDataDict(data), data["input_ids"].device
    for key in put:
        changed[key] = torch.stack(data[key]).to(where)
    return changed
