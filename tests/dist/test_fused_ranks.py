"""Log-probabilities, entropies and top-k of a head whose vocabulary is split between ranks, against
plain torch on all of it.

Shapes: N tokens, V entries of all slices, D model.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_policy.device.process_groups import join_process_group
from megatron_policy.lm_head import logprobs
from megatron_policy.lm_head.filters import Filters
from megatron_policy.lm_head.fused import HeadShape, fused_scores, fused_topk
from megatron_policy.lm_head.tile_work import Implementation
from tests.exact import Exact, assert_equal
from tests.pure.test_fused import (
    Case,
    Watch,
    assert_close,
    differentiated,
    make_case,
    plain_logits,
    plain_scores,
)
from tests.unit.test_filters import (
    ALL,
    finite,
    plain_filtered_scores,
    plain_kept,
    with_likely_targets,
)
from tests.unit.test_triton_tiles import interpreted

MODEL = 6
HEADS = (HeadShape(0, 0), HeadShape(0, 0, scale=0.5, softcap=3.0, temperature=1.7))
# Entries with padding, and real ones: of the second the last rank of two, and the last two of four,
# have none.
VOCABULARIES = ((1200, 1190), (1200, 550))


def whole_case(
    tokens: int, vocab: int, real: int, head: HeadShape = HEADS[0], targets: int | None = None
) -> Case:
    return make_case(tokens, vocab, MODEL, replace(head, real=real), targets=targets)


def whole_numbers(case: Case) -> Case:
    """No sum is rounded, and many logits are equal."""
    case = case.to(torch.float32)
    return replace(case, hidden_ND=case.hidden_ND.round(), weight_VD=case.weight_VD.round())


def join_all() -> dist.ProcessGroup:
    join_process_group(600.0)
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def own_slice(case: Case, group: dist.ProcessGroup) -> tuple[slice, HeadShape]:
    width = case.weight_VD.size(0) // group.size()
    start = group.rank() * width
    real = max(0, min(case.head.real - start, width))
    return slice(start, start + width), replace(case.head, vocab_start=start, real=real)


def scores_of_rank(
    cases: list[Case], chunk: int, entropy: bool, implementation: Implementation = "torch"
) -> list[tuple[dict[str, torch.Tensor], list[str]]]:
    """Of each case, results and gradients of this rank's slice, and the collectives they took."""
    group = join_all()
    found = []
    for case in cases:
        mine, head = own_slice(case, group)
        local = replace(case, weight_VD=case.weight_VD[mine], head=head)
        with Watch() as watch:
            scores = finite(partial(fused, group, chunk, entropy, implementation))
            results = differentiated(local, scores, entropy)
        found.append((results, [name for name in watch.called if name.startswith("c10d")]))
    return found


