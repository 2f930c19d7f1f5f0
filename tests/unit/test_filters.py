"""What filters of sampling keep, and scores of it, against plain loops and whole logits.

Shapes: N tokens, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_policy.config import GenerationConfig
from megatron_policy.lm_head.filters import Filters, find_bounds, order_bits
from megatron_policy.lm_head.fused import HeadShape, fused_scores
from megatron_policy.lm_head.fused_tiles import row_tiling
from tests.pure.test_fused import (
    ALONE,
    TOLERANCE,
    Case,
    Watch,
    assert_close,
    differentiated,
    make_case,
    plain_logits,
)

ALL = {
    "top-k": Filters(top_k=7),
    "one": Filters(top_k=1),
    "top-p": Filters(top_p=0.8),
    "hardly any": Filters(top_p=1e-9),
    "min-p": Filters(min_p=0.05),
    "all three": Filters(top_k=40, top_p=0.9, min_p=0.001),
}


def kept_of_row(logits: list[float], filters: Filters) -> list[bool]:
    """As vLLM and the host have it: likeliest first, and of equals the higher entry first."""
    highest = max(logits)
    order = sorted(range(len(logits)), key=lambda entry: (logits[entry], entry), reverse=True)
    order = [e for e in order if math.exp(logits[e] - highest) >= filters.min_p]
    if filters.top_k is not None and filters.top_k < len(order):
        least = logits[order[filters.top_k - 1]]
        order = [entry for entry in order if logits[entry] >= least]
    if filters.top_p < 1:
        powers = [math.exp(logits[entry] - highest) for entry in order]
        need, before = math.fsum(powers) * filters.top_p, [0.0]
        for power in powers:
            before.append(before[-1] + power)
        order = [entry for entry, reached in zip(order, before, strict=False) if reached < need]
    return [entry in order for entry in range(len(logits))]


def plain_kept(logits_NV: torch.Tensor, filters: Filters) -> torch.Tensor:
    rows = [kept_of_row(row, filters) for row in logits_NV.detach().double().tolist()]
    return torch.tensor(rows, dtype=torch.bool).view(logits_NV.shape)


def plain_filtered_scores(
    hidden_ND: torch.Tensor, weight_VD: torch.Tensor, targets: torch.Tensor, head: HeadShape
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores from whole logits; targets that are not kept have minus infinity."""
    assert head.filters is not None
    logits_NV = plain_logits(hidden_ND, weight_VD, head)
    kept_NV = plain_kept(logits_NV, head.filters)
    logprobs_NV = logits_NV.masked_fill(~kept_NV, -1e30).log_softmax(-1)
    entropy_N = -(logprobs_NV.exp() * logprobs_NV).sum(-1)
    logprobs_NV = logprobs_NV.masked_fill(~kept_NV, -math.inf)
    local = targets - head.vocab_start
    if targets.ndim > 1:
        return logprobs_NV.gather(1, local), entropy_N
    return logprobs_NV.gather(1, local.unsqueeze(1)).squeeze(1), entropy_N


