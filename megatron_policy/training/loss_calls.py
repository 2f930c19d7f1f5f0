"""One call of a loss: what can go wrong in it, and what the schedule differentiates then.

Shapes: B rows, S positions.
"""

from __future__ import annotations

import math
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch.autograd.graph import get_gradient_edge as gradient_edge

from megatron_policy.batch import BatchedDataDict
from megatron_policy.errors import LossError
from megatron_policy.packing.microbatch import counted
from megatron_policy.training.checks import wrong_metric

_CONTRACT = "a loss returns (scalar tensor, dict of metrics)"
_FRAMES = 20
_OURS = ("dry_run.py", "loss_calls.py", "losses.py", "pieces.py")
_CALLERS = {str(Path(__file__).with_name(name)) for name in _OURS}
_INSTALLED = ("site-packages", "dist-packages")
_LIBRARIES = (
    Path(torch.__file__).parent,
    Path(np.__file__).parent,
    Path(__file__).parents[1],
    Path(sysconfig.get_path("stdlib")),
)
"""Where no caller's code is: torch, numpy, this package and the standard library."""


@dataclass(frozen=True)
class Wrong:
    """What went wrong in words, and the traceback if the loss raised."""

    what: str
    trace: str = ""

    def error(self) -> LossError:
        """As an exception, for when no other rank needs to know."""
        error = LossError(self.what)
        if self.trace:
            error.add_note(self.trace)
        return error


@dataclass(frozen=True)
class Call:
    """A call of `loss_fn` on the rows `data`; `given` are the tensors it can differentiate. What it
    returns besides its scalar are metrics, unless it `keeps` anything.
    """

    loss_fn: Callable[..., Any]
    data: BatchedDataDict
    given: Sequence[torch.Tensor]
    call: Callable[[], Any]
    keeps: bool = False

    def result(self, faults: list[Wrong] | None) -> tuple[torch.Tensor, Any]:
        """The 0-d scalar and the metrics, or what is kept; both checked.

        LossError for what cannot be trained on. With `faults` the error is appended there instead,
        and the scalar is NaN and has a gradient for all of `given`.
        """
        name, before = name_of(self.loss_fn), _nodes(self.given)
        try:
            found = self.call()
        except Exception as error:
            cause: Exception | None = error
            wrong = raised(name, error)
            if isinstance(error, KeyError) and error.args and error.args[0] not in self.data:
                wrong = replace(wrong, what=f"{wrong.what}; {self._lacks(error.args[0])}")
        else:
            cause, what = None, self._broken(found, before | _nodes(self.given))
            if not what:
                return self._usable(*found)
            wrong = Wrong(f"{name} {what}")
        if faults is None:
            raise wrong.error() from cause
        faults.append(wrong)
        nothing = torch.full((), math.nan, device=self.given[0].device)
        return carried(nothing, self.given), {}

    def _lacks(self, key: object) -> str:
        """Say that the data have no such key, and what to pass. The error can also be of another
        mapping, of which nothing is known.
        """
        has = ", ".join(sorted(map(str, self.data)))
        return (
            f"the data have no {key!r}: pass it with them, a tensor or list with one entry for "
            f"each row of input_ids, if the loss reads it there. They have {has}"
        )

    def _usable(self, value: torch.Tensor, metrics: Any) -> tuple[torch.Tensor, Any]:
        value = value.to(self.given[0].device)
        if not value.requires_grad:
            value = carried(value, self.given)
        return value, metrics if self.keeps else dict(metrics)

    def _broken(self, found: Any, given: set[Any]) -> str:
        """Say what is wrong with the loss's return value; empty if it can be trained on, which
        needs one of the `given` nodes in its graph.
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
        if torch.is_grad_enabled() and not (_leads_to(value, given) or self._is_nothing(value)):
            return (
                f"returned a {value.dtype} that is detached from the model and has no gradient: "
                "compute it from what the loss is given, without detach(), item() or no_grad(); "
                "where it is 0, as a sum of that times 0"
            )
        if self.keeps:
            return ""
        if not isinstance(metrics, Mapping):
            return f"returned as its metrics a {type(metrics).__name__}: {_CONTRACT}"
        return wrong_metric(metrics)

    def _is_nothing(self, value: torch.Tensor) -> bool:
        """Whether this is the constant 0 for rows in which no token counts."""
        return bool(value == 0) and not counted(self.data)[:, 1:].any()


def _nodes(tensors: Sequence[torch.Tensor]) -> set[Any]:
    """The graph nodes that produced these tensors."""
    return {gradient_edge(tensor).node for tensor in tensors if tensor.requires_grad}


def _leads_to(value: torch.Tensor, ends: set[Any]) -> bool:
    """Whether the graph of a value contains one of these nodes; nothing behind them is searched."""
    if not value.requires_grad:
        return False
    waiting, seen = [gradient_edge(value).node], set()
    while waiting:
        node = waiting.pop()
        if node in ends:
            return True
        if node not in seen:
            seen.add(node)
            waiting += [before for before, _ in node.next_functions if before is not None]
    return False


def name_of(loss_fn: Callable[..., Any]) -> str:
    """The name of a loss in messages."""
    return str(getattr(loss_fn, "__name__", None) or type(loss_fn).__name__)


def carried(value: torch.Tensor, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """`value`, with a gradient for `tensors` as well: 0 where it is finite, NaN where it is not.

    The gradient norm, which all ranks have, thus tells each of them whether a loss was not finite
    anywhere, whatever its graph: a NaN can be the constant 0 / 0 of rows without tokens. The
    backward pass, with its collectives, also always runs in full.
    """
    if not torch.is_grad_enabled():
        return value
    apply: Callable[..., torch.Tensor] = _Carried.apply
    return apply(value, *tensors)


class _Carried(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        # Not tested for finiteness on the host: that would synchronize with the device.
        ctx.nothing = value.detach().float() * 0.0
        ctx.shapes = [(tensor.shape, tensor.dtype) for tensor in tensors]
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return grad, *(ctx.nothing.to(dtype).expand(shape) for shape, dtype in ctx.shapes)


def raised(name: str, error: Exception) -> Wrong:
    """What went wrong in a function of the caller's, by the frames below those that call it."""
    frames = list(_frames_of_loss(error.__traceback__))
    text = str(error).strip() or "without a message"
    at = f" ({_place(frames)})" if frames else ""
    trace = "".join(
        [
            f"{name} raised:\n",
            *traceback.format_list(frames[-_FRAMES:]),
            *traceback.format_exception_only(error),
        ]
    )
    return Wrong(f"{name} raised {type(error).__name__}: {text}{at}", trace.rstrip())


def _frames_of_loss(trace: TracebackType | None) -> Iterator[traceback.FrameSummary]:
    """The frames below those that call the loss."""
    for frame in traceback.extract_tb(trace):
        if frame.filename not in _CALLERS:
            yield frame


def _place(frames: Sequence[traceback.FrameSummary]) -> str:
    """The innermost line that is the caller's own."""
    own = [frame for frame in frames if not _in_library(frame.filename)] or frames
    return f"{Path(own[-1].filename).name}, line {own[-1].lineno}, in {own[-1].name}"


def _in_library(file: str) -> bool:
    if file.startswith("<frozen"):
        return True
    for root in _LIBRARIES:
        if Path(file).is_relative_to(root):
            # Packages are installed in a folder of the standard library's.
            return not set(_INSTALLED) & set(Path(file).relative_to(root).parts)
    return False
