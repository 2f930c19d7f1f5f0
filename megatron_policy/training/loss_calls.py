"""One call of a loss: what can go wrong in it, and what the schedule differentiates then."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from megatron_policy.batch import BatchedDataDict
from megatron_policy.packing.microbatch import counted
from megatron_policy.training.checks import describe_wrong_metric
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