def finite(scores: Any) -> Any:
    """The same scores, with 0 for targets that are not kept, as the host has it."""

    def found(*args: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        logprobs, entropy_N = scores(*args)
        return logprobs.masked_fill(logprobs == -math.inf, 0.0), entropy_N

    return found


def fused(chunk: int, entropy: bool = True) -> Any:
    def scores(
        hidden_ND: torch.Tensor, weight_VD: torch.Tensor, targets: torch.Tensor, head: HeadShape
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return fused_scores(hidden_ND, weight_VD, targets, head, ALONE, chunk, entropy)

    return scores


def make_filtered(
    tokens: int, vocab: int, filters: Filters, targets: int | None = None, **shape: Any
) -> Case:
    head = HeadShape(0, vocab - vocab // 20, filters=filters, **shape)
    return make_case(tokens, vocab, 5, head, targets=targets)


def keeps(row: list[float], **filters: Any) -> list[int]:
    """The entries of one row that are kept, in fp32 and fp64 alike."""
    found = []
    for dtype in (torch.float32, torch.float64):
        logits_1V = torch.tensor([row], dtype=dtype)
        bounds = find_bounds(logits_1V, 0, len(row), Filters(**filters))
        found.append((~bounds.mask_dropped(logits_1V, 0))[0].nonzero()[:, 0].tolist())
    assert found[0] == found[1]
    return found[0]


EIGHT = [0.0] * 8
HALVES = [math.log(share) for share in (0.125, 0.5, 0.25, 0.125)]


@pytest.mark.parametrize(
    ("row", "filters", "expected"),
    [
        (HALVES, {"top_k": 2}, [1, 2]),
        (HALVES, {"top_k": 3}, [0, 1, 2, 3]),  # the third and the fourth are as likely
        (HALVES, {"top_k": 9}, [0, 1, 2, 3]),
        (HALVES, {"top_p": 0.51}, [1, 2]),
        (HALVES, {"top_p": 0.76}, [1, 2, 3]),  # of two as likely the higher entry
        (HALVES, {"top_p": 1e-30}, [1]),
        (HALVES, {"top_p": 0.9999999}, [0, 1, 2, 3]),
        (HALVES, {"min_p": 1.0}, [1]),
        (HALVES, {"min_p": 0.24}, [0, 1, 2, 3]),
        (HALVES, {"top_k": 2, "top_p": 0.7}, [1, 2]),  # of 3/4 that are left, 1/2 is 2/3
        (HALVES, {"top_k": 2, "top_p": 0.66}, [1]),
        (HALVES, {"min_p": 0.49, "top_p": 0.66}, [1]),
        (HALVES, {"top_k": 3, "top_p": 0.76}, [1, 2, 3]),
        (EIGHT, {"top_p": 0.51}, [3, 4, 5, 6, 7]),
        (EIGHT, {"top_k": 1}, [*range(8)]),
        (EIGHT, {"top_k": 1, "top_p": 0.2}, [6, 7]),
        ([0.0, -0.0, -1.0], {"top_k": 1}, [0, 1]),
        ([-1e30, 5.0, 5.0], {"top_k": 3}, [0, 1, 2]),
    ],
)
def test_what_is_kept_is_what_the_host_and_vllm_keep(row, filters, expected) -> None:
    assert keeps(row, **filters) == expected


@st.composite
def rows(draw: st.DrawFn) -> torch.Tensor:
    """Logits of few values, so that many are equal, or of any."""
    some = st.sampled_from([-3.0, -0.5, 0.0, 0.25, 1.0, 40.0])
    size = draw(st.integers(1, 30))
    value = draw(st.sampled_from([some, st.floats(-50, 50, width=32)]))
    row = draw(st.lists(value, min_size=size, max_size=size))
    return torch.tensor([row], dtype=torch.float64)


@given(
    rows(),
    st.sampled_from([None, 1, 2, 5, 29, 40]),
    st.sampled_from([1.0, 0.999, 0.9, 0.6183, 0.3, 1e-6]),
    st.sampled_from([0.0, 1e-9, 0.0313, 0.7311, 1.0]),
)
def test_what_is_kept_equals_a_loop_over_sorted_entries(logits_1V, top_k, top_p, min_p) -> None:
    filters = Filters(top_k, top_p, min_p)
    bounds = find_bounds(logits_1V, 0, logits_1V.size(1), filters)
    assert torch.equal(~bounds.mask_dropped(logits_1V, 0), plain_kept(logits_1V, filters))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_integers_have_the_order_of_the_floats_they_are_of(dtype: torch.dtype) -> None:
    values = torch.tensor([-math.inf, -1e30, -1.5, -1e-40, 0.0, 1e-40, 2.0, 1e30, math.inf])
    bits = values.to(dtype).view(torch.int32 if dtype == torch.float32 else torch.int64)
    assert (order_bits(bits).diff() > 0).all()
    assert torch.equal(order_bits(order_bits(bits)), bits)


@pytest.mark.dear
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("entropy", [False, True])
def test_scores_of_what_is_kept_and_gradients_equal_those_of_whole_logits(
    dtype: torch.dtype, name: str, entropy: bool
) -> None:
    for targets in (None, 9):
        for shape in ({}, {"scale": 0.5, "softcap": 3.0, "temperature": 0.6}):
            case = make_filtered(33, 700, ALL[name], targets, **shape)
            case = with_likely_targets(case)
            plain = plain_filtered_scores(case.hidden_ND, case.weight_VD, case.targets, case.head)
            assert {True, False} == set((plain[0] == -math.inf).flatten().tolist())
            expected = differentiated(case, finite(plain_filtered_scores), entropy)
            for chunk in (1, 5, 40):
                got = differentiated(case.to(dtype), finite(fused(chunk, entropy)), entropy)
                assert_close(got, expected, TOLERANCE[dtype])


def with_likely_targets(case: Case) -> Case:
    """The case with every other target the token's most likely entry, so that some are kept."""
    best_N = plain_logits(case.hidden_ND, case.weight_VD, case.head).argmax(-1)
    targets = case.targets.clone()
    targets.view(len(best_N), -1)[::2, 0] = best_N[::2]
    return replace(case, targets=targets)


def test_a_dropped_target_has_minus_infinity_and_no_gradient() -> None:
    case = make_filtered(6, 600, Filters(top_k=3))
    logits_NV = plain_logits(case.hidden_ND, case.weight_VD, case.head)
    case = replace(case, targets=logits_NV.argmin(-1))
    hidden_ND = case.hidden_ND.clone().requires_grad_()
    logprobs_N, _ = fused(4)(hidden_ND, case.weight_VD, case.targets, case.head)
    assert logprobs_N.tolist() == [-math.inf] * 6
    logprobs_N.sum().backward()
    assert hidden_ND.grad is not None and not hidden_ND.grad.any()


@pytest.mark.parametrize("name", ALL)
def test_a_logit_that_is_not_a_number_shows_whatever_is_kept(name: str) -> None:
    for elsewhere in (0, 1):
        case = make_filtered(4, 60, ALL[name]).to(torch.float32)
        case.weight_VD[(int(case.targets[1]) + elsewhere) % 50] = math.nan
        logprobs_N, entropy_N = fused(2)(case.hidden_ND, case.weight_VD, case.targets, case.head)
        assert logprobs_N[1].isnan() and entropy_N[1].isnan()


@pytest.mark.parametrize("shift", [-1e4, 1e4])
def test_logits_far_from_zero_overflow_nothing_whatever_is_kept(shift: float) -> None:
    for filters in ALL.values():
        case = with_likely_targets(make_filtered(6, 600, filters))
        hidden_ND = torch.cat([case.hidden_ND, torch.full((6, 1), shift).double()], dim=1)
        weight_VD = torch.cat([case.weight_VD, torch.ones(600, 1).double()], dim=1)
        found = fused(3)(hidden_ND, weight_VD, case.targets, case.head)
        expected = plain_filtered_scores(case.hidden_ND, case.weight_VD, case.targets, case.head)
        for got, value in zip(found, expected, strict=True):
            torch.testing.assert_close(got, value, rtol=0, atol=1e-10)


def test_gradients_stay_finite_under_the_largest_factor_on_losses() -> None:
    case = with_likely_targets(make_filtered(6, 600, ALL["all three"])).to(torch.float32)
    factor = 2.0**40
    scaled = replace(case, of_logprobs=case.of_logprobs * factor)
    scaled = replace(scaled, of_entropy_N=case.of_entropy_N * factor)
    got, plain = (differentiated(each, finite(fused(3))) for each in (scaled, case))
    for name in ("hidden", "weight"):
        torch.testing.assert_close(got[name], plain[name] * factor)


def test_filtered_scores_in_bf16_keep_what_their_own_logits_say() -> None:
    case = make_filtered(64, 2000, ALL["all three"]).to(torch.bfloat16)
    logits_NV = plain_logits(case.hidden_ND, case.weight_VD, case.head)
    # Far from what is kept last, where another order of summation decides.
    ends = torch.where(torch.arange(64) % 2 == 0, logits_NV.argmax(-1), logits_NV.argmin(-1))
    case = replace(case, targets=ends)
    got = differentiated(case, finite(fused(16)))
    plain = differentiated(case, finite(plain_filtered_scores))
    for name, value in plain.items():
        error = (got[name].double() - value.double()).norm() / value.double().norm()
        assert error <= 2**-6, name
    assert got["logprobs"].dtype == torch.float32 and got["weight"].dtype == torch.bfloat16


@pytest.mark.dear
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk", [60, 4])
def test_with_filters_no_tensor_is_larger_than_chunk_times_vocabulary(dtype, chunk) -> None:
    case = make_filtered(256, 1000, ALL["all three"], 3, softcap=5.0).to(dtype)
    with Watch() as watch:
        differentiated(case, finite(fused(chunk)))
    # Besides tiles there is the weights' gradient of 5 columns.
    assert 0.9 * chunk * 1000 < watch.largest <= max(chunk, 5) * 1000


def test_tiles_of_filtered_tokens_are_the_same_whatever_part_of_the_slice_is_real() -> None:
    plans = [row_tiling(100, 50_000, real, 64) for real in (0, 1, 49_000, 50_000)]
    assert {(plan.height, plan.strip) for plan in plans} == {(64, 20)}
    assert [tile.entries for (tile, _) in plans[2].columns()] == [slice(0, 49_000)]


def test_filters_are_those_of_generation_and_of_logprobs_unless_they_are_to_be_whole() -> None:
    settings = GenerationConfig(max_new_tokens=1, top_p=0.9, top_k=5, min_p=0.1)
    assert Filters.of(settings) == Filters.of_logprobs(settings) == Filters(5, 0.9, 0.1)
    whole = settings.model_copy(update={"filter_logprobs": False})
    assert Filters.of(whole) == Filters(5, 0.9, 0.1) and Filters.of_logprobs(whole) is None
    for off in ({}, {"top_p": 1, "top_k": -1}, {"top_k": 0, "min_p": 0}):
        assert Filters.of(GenerationConfig(max_new_tokens=1, **off)) is None
