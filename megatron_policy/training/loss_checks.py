"""Checks a loss before it is called: whether it accepts the arguments it will be given."""

from __future__ import annotations

import inspect
from typing import Any

from megatron_policy.errors import LossError
from megatron_policy.interfaces import LossInputType
from megatron_policy.training.checks import candidates_key, loss_kind
from megatron_policy.training.loss_calls import name_of

_COUNTS = ("global_valid_seqs", "global_valid_toks")
_GROUPS = ("vocab_parallel_rank", "vocab_parallel_group", "context_parallel_group")


def check_loss(loss_fn: Any) -> None:
    """LossError unless it is an object that can be called with the arguments of its kind;
    NotImplementedError for an unsupported `input_type`.
    """
    if isinstance(loss_fn, type):
        name = loss_fn.__name__
        raise LossError(f"the loss is the class {name} itself: pass an instance, {name}(...)")
    if not callable(loss_fn):
        raise LossError(
            f"the loss is a {type(loss_fn).__name__}, which cannot be called: give its class a "
            "__call__, see docs/losses.md"
        )
    args, named = _arguments(loss_fn)
    try:
        signature = inspect.signature(loss_fn)
    except (TypeError, ValueError):
        return  # no signature is available, for example for a C function
    try:
        signature.bind(*[None] * len(args), **dict.fromkeys(named))
    except TypeError as error:
        call = ", ".join([*args, *[f"{name}=" for name in named]])
        raise LossError(
            f"{name_of(loss_fn)}({', '.join(signature.parameters)}) cannot be called as a loss of "
            f"its kind is, with ({call}): {error}. See docs/losses.md"
        ) from error


def _arguments(loss_fn: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The arguments passed by position and by name."""
    kind = loss_kind(loss_fn)
    if kind is None:
        return ("next_token_logits", "data", *_COUNTS), _GROUPS
    if kind == LossInputType.LOGIT.value:
        return (), ("data", *_COUNTS, "logits")
    found = ["data", *_COUNTS, "next_token_logprobs"]
    if candidates_key(loss_fn) is not None:
        found.append("candidate_logprobs")
    if getattr(loss_fn, "needs_unfiltered_logprobs", False):
        found.append("next_token_logprobs_unfiltered")
    if getattr(loss_fn, "needs_entropy", False):
        found.append("next_token_entropy")
    return (), tuple(found)
