"""Checks a loss before it is called: whether it accepts the arguments it will be given."""

from __future__ import annotations

import inspect
from typing import Any

from megatron_policy.converters.architecture import ScalarHead
from megatron_policy.errors import LossError
from megatron_policy.interfaces import LossInputType
from megatron_policy.training.checks import candidates_key, loss_kind
from megatron_policy.training.loss_faults import name_of

_COUNTS = ("global_valid_seqs", "global_valid_toks")
_GROUPS = ("vocab_parallel_rank", "vocab_parallel_group", "context_parallel_group")

SCALAR_ARGUMENTS = {
    LossInputType.VALUE.value: "values",
    LossInputType.SCORE.value: "scores",
    LossInputType.LOGIT.value: "logits",
}
"""The argument of each kind that takes what a scalar head gives."""

_TAKEN = {
    LossInputType.LOGPROB: "next_token_logprobs",
    **{LossInputType(kind): name for kind, name in SCALAR_ARGUMENTS.items()},
}
"""The argument by which a loss of each kind is known."""


def check_loss(loss_fn: Any, head: ScalarHead | None) -> None:
    """LossError unless it is an object that can be called with the arguments of its kind, which a
    policy has with a scalar `head` or, if that is None, with that of a language model;
    NotImplementedError for a host's `input_type` that is not provided.
    """
    if isinstance(loss_fn, type):
        name = loss_fn.__name__
        raise LossError(f"the loss is the class {name} itself: pass an instance, {name}(...)")
    if not callable(loss_fn):
        raise LossError(
            f"the loss is a {type(loss_fn).__name__}, which cannot be called: give its class a "
            "__call__, see docs/losses.md"
        )
    kind, name = loss_kind(loss_fn), name_of(loss_fn)
    if head is not None and kind not in SCALAR_ARGUMENTS:
        raise LossError(
            f"{name} takes log-probabilities or logits of a vocabulary, but this policy has a "
            "scalar head (policy.reward_model_cfg): give it an input_type of "
            f"{', '.join(SCALAR_ARGUMENTS)}"
        )
    if head is None and kind in (LossInputType.VALUE.value, LossInputType.SCORE.value):
        raise LossError(
            f"{name}.input_type is {kind!r}, but this policy has the head of a language model: "
            "make it with policy.reward_model_cfg.enabled"
        )
    args, named = _list_arguments(loss_fn, kind)
    try:
        signature = inspect.signature(loss_fn)
    except (TypeError, ValueError):
        return  # no signature is available, for example for a C function
    try:
        signature.bind(*[None] * len(args), **dict.fromkeys(named))
    except TypeError as error:
        call = ", ".join([*args, *[f"{each}=" for each in named]])
        raise LossError(
            f"{name}({', '.join(signature.parameters)}) cannot be called as a loss of its kind is, "
            f"with ({call}): {error}. {_describe_remedy(kind, signature)}. See docs/losses.md"
        ) from error


def _describe_remedy(kind: str | None, signature: inspect.Signature) -> str:
    """What to change of a loss whose signature does not fit its kind."""
    if kind is not None:
        return f"Its input_type is {kind!r}: give it these arguments, or another input_type"
    fits = next((m for m, name in _TAKEN.items() if name in signature.parameters), None)
    member = "LOGPROB, LOGIT, VALUE or SCORE, by what it takes" if fits is None else fits.name
    return (
        "It has no attribute input_type, without which a loss is called in this older form: set "
        f"input_type = LossInputType.{member}"
    )


def _list_arguments(loss_fn: Any, kind: str | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The arguments passed by position and by name."""
    if kind is None:
        return ("next_token_logits", "data", *_COUNTS), _GROUPS
    if kind in SCALAR_ARGUMENTS:
        return (), ("data", *_COUNTS, SCALAR_ARGUMENTS[kind])
    found = ["data", *_COUNTS, "next_token_logprobs"]
    if candidates_key(loss_fn) is not None:
        found.append("candidate_logprobs")
    if getattr(loss_fn, "needs_unfiltered_logprobs", False):
        found.append("next_token_logprobs_unfiltered")
    if getattr(loss_fn, "needs_entropy", False):
        found.append("next_token_entropy")
    return (), tuple(found)
