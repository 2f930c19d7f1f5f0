"""The kernels of flash-linear-attention on a GPU: as exact in bf16 as the plain code, against the
recurrences' definitions in fp64.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from megatron_policy.recurrence.chunks import sequences_of
from megatron_policy.recurrence.convolution import Windows, convolve
from megatron_policy.recurrence.kernels import PACKAGE, Line
from tests.unit.test_recurrence_kernels import CASES, NOT_INSTALLED, assert_as_exact_in_16_bits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(find_spec(PACKAGE) is None, reason=NOT_INSTALLED),
]


@pytest.mark.parametrize("name", [name for name in CASES if "strong" not in name])
def test_in_bf16_kernels_are_as_exact_as_the_plain_code(name: str) -> None:
    assert_as_exact_in_16_bits(CASES[name], torch.bfloat16, "cuda")


def test_in_bf16_the_kernel_of_convolutions_is_as_exact_as_the_plain_code() -> None:
    """Both add in fp32 and round once: a last bit can differ."""
    sequences, random = sequences_of((65, 1, 3)), torch.Generator().manual_seed(0)
    drawn = [torch.randn(*of, generator=random) for of in ((69, 24), (24, 4), (24,), (3, 3, 24))]
    x, weight, bias, past = (each.to("cuda", torch.bfloat16).requires_grad_() for each in drawn)
    results = []
    for layout in (Windows.of(sequences, 4), Line.of(sequences)):
        moved = layout.moved(lambda indices: indices.cuda())
        out, last = convolve(x, weight, bias, moved, past)
        pushes = [torch.linspace(-1, 1, y.numel()).view_as(y).to(y) for y in (out, last)]
        grads = torch.autograd.grad([out, last], [x, weight, bias, past], pushes)
        results.append([out, last, *grads])
    for plain, found in zip(*results, strict=True):
        close = float((found.double() - plain.double()).norm() / plain.double().norm())
        assert close <= 2 * torch.finfo(torch.bfloat16).eps
