"""One call of a loss: whether it accepts the arguments that it will be given, what can go wrong in
it, and what the schedule differentiates then.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from megatron_policy.batch import BatchedDataDict
from megatron_policy.converters.architecture import ScalarHead
from megatron_policy.errors import LossError
from megatron_policy.interfaces import LossInputType
from megatron_policy.packing.microbatch import counted
from megatron_policy.training.checks import candidates_key, describe_wrong_metric, loss_kind
from megatron_policy.training.loss_faults import LossFault, fault_of_exception, name_of

_CONTRACT = "a loss returns (scalar tensor, dict of metrics)"


def try_loss(
    loss_fn: Callable[..., Any],
    call: Callable[[], Any],
    data: BatchedDataDict,
    given: Sequence[torch.Tensor],
    faults: list[LossFault],
    *,
    keeps: bool = False,
) -> tuple[torch.Tensor, Any]:
    """Call `loss_fn` by `call` on the rows `data`; `given` are the tensors that it can
    differentiate. Returns its 0-d scalar and its metrics, or whatever else it returned if it
    `keeps` that.

    If it cannot be trained on, the reason is appended to `faults`; the scalar is then NaN and has a
    gradient for all of `given`.
    """
    nodes = _nodes_of(given)
    try:
        found = call()
    except Exception as error:
        fault = fault_of_exception(loss_fn, error)
        if isinstance(error, KeyError) and error.args and error.args[0] not in data:
            # It can also be a key of another mapping, of which nothing is known.
            fault = replace(
                fault,
                what=f"{fault.what}; the data have no {error.args[0]!r}: pass it with them, a "
                "tensor or list with one entry for each row of input_ids, if the loss reads it "
                f"there. They have {', '.join(sorted(map(str, data)))}",
            )
    else:
        wrong = _describe_wrong_result(found, nodes | _nodes_of(given), data, keeps)
        if not wrong:
            value, kept = found[0].to(given[0].device), found[1]
            value = value if value.requires_grad else keep_graph(value, given)
            return value, kept if keeps else dict(kept)
        fault = LossFault(what=f"{name_of(loss_fn)} {wrong}")
    faults.append(fault)
    return keep_graph(torch.full((), math.nan, device=given[0].device), given), {}


def _describe_wrong_result(found: Any, nodes: set[Any], data: BatchedDataDict, keeps: bool) -> str:
    """Say what is wrong with what a loss returned; empty if it can be trained on, which needs one
    of the graph's `nodes` behind its value.
    """
    if not isinstance(found, tuple | list) or len(found) != 2:
        size = f" of {len(found)}" if isinstance(found, tuple | list) else ""
        return f"returned a {type(found).__name__}{size}: {_CONTRACT}"
    value, metrics = found
    if not isinstance(value, torch.Tensor) or value.dim() or value.is_complex():
        is_tensor = isinstance(value, torch.Tensor)
        has = f"{value.dtype} of shape {tuple(value.shape)}" if is_tensor else type(value)
        how = ": add its entries up, with sum()" if is_tensor and value.dim() else ""
        return f"returned as its value {has}, which is not a scalar{how}; {_CONTRACT}"
    has_gradient = not torch.is_grad_enabled() or _leads_to(value, nodes)
    # The constant 0 is legal for rows in which no token counts.
    if not has_gradient and (value != 0 or counted(data)[:, 1:].any()):
        return (
            f"returned a {value.dtype} that is detached from the model and has no gradient: "
            "compute it from what the loss is given, without detach(), item() or no_grad(); "
            "where it is 0, as a sum of that times 0"
        )
    if keeps:
        return ""
    if not isinstance(metrics, Mapping):
        return f"returned as its metrics a {type(metrics).__name__}: {_CONTRACT}"
    return describe_wrong_metric(metrics)


def _nodes_of(tensors: Sequence[torch.Tensor]) -> set[Any]:
    """The graph nodes that produced these tensors."""
    return {get_gradient_edge(tensor).node for tensor in tensors if tensor.requires_grad}


def _leads_to(value: torch.Tensor, nodes: set[Any]) -> bool:
    """Whether the graph of a value contains one of these nodes; nothing behind them is searched."""
    waiting, seen = list(_nodes_of([value])), set[Any]()
    while waiting:
        node = waiting.pop()
        if node in nodes:
            return True
        if node not in seen:
            seen.add(node)
            waiting += [before for before, _ in node.next_functions if before is not None]
    return False


def keep_graph(value: torch.Tensor, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """`value`, with a gradient for `tensors` as well: 0 where it is finite, NaN where it is not.

    The gradient norm, which all ranks have, thus tells each of them whether a loss was not finite
    anywhere, whatever its graph: a NaN can be the constant 0 / 0 of rows without tokens. The
    backward pass, with its collectives, also always runs in full.
    """
    if not torch.is_grad_enabled():
        return value
    apply: Callable[..., torch.Tensor] = _KeepGraph.apply
    return apply(value, *tensors)


class _KeepGraph(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        # Not tested for finiteness on the host: that would synchronize with the device.
        ctx.nothing = value.detach().float() * 0.0
        ctx.shapes = [(tensor.shape, tensor.dtype) for tensor in tensors]
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return grad, *(ctx.nothing.to(dtype).expand(shape) for shape, dtype in ctx.shapes)


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
