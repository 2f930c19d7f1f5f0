"""The head's kernels, interpreted on the CPU: against the same work in torch and exact arithmetic.

Shapes: N tokens, V entries of the slice, R rows and W entries of a tile, D model, K targets.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_policy.lm_head import tile_work as choice
from megatron_policy.lm_head.filters import Filters
from megatron_policy.lm_head.fused import HeadShape, fused_scores
from megatron_policy.lm_head.fused_tiles import Known, Sums, Tiling, VocabTile, tiling
from megatron_policy.lm_head.tile_work import (
    Implementation,
    TileWork,
    choose_implementation,
    tile_work,
)
from tests.pure.test_fused import (
    ALONE,
    Case,
    assert_close,
    differentiated,
    fused,
    make_case,
    plain_scores,
)

NO_TRITON = importlib.util.find_spec("triton") is None
NOT_INSTALLED = "Triton is not installed: torch's CUDA builds bring it"
NOT_INTERPRETED = "needs TRITON_INTERPRET=1, which make test-latest sets where there is no GPU"
needs_triton = pytest.mark.skipif(NO_TRITON, reason=NOT_INSTALLED)
interpreted = pytest.mark.skipif(
    NO_TRITON or os.environ.get("TRITON_INTERPRET") != "1",
    reason=NOT_INSTALLED if NO_TRITON else NOT_INTERPRETED,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HEADS = {
    "plain": HeadShape(0, 0),
    "warm": HeadShape(1000, 0, scale=0.5, temperature=1.7),
    "capped": HeadShape(7, 0, scale=3.0, softcap=2.0, temperature=0.6),
}


@dataclass(frozen=True)
class Tile:
    """A tile in the middle of a grid, what is known of its tokens, and its products in fp64."""

    plan: Tiling
    where: VocabTile
    head: HeadShape
    product_RW: torch.Tensor
    known: Known

    def work(self, implementation: Implementation, product_RW: torch.Tensor) -> TileWork:
        return tile_work(implementation, self.plan, self.head, product_RW, entropy=True)


def logits_of(product_RW: torch.Tensor, head: HeadShape) -> torch.Tensor:
    logits_RW = product_RW * head.scale
    if head.softcap is not None:
        logits_RW = torch.tanh(logits_RW / head.softcap) * head.softcap
    return logits_RW / head.temperature


def make_tile(
    width: int, head: HeadShape, dtype: torch.dtype, targets: int, device: str = "cpu"
) -> Tile:
    """Of 5 rows, which `dtype` represents; one of them has its peak at its end. Targets repeat,
    stand at both ends of the tile, next to it, and in other ranks' slices.
    """
    random = torch.Generator().manual_seed(width + targets)
    rows, start, tokens = 5, 300, 9
    where = VocabTile(slice(2, 2 + rows), slice(start, start + width))
    product_RW = torch.randn(rows, width, generator=random) * 2
    product_RW[0, -1] = product_RW[0].max() + 1
    product_RW = product_RW.to(dtype).double()
    ends = torch.tensor([start, start + width - 1, start - 1, start + width, -5, 10**6, start])
    anywhere_NK = torch.randint(start, start + width, (tokens, targets), generator=random)
    picked_NK = ends[torch.randint(len(ends), (tokens, targets), generator=random)]
    local_NK = torch.where(
        torch.rand(tokens, targets, generator=random) < 0.5, picked_NK, anywhere_NK
    )
    of_tokens = torch.randn(3, tokens, generator=random)
    head = replace(head, real=10**5)
    normaliser_N = of_tokens[0].abs()  # other tiles add to it
    normaliser_N[where.rows] += logits_of(product_RW, head).logsumexp(-1)
    known = Known(
        normaliser_N=normaliser_N,
        local_NK=local_NK,
        grad_logprobs_NK=torch.randn(tokens, targets, generator=random),
        entropy_N=of_tokens[1].abs(),
        grad_entropy_N=of_tokens[2],
    )
    known = Known(*(getattr(known, name).to(device) for name in Known.__dataclass_fields__))
    plan = Tiling(tokens, 10**5, rows, width, 2)
    return Tile(plan, where, head, product_RW.to(device), known)


def exact_sums(tile: Tile) -> dict[str, torch.Tensor]:
    logits_RW = logits_of(tile.product_RW, tile.head)
    local_RK = tile.known.local_NK[tile.where.rows]
    peak_R = logits_RW.amax(-1)
    below_RW = logits_RW - peak_R.unsqueeze(1)
    index_RK, here_RK = choice._locate_targets(local_RK, tile.where)
    return {
        "peak": peak_R,
        "total": below_RW.exp().sum(-1),
        "moment": (below_RW.exp() * below_RW).sum(-1),
        "target": logits_RW.gather(1, index_RK) * here_RK,
    }


def exact_gradient(tile: Tile, entropy: bool) -> torch.Tensor:
    """From the slopes of the results in the logits, by autograd to the products."""
    products_RW = tile.product_RW.clone().requires_grad_()
    logits_RW = logits_of(products_RW, tile.head)
    rows, known = tile.where.rows, tile.known
    normaliser_R1 = known.normaliser_N[rows].double().unsqueeze(1)
    logprob_RW = (logits_RW - normaliser_R1).detach()
    grad_RK = known.grad_logprobs_NK[rows].double()
    # d log p(target) / d logit j = (j is the target) - p(j); d H / d logit j = -p(j) (log p(j) + H)
    slopes_RW = -logprob_RW.exp() * grad_RK.sum(1, keepdim=True)
    index_RK, here_RK = choice._locate_targets(known.local_NK[rows], tile.where)
    slopes_RW.scatter_add_(1, index_RK, grad_RK * here_RK)
    if entropy:
        of_entropy_R1 = known.grad_entropy_N[rows].double().unsqueeze(1)
        entropy_R1 = known.entropy_N[rows].double().unsqueeze(1)
        slopes_RW -= of_entropy_R1 * logprob_RW.exp() * (logprob_RW + entropy_R1)
    (logits_RW * slopes_RW).sum().backward()
    assert products_RW.grad is not None
    return products_RW.grad


def check_sums(tile: Tile, dtype: torch.dtype, entropy: bool) -> None:
    """The tile is added to sums that hold one other tile, in which all logits are 1 higher."""
    product_RW, rows = tile.product_RW.to(dtype), tile.where.rows
    expected, device = exact_sums(tile), product_RW.device
    for shift in (-1.0, 1.0):  # the other tile's peak is lower, or higher
        sums = Sums.of_nothing(tile.known.local_NK, torch.float32, device)
        sums.peak_N[rows] = expected["peak"].float() + shift
        sums.sums_MN[0, rows] = 2.0
        sums.sums_MN[1, rows] = -3.0
        untouched = [sums.peak_N.clone(), sums.sums_MN.clone()]
        tile.work("triton", product_RW).add_logits(
            product_RW, tile.where, sums, tile.known.local_NK, entropy
        )
        other = torch.tensor(shift).exp().item()  # its sums at the lower peak
        peak_R = torch.maximum(expected["peak"], expected["peak"] + shift)
        fall_R = expected["peak"] - peak_R
        total_R = (2.0 * other + expected["total"]) * fall_R.exp()
        own_R = expected["moment"] + fall_R * expected["total"]
        before_R = shift + fall_R
        moment_R = own_R * fall_R.exp() + (-3.0 + before_R * 2.0) * other * fall_R.exp()
        found = {"peak": peak_R, "total": total_R, "target": expected["target"]}
        got = {"peak": sums.peak_N[rows], "total": sums.total_N[rows]}
        got["target"] = sums.target_NK[rows]
        if entropy:
            found["moment"], got["moment"] = moment_R, sums.moment_N[rows]
        assert_close(got, found, 5e-6)
        for before, after in zip(untouched, [sums.peak_N, sums.sums_MN], strict=True):
            assert torch.equal(before[..., :2], after[..., :2])
            assert torch.equal(before[..., 7:], after[..., 7:])


def check_gradient(tile: Tile, dtype: torch.dtype, entropy: bool) -> None:
    """Each element is the exact one, rounded once to the dtype of the products."""
    known = tile.known if entropy else replace(tile.known, grad_entropy_N=None, entropy_N=None)
    expected_RW = exact_gradient(tile, entropy)
    # The interpreter cuts bf16 off where a GPU rounds: one unit in the last place, not a half.
    unit = max(torch.finfo(dtype).eps, 4e-6)
    for implementation in ("torch", "triton"):
        product_RW = tile.product_RW.to(dtype)
        tile.work(implementation, product_RW).to_gradient(product_RW, tile.where, known)
        error_RW = (product_RW.double() - expected_RW).abs()
        scale_R1 = known.grad_logprobs_NK[tile.where.rows].abs().sum(1, keepdim=True) + 1
        smallest = torch.finfo(dtype).tiny * torch.finfo(dtype).eps  # a subnormal number
        bound_RW = unit * expected_RW.abs() + 2e-6 * scale_R1 + smallest
        assert (error_RW <= bound_RW).all(), implementation


@interpreted
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_do_on_a_tile_what_exact_arithmetic_does(
    dtype: torch.dtype, name: str, entropy: bool
) -> None:
    # One is wider than a block, and one has more targets than are looked up at once.
    for width, targets in ((1, 1), (257, 1), (4099, 3), (40, 150)):
        tile = make_tile(width, HEADS[name], dtype, targets)
        check_sums(tile, dtype, entropy)
        check_gradient(tile, dtype, entropy)


@interpreted
def test_softcaps_are_within_a_few_units_in_the_last_place() -> None:
    width, head = 401, HeadShape(0, 401, softcap=2.0)
    product_1W = torch.linspace(-3, 3, width).unsqueeze(0) ** 3  # many of them near 0
    everything_1K = torch.arange(width).unsqueeze(0)
    sums = Sums.of_nothing(everything_1K, torch.float32, product_1W.device)
    tile = VocabTile(slice(0, 1), slice(0, width))
    work = tile_work("triton", tiling(1, width, width, 1), head, product_1W, False)
    work.add_logits(product_1W, tile, sums, everything_1K, False)
    expected_1W = logits_of(product_1W.double(), head)
    error_1W = (sums.target_NK.double() - expected_1W).abs()
    assert (error_1W <= 4 * torch.finfo(torch.float32).eps * expected_1W.abs()).all()


def in_triton(case: Case, chunk: int, entropy: bool) -> dict[str, torch.Tensor]:
    def scores(*args: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        return fused_scores(*args, ALONE, chunk, entropy, implementation="triton")

    return differentiated(case, scores, entropy)


CASES = {
    "odd vocabulary": (make_case(7, 37, 3, HeadShape(0, 31)), 2),
    "several targets": (make_case(6, 700, 5, HeadShape(7, 650, temperature=0.7), targets=3), 3),
    "softcap": (make_case(5, 300, 4, HeadShape(0, 300, scale=0.25, softcap=1.5), targets=1), 2),
    "one tile": (make_case(3, 5003, 4, HeadShape(0, 4999, scale=2.0, temperature=2.0)), 3),
}


@interpreted
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_scores_and_gradients_of_kernels_are_exact_in_fp32(name: str, entropy: bool) -> None:
    case, chunk = CASES[name]
    got = in_triton(case.to(torch.float32), chunk, entropy)
    assert_close(got, differentiated(case, plain_scores, entropy), 1e-5)


@interpreted
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_kernels_and_torch_agree_in_half_precision(dtype: torch.dtype, name: str) -> None:
    case, chunk = CASES[name]
    case = case.to(dtype)
    got, expected = in_triton(case, chunk, True), differentiated(case, fused(chunk))
    exact = differentiated(case.to(torch.float64), plain_scores)
    for key, value in expected.items():
        assert got[key].dtype == value.dtype and got[key].shape == value.shape
        if value.dtype == torch.float32:  # from the same products
            torch.testing.assert_close(got[key], value, rtol=1e-5, atol=1e-5)
            continue
        for reference in (value.double(), exact[key]):
            difference = (got[key].double() - reference).norm() / reference.norm()
            assert difference <= 4 * torch.finfo(dtype).eps, key


@interpreted
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_do_nothing_without_tokens_or_entries(dtype: torch.dtype, entropy: bool) -> None:
    got = in_triton(make_case(0, 30, 4, HeadShape(0, 20)).to(dtype), 2, entropy)
    assert got["logprobs"].shape == (0,) and got["hidden"].shape == (0, 4)
    assert torch.equal(got["weight"], torch.zeros(30, 4, dtype=dtype))
    nothing = replace(make_case(3, 30, 4, HeadShape(0, 20)), head=HeadShape(90, 0)).to(dtype)
    got = in_triton(nothing, 2, entropy)
    assert not got["hidden"].any() and not got["weight"].any()


@interpreted
def test_logits_that_are_not_numbers_reach_the_scores() -> None:
    case = make_case(4, 300, 2, HeadShape(0, 300)).to(torch.float32)
    for bad in (float("nan"), float("inf")):
        case.hidden_ND[1] = bad
        logprobs_N, entropy_N = fused_scores(
            case.hidden_ND, case.weight_VD, case.targets, case.head, ALONE, 2, True, "triton"
        )
        assert logprobs_N.isnan().tolist() == [False, True, False, False]
        assert entropy_N is not None and entropy_N.isnan().tolist() == [False, True, False, False]


@interpreted
def test_gradients_that_are_views_of_one_number_are_read_as_what_they_show() -> None:
    case = make_case(6, 40, 3, HeadShape(0, 40), targets=2).to(torch.float32)
    case = replace(case, targets=case.targets.t().contiguous().t())
    grads = []
    for implementation in ("torch", "triton"):
        hidden_ND = case.hidden_ND.clone().requires_grad_()
        logprobs_NK, entropy_N = fused_scores(
            hidden_ND, case.weight_VD, case.targets, case.head, ALONE, 3, True, implementation
        )
        assert entropy_N is not None
        (logprobs_NK.sum() + entropy_N.sum()).backward()
        grads.append(hidden_ND.grad)
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-5, atol=1e-5)


@needs_triton
def test_kernels_are_known_to_fake_tensors() -> None:
    with FakeTensorMode():
        hidden_ND = torch.randn(20, 4, requires_grad=True)
        weight_VD = torch.randn(600, 4, requires_grad=True)
        targets_N, head = torch.zeros(20, dtype=torch.long), HeadShape(0, 590)
        logprobs_N, entropy_N = fused_scores(
            hidden_ND, weight_VD, targets_N, head, ALONE, 4, True, "triton"
        )
        assert entropy_N is not None
        (logprobs_N + entropy_N).sum().backward()
        assert hidden_ND.grad is not None and weight_VD.grad is not None
        assert hidden_ND.grad.shape == (20, 4) and weight_VD.grad.shape == (600, 4)


# Not counted: matrix products, memory that nobody touches yet, and K logits of a token.
ELSEWHERE = ("aten::mm", "aten::addmm", "aten::empty", "aten::gather", "aten::scatter_add_")


class Traffic(TorchDispatchMode):
    """Bytes that elementwise operators read and write of tensors of one tile's size, and how often
    each operator was called.
    """

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.elements, self.bytes = elements, 0
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.calls[func._schema.name] += 1
        if func.is_view or func._schema.name in ELSEWHERE:
            return result
        arguments = func._schema.arguments
        given = {each.name: value for each, value in zip(arguments, args, strict=False)} | kwargs
        for each in arguments:
            written = each.alias_info is not None and each.alias_info.is_write
            only_written = each.is_out or (func._schema.name == "aten::copy_" and written)
            self.bytes += self._size(given.get(each.name)) * (written + (not only_written))
        if not any(each.alias_info is not None for each in func._schema.returns):
            results = result if isinstance(result, (tuple, list)) else [result]
            self.bytes += sum(map(self._size, results))
        return result

    def _size(self, value: Any) -> int:
        if not isinstance(value, torch.Tensor) or value.numel() != self.elements:
            return 0
        return value.nbytes


# Bytes per logit in bf16 that docs/benchmarks.md states, forward and backward.
MOVED = {
    ("torch", False, 1.0): (30, 36),
    ("torch", True, 1.0): (46, 64),
    ("torch", False, 0.7): (38, 44),
    ("triton", False, 1.0): (2, 4),
    ("triton", True, 0.7): (2, 4),
}


@interpreted
@pytest.mark.parametrize(("implementation", "entropy", "temperature"), MOVED)
def test_bytes_moved_per_logit_are_those_of_the_documentation(
    implementation: Implementation, entropy: bool, temperature: float
) -> None:
    case = make_case(8, 600, 4, HeadShape(0, 600, temperature=temperature)).to(torch.bfloat16)
    hidden_ND = case.hidden_ND.requires_grad_()
    plan = tiling(8, 600, 600, 8)
    assert (plan.height, plan.width, plan.strip) == (8, 600, 8)
    with Traffic(8 * 600) as forward:
        logprobs_N, entropy_N = fused_scores(
            hidden_ND, case.weight_VD, case.targets, case.head, ALONE, 8, entropy, implementation
        )
    total = logprobs_N.sum() + (entropy_N.sum() if entropy_N is not None else 0)
    with Traffic(8 * 600) as backward:
        total.backward()
    moved = tuple(traffic.bytes / (8 * 600) for traffic in (forward, backward))
    assert moved == MOVED[implementation, entropy, temperature]
    kernels = int(implementation == "triton")
    assert forward.calls["megatron_policy::add_logits"] == kernels
    assert backward.calls["megatron_policy::to_gradient"] == kernels


@needs_triton
def test_kernels_compile_for_gpus_to_wide_loads_and_stores(tmp_path: Path) -> None:
    """Without a GPU: Triton brings the assembler. Reads and writes of products take 16 bytes."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    program = [sys.executable, "-m", "tests.compile_kernels"]
    root = Path(__file__).parents[2]
    done = subprocess.run(
        program, env=environment, cwd=root, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) == 12
    for kernel, _, _, loads, stores in lines:
        assert int(loads) > 0
        assert (int(stores) > 0) == (kernel == "to_gradient_kernel")


def test_kernels_are_chosen_for_the_dtypes_they_know_where_they_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights = {dtype: torch.empty(2, 2, dtype=dtype) for dtype in (*DTYPES, torch.float64)}
    head = HeadShape(0, 2)
    assert {choose_implementation(weight, head) for weight in weights.values()} == {"torch"}
    monkeypatch.setattr(choice, "runs_triton", lambda tensor: True)
    assert {
        dtype for dtype in weights if choose_implementation(weights[dtype], head) == "triton"
    } == {*DTYPES}
    filtered = replace(head, filters=Filters(top_k=1))
    assert {choose_implementation(weight, filtered) for weight in weights.values()} == {"torch"}
