"""Log-probabilities, entropies and top-k of a head from hidden states, against plain torch.

Shapes: N tokens, V entries of the slice, D model, K targets of a token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_policy.lm_head.fused import HeadShape, fused_scores, fused_topk
from megatron_policy.lm_head.fused_tiles import LEAST_WIDTH, tiling

# A group without a backend: a collective on it would raise.
ALONE = dist.ProcessGroup(0, 1)

# fp64 leaves what another order of summation leaves; fp32 is compared with fp64, so that sums over
# V logits and N tokens are in it as well.
TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-5}


@dataclass(frozen=True)
class Case:
    """A head with hidden states, targets `[N]` or `[N, K]`, and weights of the sum that is
    differentiated.
    """

    hidden_ND: torch.Tensor
    weight_VD: torch.Tensor
    targets: torch.Tensor
    of_logprobs: torch.Tensor
    of_entropy_N: torch.Tensor
    head: HeadShape

    def to(self, dtype: torch.dtype) -> Case:
        hidden_ND, weight_VD = self.hidden_ND.to(dtype), self.weight_VD.to(dtype)
        of = self.of_logprobs.to(dtype), self.of_entropy_N.to(dtype)
        return Case(hidden_ND, weight_VD, self.targets, *of, self.head)


def make_case(
    tokens: int, vocab: int, model: int, head: HeadShape, seed: int = 0, targets: int | None = None
) -> Case:
    """In fp64, drawn in fp32 so that casts to it lose nothing; with a number of `targets` tokens
    have as many.
    """
    shape = (tokens,) if targets is None else (tokens, targets)
    random = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random).double()

    return Case(
        draw(tokens, model),
        draw(vocab, model),
        torch.randint(0, head.real, shape, generator=random) + head.vocab_start,
        draw(*shape),
        draw(tokens),
        head,
    )


def plain_logits(hidden_ND: torch.Tensor, weight_VD: torch.Tensor, head: HeadShape) -> torch.Tensor:
    """All logits of the real entries, at least fp32."""
    products_NV = hidden_ND @ weight_VD[: head.real].T
    logits_NV = products_NV.to(torch.promote_types(products_NV.dtype, torch.float32)) * head.scale
    if head.softcap is not None:
        logits_NV = torch.tanh(logits_NV / head.softcap) * head.softcap
    return logits_NV / head.temperature


def plain_scores(
    hidden_ND: torch.Tensor, weight_VD: torch.Tensor, targets: torch.Tensor, head: HeadShape
) -> tuple[torch.Tensor, torch.Tensor]:
    logprobs_NV = plain_logits(hidden_ND, weight_VD, head).log_softmax(-1)
    local = targets - head.vocab_start
    entropy_N = -(logprobs_NV.exp() * logprobs_NV).sum(-1)
    if targets.ndim > 1:
        return logprobs_NV.gather(1, local), entropy_N
    return logprobs_NV.gather(1, local.unsqueeze(1)).squeeze(1), entropy_N


def differentiated(case: Case, scores: Any, entropy: bool = True) -> dict[str, torch.Tensor]:
    """Both results, and the gradients of a sum of both (of the log-probabilities alone without
    `entropy`).
    """
    hidden_ND = case.hidden_ND.clone().requires_grad_()
    weight_VD = case.weight_VD.clone().requires_grad_()
    logprobs, entropy_N = scores(hidden_ND, weight_VD, case.targets, case.head)
    total = (logprobs * case.of_logprobs).sum()
    if entropy:
        total = total + (entropy_N * case.of_entropy_N).sum()
    total.backward()
    results = {"logprobs": logprobs, "hidden": hidden_ND.grad, "weight": weight_VD.grad}
    if entropy:
        results["entropy"] = entropy_N
    return {name: value.detach() for name, value in results.items()}


def fused(chunk: int, entropy: bool = True) -> Any:
    """`fused_scores` of one rank, called as `plain_scores` is."""

    def scores(
        hidden_ND: torch.Tensor, weight_VD: torch.Tensor, targets: torch.Tensor, head: HeadShape
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return fused_scores(hidden_ND, weight_VD, targets, head, ALONE, chunk, entropy)

    return scores


def assert_close(
    got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float
) -> None:
    """Within `tolerance` of the largest of each expected tensor, or of 1."""
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert got[name].shape == value.shape, name
        if value.numel():
            bound = tolerance * max(1.0, value.abs().max().item())
            assert (got[name].double() - value.double()).abs().max().item() <= bound, name


@st.composite
def heads(draw: st.DrawFn, vocab: int) -> HeadShape:
    return HeadShape(
        vocab_start=draw(st.sampled_from([0, 7])),
        real=draw(st.integers(1, vocab)),
        scale=draw(st.sampled_from([1.0, 0.25, 3.0])),
        softcap=draw(st.sampled_from([None, 1.5, 30.0])),
        temperature=draw(st.sampled_from([1.0, 0.6, 2.0])),
    )


@st.composite
def cases(draw: st.DrawFn) -> tuple[Case, int]:
    """A case and a chunk; vocabularies on both sides of the width that tiles do not go below."""
    vocab = draw(st.one_of(st.integers(1, 40), st.integers(LEAST_WIDTH, 3 * LEAST_WIDTH)))
    head, tokens = draw(heads(vocab)), draw(st.integers(0, 40))
    targets = draw(st.sampled_from([None, 1, 2, 7]))
    case = make_case(tokens, vocab, draw(st.integers(1, 5)), head, targets=targets)
    return case, draw(st.integers(1, 50))


@pytest.mark.parametrize("dtype", TOLERANCE)
@given(cases(), st.booleans())
def test_scores_and_gradients_equal_those_of_all_logits(
    dtype: torch.dtype, drawn: tuple[Case, int], entropy: bool
) -> None:
    case, chunk = drawn
    got = differentiated(case.to(dtype), fused(chunk, entropy), entropy)
    assert_close(got, differentiated(case, plain_scores, entropy), TOLERANCE[dtype])
    assert all(value.dtype == dtype for value in got.values())


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("entropy", [False, True])
def test_what_is_done_a_strip_at_a_time_equals_what_is_done_at_once(
    softcap: float | None, entropy: bool
) -> None:
    case = make_case(700, 900, 4, HeadShape(0, 850, softcap=softcap))
    assert tiling(700, 900, 850, 700).strip < 700 / 2
    got = differentiated(case, fused(700, entropy), entropy)
    assert_close(got, differentiated(case, plain_scores, entropy), TOLERANCE[torch.float64])


@pytest.mark.parametrize("entropy", [False, True])
def test_an_entry_that_is_a_target_twice_gets_both_gradients(entropy: bool) -> None:
    case = make_case(6, 600, 3, HeadShape(0, 600), targets=2)
    # Alike, and at the edges of tiles, where the places of targets elsewhere are put as well.
    edges = torch.tensor([0, 255, 256, 511, 512, 599])
    alike = replace(case, targets=torch.stack([edges, edges], dim=1))
    once = replace(case, targets=edges, of_logprobs=case.of_logprobs.sum(1))
    assert tiling(6, 600, 600, 1).width == 256
    got, expected = (differentiated(each, fused(1, entropy), entropy) for each in (alike, once))
    assert torch.equal(got["logprobs"], expected["logprobs"].unsqueeze(1).expand(6, 2))
    for name in ("hidden", "weight"):
        torch.testing.assert_close(got[name], expected[name], rtol=0, atol=1e-12)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_bf16_is_as_near_to_exact_arithmetic_as_all_logits_in_bf16(softcap: float | None) -> None:
    head = HeadShape(0, 2000, scale=0.5, softcap=softcap, temperature=0.8)
    case = make_case(300, 2048, 64, head).to(torch.bfloat16)
    exact = differentiated(case.to(torch.float64), plain_scores)
    plain = differentiated(case, plain_scores)
    got = differentiated(case, fused(64))
    for name, value in exact.items():
        error = (got[name].double() - value).norm() / value.norm()
        plain_error = (plain[name].double() - value).norm() / value.norm()
        assert error <= 1.25 * plain_error, name
        assert error <= 2**-6, name
    assert got["logprobs"].dtype == got["entropy"].dtype == torch.float32
    assert got["hidden"].dtype == got["weight"].dtype == torch.bfloat16


def test_hidden_states_of_another_dtype_get_their_gradient_in_it() -> None:
    case = make_case(9, 11, 3, HeadShape(0, 11))
    hidden_ND = case.hidden_ND.float().requires_grad_()
    logprobs_N, _ = fused(2)(hidden_ND, case.weight_VD.bfloat16(), case.targets, case.head)
    logprobs_N.sum().backward()
    assert logprobs_N.dtype == torch.float32
    assert hidden_ND.grad is not None and hidden_ND.grad.any()


@pytest.mark.parametrize("shift", [-1e4, 1e4])
def test_logits_far_from_zero_overflow_nothing(shift: float) -> None:
    case = make_case(6, 600, 3, HeadShape(0, 600))
    hidden_ND = torch.cat([case.hidden_ND, torch.full((6, 1), shift).double()], dim=1)
    weight_VD = torch.cat([case.weight_VD, torch.ones(600, 1).double()], dim=1)
    scores = fused_scores(hidden_ND, weight_VD, case.targets, case.head, ALONE, 3, True)
    expected = plain_scores(case.hidden_ND, case.weight_VD, case.targets, case.head)
    for got, value in zip(scores, expected, strict=True):
        torch.testing.assert_close(got, value, rtol=0, atol=1e-10)


@pytest.mark.parametrize("entropy", [False, True])
def test_without_tokens_results_are_empty_and_gradients_zero(entropy: bool) -> None:
    case = make_case(0, 30, 4, HeadShape(0, 20))
    got = differentiated(case, fused(2, entropy), entropy)
    assert got["logprobs"].shape == (0,) and got["hidden"].shape == (0, 4)
    assert torch.equal(got["weight"], torch.zeros(30, 4).double())


def test_padding_entries_have_gradients_of_exactly_zero() -> None:
    case = make_case(20, 30, 4, HeadShape(0, 20))
    grad_VD = differentiated(case, fused(2))["weight"]
    assert not grad_VD[20:].any() and grad_VD[:20].all()


@pytest.mark.parametrize("needed", ["hidden", "weight"])
def test_a_gradient_that_nobody_needs_is_not_made(needed: str) -> None:
    case = make_case(12, 40, 3, HeadShape(0, 40))
    hidden_ND = case.hidden_ND.clone().requires_grad_(needed == "hidden")
    weight_VD = case.weight_VD.clone().requires_grad_(needed == "weight")
    logprobs_N, _ = fused(2, False)(hidden_ND, weight_VD, case.targets, case.head)
    with Watch() as watch:
        (logprobs_N * case.of_logprobs).sum().backward()
    products = sum(name.startswith(("aten.mm", "aten.addmm")) for name in watch.called)
    assert products == 6 + 5  # one more of 2 rows each, and the logits again but for the last
    expected = differentiated(case, plain_scores, entropy=False)[needed]
    got = {"hidden": hidden_ND, "weight": weight_VD}
    assert got.pop(needed).grad.sub(expected).abs().max() < 1e-11
    assert all(other.grad is None for other in got.values())


def test_two_backward_passes_of_one_graph_give_the_same_gradients() -> None:
    case = make_case(12, 40, 3, HeadShape(0, 40))
    hidden_ND = case.hidden_ND.clone().requires_grad_()
    logprobs_N, _ = fused(12, False)(hidden_ND, case.weight_VD, case.targets, case.head)
    total = (logprobs_N * case.of_logprobs).sum()
    first, second = (torch.autograd.grad(total, hidden_ND, retain_graph=True)[0] for _ in "12")
    assert torch.equal(first, second)


def test_a_loss_of_the_entropy_alone_is_differentiated() -> None:
    case = make_case(12, 40, 3, HeadShape(0, 40))
    grads = []
    for scores in (plain_scores, fused(2)):
        hidden_ND = case.hidden_ND.clone().requires_grad_()
        _, entropy_N = scores(hidden_ND, case.weight_VD, case.targets, case.head)
        entropy_N.sum().backward()
        grads.append(hidden_ND.grad)
    torch.testing.assert_close(grads[1], grads[0], rtol=0, atol=1e-11)


class Watch(TorchDispatchMode):
    """Names of the operators called, and elements of the largest tensor that one of them made;
    views of `given` are left out.
    """

    def __init__(self, given: torch.Tensor | None = None) -> None:
        super().__init__()
        self.called: list[str] = []
        self.largest = 0
        self.given = None if given is None else given.untyped_storage().data_ptr()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.called.append(str(func))
        for value in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                if storage.data_ptr() != self.given:
                    self.largest = max(self.largest, storage.nbytes() // value.element_size())
        return result


WATCHED = make_case(256, 1000, 2, HeadShape(0, 990, softcap=5.0), targets=3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk", [4, 60])
def test_no_tensor_is_larger_than_chunk_times_vocabulary(dtype: torch.dtype, chunk: int) -> None:
    case = WATCHED.to(dtype)
    with Watch() as watch:
        differentiated(case, fused(chunk))
        fused_topk(case.hidden_ND, case.weight_VD, 5, case.head, ALONE, chunk)
    assert 0.9 * chunk * 1000 < watch.largest <= chunk * 1000


def test_the_watch_sees_logits_where_they_are_made() -> None:
    with Watch() as watch:
        differentiated(WATCHED, plain_scores)
    assert watch.largest >= 256 * 990


@given(
    tokens=st.integers(0, 1500),
    vocab=st.integers(1, 1500),
    missing=st.sampled_from([0, 1, 100, 1500]),
    chunk=st.integers(1, 1500),
)
def test_tiles_cover_every_logit_once_and_are_never_too_large(
    tokens: int, vocab: int, missing: int, chunk: int
) -> None:
    real = max(0, vocab - missing)
    plan = tiling(tokens, vocab, real, chunk)
    seen = torch.zeros(tokens, real, dtype=torch.int8)
    for column in plan.columns():
        for tile in column:
            assert tile.entries == column[0].entries
            part = seen[tile.rows, tile.entries]
            assert 0 < part.numel() <= chunk * vocab
            for rows, inside in plan.strips(tile):
                assert part[inside].data_ptr() == seen[rows, tile.entries].data_ptr()
                seen[rows, tile.entries] += 1
        if tokens * LEAST_WIDTH <= chunk * vocab:
            assert len(column) == min(tokens, 1)
    assert (seen == 1).all()


@given(cases(), st.data())
def test_topk_is_that_of_all_logits(drawn: tuple[Case, int], data: st.DataObject) -> None:
    case, chunk = drawn
    case = case.to(torch.float32)
    k = data.draw(st.integers(1, case.head.real))
    values_NK, indices_NK = fused_topk(case.hidden_ND, case.weight_VD, k, case.head, ALONE, chunk)
    logits_NV = plain_logits(case.hidden_ND, case.weight_VD, case.head)
    expected_NK = logits_NV.topk(k).values
    assert values_NK.dtype == torch.float32 and indices_NK.dtype == torch.int64
    torch.testing.assert_close(values_NK, expected_NK, rtol=1e-5, atol=1e-5)
    picked_NK = logits_NV.gather(1, indices_NK - case.head.vocab_start)
    torch.testing.assert_close(picked_NK, values_NK, rtol=1e-5, atol=1e-5)
    assert all(len({*row}) == k for row in indices_NK.tolist())


@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize("k", [1, 10, 900])
def test_of_equal_logits_the_lowest_entry_comes_first(k: int, chunk: int) -> None:
    random = torch.Generator().manual_seed(0)
    hidden_ND = torch.randint(-2, 3, (20, 2), generator=random).float()
    weight_VD = torch.randint(-2, 3, (900, 2), generator=random).float()
    values_NK, indices_NK = fused_topk(hidden_ND, weight_VD, k, HeadShape(0, 900), ALONE, chunk)
    sorted_NV = (hidden_ND @ weight_VD.T).sort(dim=-1, descending=True, stable=True)
    assert torch.equal(values_NK, sorted_NV.values[:, :k])
    assert torch.equal(indices_NK, sorted_NV.indices[:, :k])


def test_negative_zero_is_no_less_than_zero() -> None:
    weight_VD = torch.tensor([[-1e-20], [1e-20], [-1e-20], [1e-20], [1.0]])
    head = HeadShape(0, 5, scale=1e-30)  # all but the last underflow
    _, indices_NK = fused_topk(torch.ones(1, 1), weight_VD, 5, head, ALONE, chunk=1)
    assert indices_NK.tolist() == [[4, 0, 1, 2, 3]]
