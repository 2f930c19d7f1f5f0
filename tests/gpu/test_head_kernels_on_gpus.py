"""The head's kernels, compiled: against the same work in torch and exact arithmetic."""

from __future__ import annotations

import pytest
import torch

from megatron_policy.device import current_device
from megatron_policy.lm_head.fused import HeadShape, fused_scores
from megatron_policy.lm_head.tile_work import choose_implementation
from tests.pure.test_fused import ALONE, Case, differentiated, make_case, plain_scores
from tests.unit.test_triton_tiles import DTYPES, HEADS, check_gradient, check_sums, make_tile

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_compiled_kernels_do_on_a_tile_what_exact_arithmetic_does(
    dtype: torch.dtype, name: str, entropy: bool
) -> None:
    for width, targets in ((1, 1), (257, 1), (4099, 3), (16384, 150)):
        tile = make_tile(width, HEADS[name], dtype, targets, str(current_device()))
        check_sums(tile, dtype, entropy)
        check_gradient(tile, dtype, entropy)


@pytest.mark.parametrize("targets", [None, 9])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernels_that_a_gpu_chooses_are_as_exact_as_torch(
    dtype: torch.dtype, targets: int | None
) -> None:
    head = HeadShape(0, 9000, scale=0.25, softcap=20.0, temperature=0.8)
    case = make_case(600, 9001, 64, head, targets=targets).to(dtype)
    case = Case(*(getattr(case, name).to(current_device()) for name in TENSORS), head)
    assert choose_implementation(case.weight_VD, head) == "triton"
    exact, errors = differentiated(case.to(torch.float64), plain_scores), {}
    for implementation in ("torch", None):

        def scores(*given: torch.Tensor, how: object = implementation) -> object:
            return fused_scores(*given, ALONE, 64, True, how)

        got = differentiated(case, scores)
        errors[implementation] = {
            name: float((got[name].double() - value).norm() / value.norm())
            for name, value in exact.items()
        }
    for name, error in errors[None].items():
        assert error <= 1.5 * errors["torch"][name] + 1e-6, name


TENSORS = ("hidden_ND", "weight_VD", "targets", "of_logprobs", "of_entropy_N")