def fused(
    group: dist.ProcessGroup,
    chunk: int,
    entropy: bool,
    implementation: Implementation,
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    targets: torch.Tensor,
    head: HeadShape,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    return fused_scores(hidden_ND, weight_VD, targets, head, group, chunk, entropy, implementation)


def joined(parts: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """What the ranks hold together: their shares of the hidden states' gradient add up."""
    for part in parts[1:]:
        for name in part.keys() - {"hidden", "weight"}:
            assert torch.equal(part[name], parts[0][name]), name
    whole = {
        "hidden": torch.stack([part["hidden"] for part in parts]).sum(0),
        "weight": torch.cat([part["weight"] for part in parts]),
    }
    return parts[0] | whole


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("world", [2, 4])
def test_split_vocabularies_give_the_scores_and_gradients_of_the_whole_and_of_what_is_kept(
    ranks, world: int, entropy: bool
) -> None:
    whole = [
        whole_case(33, *sizes, head, targets)
        for sizes in VOCABULARIES
        for head in HEADS
        for targets in (None, 9)  # of which every rank that has real entries has some
    ]
    # All on two ranks; each step of a search is a collective, of which four ranks make fewer.
    chosen = ALL.values() if world == 2 else [ALL["all three"]]
    kept = [
        with_likely_targets(whole_case(15, *sizes, replace(head, filters=filters), targets))
        for filters in chosen
        for sizes in (VOCABULARIES if filters is ALL["all three"] else VOCABULARIES[1:])
        for head, targets in zip(HEADS, (None, 9), strict=True)
    ]
    for cases, chunk, plain in ((whole, 5, plain_scores), (kept, 8, finite(plain_filtered_scores))):
        found = ranks.run(world, scores_of_rank, cases, chunk, entropy)
        for case, of_ranks in zip(cases, zip(*found, strict=True), strict=True):
            got = joined([results for results, _ in of_ranks])
            assert_close(got, differentiated(case, plain, entropy), 1e-11)


def kept_by_rank(case: Case, chunk: int) -> torch.Tensor:
    """Which entries of this rank's slice have a finite log-probability."""
    group = join_all()
    mine, head = own_slice(case, group)
    every_NV = torch.arange(case.head.real).expand(len(case.hidden_ND), -1)
    scores = fused_scores(case.hidden_ND, case.weight_VD[mine], every_NV, head, group, chunk)
    return scores[0].isfinite()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_logits_on_several_ranks_are_kept_from_the_highest_entry_down(ranks, dtype) -> None:
    for name, filters in (ALL | {"many": Filters(top_p=0.97)}).items():
        case = whole_numbers(whole_case(9, 1200, 550, HeadShape(0, 0, filters=filters)))
        logits_NV = plain_logits(case.hidden_ND, case.weight_VD, case.head)
        expected_NV = plain_kept(logits_NV, filters)
        least_N1 = logits_NV.masked_fill(~expected_NV, torch.inf).amin(-1, keepdim=True)
        divided_N = ((logits_NV == least_N1) & ~expected_NV).any(-1)
        assert divided_N.any() or filters.top_p == 1 or name == "hardly any"
        for world in (2, 4) if name == "many" else (2,):
            for kept_NV in ranks.run(world, kept_by_rank, case.to(dtype), 5):
                assert torch.equal(kept_NV, expected_NV), name


@interpreted
@pytest.mark.parametrize("world", [2, 4])
def test_kernels_give_the_scores_and_gradients_of_the_whole_too(ranks, world: int) -> None:
    cases = [whole_case(7, *VOCABULARIES[1], head, k) for head in HEADS for k in (None, 5)]
    rounded = [case.to(torch.float32) for case in cases]
    found = ranks.run(world, scores_of_rank, rounded, 5, True, "triton")
    for case, of_ranks in zip(cases, zip(*found, strict=True), strict=True):
        got = joined([results for results, _ in of_ranks])
        assert_close(got, differentiated(case, plain_scores), 1e-5)
        for results, collectives in of_ranks:
            assert results["logprobs"].shape == case.targets.shape
            assert [name.split(".")[1] for name in collectives] == ["allreduce_"] * 2


def test_split_vocabularies_are_exact_in_fp32(ranks) -> None:
    case = whole_case(33, 1200, 1190)
    found = ranks.run(2, scores_of_rank, [case.to(torch.float32)], 5, True)
    rounded = differentiated(case.to(torch.float32), plain_scores)
    got = joined([results for ((results, _),) in found])
    for name, exact in differentiated(case, plain_scores).items():
        assert_equal(f"{name} of the head", got[name], Exact.between(rounded[name], exact))


def test_ranks_talk_twice_however_many_tokens_and_tiles_there_are(ranks) -> None:
    cases = [whole_case(n, 1200, 550, targets=k) for n in (0, 1, 33) for k in (None, 4)]
    for found in ranks.run(2, scores_of_rank, cases, 1, True):
        for case, (results, collectives) in zip(cases, found, strict=True):
            assert [name.split(".")[1] for name in collectives] == ["allreduce_"] * 2
            assert results["logprobs"].shape == case.targets.shape
        assert not found[0][0]["weight"].any()


def topk_of_rank(case: Case, k: int, chunk: int) -> tuple[torch.Tensor, torch.Tensor]:
    group = join_all()
    mine, head = own_slice(case, group)
    return fused_topk(case.hidden_ND, case.weight_VD[mine], k, head, group, chunk)


@pytest.mark.parametrize("k", [1, 40, 550])
@pytest.mark.parametrize("tokens", [0, 33])
def test_topk_of_split_vocabularies_is_that_of_the_whole_with_ties_in_order(
    ranks, tokens: int, k: int
) -> None:
    case = whole_numbers(whole_case(tokens, 1200, 550))
    logits_NV = plain_logits(case.hidden_ND, case.weight_VD, case.head)
    expected = logits_NV.sort(dim=-1, descending=True, stable=True)
    for world in (2, 4):
        for values_NK, indices_NK in ranks.run(world, topk_of_rank, case, k, 3):
            assert torch.equal(values_NK, expected.values[:, :k])
            assert torch.equal(indices_NK, expected.indices[:, :k])


def gathered(shape: tuple[int, ...], at_once: int) -> tuple[bool, int]:
    """Whether slices of logits are gathered in the order of the vocabulary, and their gradient is
    this rank's slice; the number of collectives.
    """
    group = join_all()
    whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
    width = shape[-1] // group.size()
    own = slice(group.rank() * width, (group.rank() + 1) * width)
    logits = whole[..., own].clone().requires_grad_()
    calls = mock.Mock(side_effect=dist.all_gather_into_tensor)
    with (
        mock.patch.multiple(logprobs, _GATHERED=at_once),
        mock.patch.object(dist, "all_gather_into_tensor", calls),
    ):
        found = logprobs.gather_vocab(logits, group)
    (gradient,) = torch.autograd.grad((found * whole).sum(), logits)
    return torch.equal(found, whole) and torch.equal(gradient, whole[..., own]), calls.call_count


def test_logits_are_gathered_some_positions_at_a_time(ranks) -> None:
    for at_once, calls in ((2**24, 1), (3 * 24, 5), (1, 14)):
        assert ranks.run(4, gathered, (2, 7, 24), at_once) == [(True, calls)] * 4
    assert ranks.run(2, gathered, (0, 7, 24), 100) == [(True, 0)] * 2
