"""The oracle's own rounding: what Hugging Face computes in fp64, how far its fp32 is from that, and
so how far a right result can be.

A test that compares two fp32 computations needs a tolerance, and a tolerance that is a number by
itself is wrong on the next processor: matrix products are sums, and AVX2, AVX-512, AMX, NCCL, two
threads or two tensor-parallel ranks add the same terms in another order. By the usual model of
rounding (Higham and Mary, A New Approach to Probabilistic Rounding Error Analysis, SIAM J. Sci.
Comput. 41(5), 2019) the error of a sum of n terms in any order is about sqrt(n) u times the size of
the terms, u = 2**-24: its size belongs to what is computed - depth, widths, the softmax's
temperature, the optimizer's epsilon, which divides a gradient's error - and only its draw belongs
to the order. So it is measured where it arises: the oracle computes everything in fp64, whose own
error is 2**29 times smaller, and again in fp32. The largest difference between these two over all
elements is one draw of the rounding error of this quantity, on this machine. Another implementation
is another draw of the same size, and `ROOM` of them are allowed.

`ROOM` is 8. Two draws' maxima over hundreds of elements, whose errors are correlated since they
share layers, differ by a factor of 3.2 at most in all layouts and instruction sets that were tried
(`make sweep-cpus` prints the largest share of a tolerance that was used); more than twice that
leaves the room that the next machine needs. A planted fault has to be ten times further away than
all of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from tests import margins
from tests.checkpoints import class_of_model, hf_config

UNIT = 2.0**-24
"""The unit roundoff of fp32."""

ROOM = 8.0
"""How many times the oracle's own rounding error a result can be from the truth."""


class InDouble(TorchFunctionMode):
    """Computes in fp64 where a model says fp32, as norms, softmaxes and rotary embeddings do."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        wide = {name: _wider(value) for name, value in (kwargs or {}).items()}
        return func(*map(_wider, args), **wide)


def _wider(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def load_hf(path: Path | str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The checkpoint's model, whose attention and experts are plain torch in every dtype."""
    config = hf_config(path)
    model = class_of_model(config).from_pretrained(
        path,
        config=config,
        dtype=dtype,
        attn_implementation="eager",
        experts_implementation="eager",
    )
    return model.eval()


@dataclass(frozen=True)
class Exact:
    """What is right, in fp64, and how far Hugging Face's fp32 is from it, at most."""

    value: torch.Tensor
    rounding: float

    @classmethod
    def of(
        cls,
        path: Path | str,
        compute: Callable[[PreTrainedModel], torch.Tensor],
        dtype: torch.dtype = torch.float32,
    ) -> Exact:
        """What `compute` makes of the checkpoint's model, without gradients. `rounding` is that of
        Hugging Face's computation in this dtype.
        """
        with torch.no_grad():
            rounded = compute(load_hf(path, dtype))
            with InDouble():
                value = compute(load_hf(path, torch.float64))
        return cls.between(rounded, value)

    @classmethod
    def between(cls, rounded: torch.Tensor, value: torch.Tensor) -> Exact:
        """The same computed in fp32 and in fp64; what is in fp32 is rounded at least once."""
        assert value.dtype is torch.float64, value.dtype
        return cls(value, max(furthest(rounded, value), UNIT * float(value.abs().max())))

    def __getitem__(self, index: Any) -> Exact:
        """A part of it; what rounding amounts to is that of the whole."""
        return Exact(self.value[index], self.rounding)


def furthest(found: torch.Tensor, value: torch.Tensor) -> float:
    """The largest difference of any element; not a number if one is not."""
    difference = (found.double() - value.double()).abs()
    if not difference.numel():
        return 0.0
    return math.nan if difference.isnan().any() else float(difference.max())


def assert_equal(quantity: str, found: torch.Tensor, exact: Exact, context: object = "") -> None:
    """Every element is as close to what is right as rounding allows."""
    assert found.shape == exact.value.shape, (quantity, found.shape, exact.value.shape, context)
    margins.check(quantity, furthest(found, exact.value), ROOM * exact.rounding, context)
