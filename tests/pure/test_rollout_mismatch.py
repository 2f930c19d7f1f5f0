"""Log-probabilities of training against those of rollouts: plain arithmetic, parts that add up,
what cannot be compared, and what of it a record and a report have.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_policy.batch import BatchedDataDict
from megatron_policy.config import RolloutMismatchConfig
from megatron_policy.converters.architecture import ScalarHead
from megatron_policy.errors import BatchError
from megatron_policy.lm_head.rollout_mismatch import (
    RolloutMismatch,
    compare_rollouts,
    join_parts,
    make_empty_part,
    measure_part,
)
from megatron_policy.monitoring.metrics_log import MetricsLog
from megatron_policy.monitoring.report import PolicyReport
from megatron_policy.training.results import TrainResult
from megatron_policy.training.rollout_mismatch import (
    check_rollouts,
    join_on_host,
)
from tests.pure.test_metrics_log import RESULT, Kept, memory

ROWS, LENGTH = 5, 70
Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def rows(seed: int = 0, distance: float = 0.2) -> Rows:
    """Log-probabilities of both, and a mask with a row of nothing and weights beside 1."""
    random = torch.Generator().manual_seed(seed)
    train_BS = -3 * torch.rand(ROWS, LENGTH, generator=random)
    rollout_BS = train_BS + distance * torch.randn(ROWS, LENGTH, generator=random)
    mask_BS = torch.rand(ROWS, LENGTH, generator=random) < 0.6
    mask_BS[2] = False
    weighted_BS = mask_BS * torch.tensor([1.0, 0.5]).repeat(LENGTH // 2)
    return train_BS, rollout_BS, weighted_BS


def pairs(of: Rows) -> list[tuple[int, float, float]]:
    """The position and both log-probabilities of every token that counts, one after another."""
    train_BS, rollout_BS, mask_BS = of
    return [
        (s, train_BS[b, s].item(), rollout_BS[b, s].item()) for b, s in mask_BS.nonzero().tolist()
    ]


def test_numbers_are_those_of_a_loop_over_tokens() -> None:
    """1e-6: fp32 differences."""
    found = compare_rollouts(*rows(), bound=0.3, by_position=True)
    tokens = pairs(rows())
    distances = [abs(train - rollout) for _, train, rollout in tokens]
    ratios = [math.exp(train - rollout) for _, train, rollout in tokens]
    assert (found.tokens, found.not_finite) == (len(tokens), 0)
    assert found.abs_diff == pytest.approx(sum(distances) / len(tokens), rel=1e-6)
    assert found.abs_diff_max == pytest.approx(max(distances), rel=1e-6)
    kl = sum(ratio - 1 - math.log(ratio) for ratio in ratios) / len(tokens)
    assert found.kl == pytest.approx(kl, rel=1e-5)
    assert found.share_beyond == sum(each > 0.3 for each in distances) / len(tokens)
    assert list(found.by_position) == [0, 2, 4, 8, 16, 32, 64]
    for first, mean in found.by_position.items():
        own = [
            distance
            for (s, *_), distance in zip(tokens, distances, strict=True)
            if (s >= first and s < 2 * first) or (first == 0 and s < 2)
        ]
        assert mean == pytest.approx(sum(own) / len(own), rel=1e-6)


def test_the_divergence_of_close_distributions_is_not_rounded_away() -> None:
    """Half the square of a small difference, which in fp32 1 plus it would swallow."""
    train_BS = torch.zeros(2, 8)
    for small in (1e-3, 1e-5):
        found = compare_rollouts(train_BS + small, train_BS, torch.ones(2, 8))
        assert found.kl == pytest.approx(small**2 / 2, rel=0.02)


def test_one_absurd_token_does_not_leave_the_range_of_numbers() -> None:
    """Engines have -9999 for what they do not know: the hosts cut logarithms of ratios to 20."""
    rollout_BS = torch.tensor([[-1.0, -9999.0]])
    found = compare_rollouts(torch.tensor([[-1.0, -1.0]]), rollout_BS, torch.ones(1, 2))
    assert found.kl == pytest.approx((math.exp(20) - 21) / 2, rel=1e-5)
    assert (found.abs_diff_max, found.abs_diff, found.share_beyond) == (9998.0, 4999.0, 0.5)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("side", [0, 1])
def test_what_is_not_finite_is_counted_and_in_no_mean(value: float, side: int) -> None:
    of = rows()
    b, s = of[2].nonzero()[7].tolist()
    without = compare_rollouts(
        of[0], of[1], of[2].index_put((torch.tensor(b), torch.tensor(s)), torch.tensor(0.0))
    )
    of[side][b, s] = value
    of[side][2] = value  # where nothing counts
    found = compare_rollouts(*of)
    assert (found.not_finite, found.tokens) == (1, without.tokens)
    assert found.metrics()["train_rollout_not_finite"] == 1
    for name in ("abs_diff", "abs_diff_max", "kl"):
        assert getattr(found, name) == getattr(without, name) and math.isfinite(found.kl or 0)
    beyond = round((without.share_beyond or 0) * without.tokens) + 1
    assert found.share_beyond == beyond / (found.tokens + 1)


def test_both_infinite_are_not_taken_for_equal() -> None:
    both = torch.full((1, 3), -math.inf)
    found = compare_rollouts(both, both, torch.ones(1, 3), by_position=True)
    assert (found.tokens, found.not_finite, found.share_beyond) == (0, 3, 1.0)
    assert found.abs_diff is found.abs_diff_max is found.kl is None and not found.by_position
    assert found.metrics() == {
        "train_rollout_tokens": 0,
        "train_rollout_not_finite": 3,
        "train_rollout_share_beyond": 1.0,
    }


@pytest.mark.parametrize("shape", [(3, 4), (0, 4), (3, 0), (0, 0)])
def test_of_no_tokens_nothing_is_said_but_that(shape: tuple[int, int]) -> None:
    nothing = torch.zeros(shape)
    found = compare_rollouts(nothing, nothing - 1, nothing, by_position=True)
    assert found.metrics() == {"train_rollout_tokens": 0, "train_rollout_not_finite": 0}


@pytest.mark.parametrize("by_position", [False, True])
def test_parts_add_up_however_rows_are_cut(by_position: bool) -> None:
    """Sums of fp32 numbers in fp64, in another order."""
    of = rows()
    whole = compare_rollouts(*of, by_position=by_position)

    def part(start: int, end: int, width: int) -> list[float]:
        train, rollout, mask = (each[start:end, :width] for each in of)
        made = measure_part(train, rollout, mask != 0, whole.bound, by_position=by_position)
        return made.tolist()

    width = int((of[2] != 0).any(0).nonzero().max()) + 1
    cuts = [(0, 1, width), (1, 3, LENGTH), (3, 3, 1), (3, 5, width)]
    parts = [*(part(*cut) for cut in cuts), make_empty_part(by_position=by_position)]
    for joined in (parts, [join_parts(parts[:2]), join_parts(parts[2:])]):
        found = RolloutMismatch.joined(joined, whole.bound)
        assert found.metrics() == pytest.approx(whole.metrics(), rel=1e-12)
        assert list(found.metrics()) == list(whole.metrics())
    on_device = [None, torch.tensor(parts[0], dtype=torch.float64), None]
    assert join_on_host(on_device) == parts[0] and join_on_host([None]) is None


def test_nothing_of_the_graph_is_kept_and_half_precision_is_compared_in_fp32() -> None:
    train_BS, rollout_BS, mask_BS = rows()
    leaf_BS = train_BS.requires_grad_()
    part = measure_part(leaf_BS * 1, rollout_BS, mask_BS != 0, 0.1, by_position=True)
    assert not part.requires_grad and part.dtype == torch.float64
    half = rollout_BS.bfloat16()
    in_half = compare_rollouts(train_BS.detach(), half, mask_BS)
    assert in_half == compare_rollouts(train_BS.detach(), half.float(), mask_BS)


class Reads(TorchDispatchMode):
    """Refuses what the host would wait for on a device: values, and shapes that depend on them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.name().split(".")[0] not in {
            *("aten::_local_scalar_dense", "aten::item", "aten::nonzero", "aten::masked_select"),
            *("aten::index", "aten::bincount"),
        }
        return func(*args, **(kwargs or {}))


def test_no_value_is_waited_for() -> None:
    train_BS, rollout_BS, mask_BS = rows()
    with Reads():
        measure_part(train_BS, rollout_BS, mask_BS != 0, 0.1, by_position=True)
    with pytest.raises(AssertionError), Reads():
        train_BS.sum().item()


def test_shapes_that_differ_are_refused() -> None:
    same = torch.zeros(2, 5)
    for wrong in ((same, same[:, 1:], same), (same, same, same[0]), (same[0], same[0], same[0])):
        with pytest.raises(BatchError, match=r"one shape \[B, S\]"):
            compare_rollouts(*wrong)


def batch(**more: object) -> BatchedDataDict:
    plain = {"input_ids": torch.zeros(2, 5).long(), "sample_mask": torch.ones(2)}
    return BatchedDataDict(plain | more)


@pytest.mark.parametrize("key", ["generation_logprobs", "rollout_log_probs"])
def test_training_refuses_rollouts_that_are_not_one_number_for_each_token(key: str) -> None:
    plain, off = RolloutMismatchConfig(), RolloutMismatchConfig(enabled=False)
    check_rollouts(batch(**{key: torch.full((2, 5), math.nan)}), plain, None)
    wrong: Sequence[tuple[object, str]] = [
        (torch.zeros(2), r"is torch.float32 \(2,\)"),
        (torch.zeros(2, 5, 3), r"is torch.float32 \(2, 5, 3\)"),
        (torch.zeros(2, 5).long(), "is torch.int64"),
        ([[0.0], [0.0, 1.0]], "is a list"),
    ]
    for given, told in wrong:
        with pytest.raises(BatchError, match=f"'{key}' {told}.*under another name"):
            check_rollouts(batch(**{key: given}), plain, None)
        check_rollouts(batch(**{key: given}), off, None)
        check_rollouts(batch(**{key: given}), plain, ScalarHead(per_token=False))


def test_a_record_and_a_report_have_it_under_the_names_of_dashboards() -> None:
    mismatch = compare_rollouts(*rows(), by_position=True).metrics()
    writer, result = Kept(), TrainResult(RESULT | {"rollout_mismatch": mismatch})
    log = MetricsLog([writer])
    for data, eval_mode in ((result, False), (RESULT, False), (result, True)):
        log.trained(data, {}, eval_mode=eval_mode)
    (_, first), (_, second), (_, evaluated) = writer.records
    names = set(mismatch)
    assert {"train_rollout_logprob_abs_diff", "train_rollout_kl"} < names
    assert {name: first[f"train/{name}"] for name in names} == mismatch
    assert {name: evaluated[f"eval/{name}"] for name in names} == mismatch
    assert not any("rollout" in name for name in second)
    report = PolicyReport.of_rank(2, memory(1), (), log.mismatch)
    assert PolicyReport.merged([report, report]).mismatch == mismatch
    assert json.loads(json.dumps(report.as_dict()))["mismatch"] == mismatch
    lines = str(report).splitlines()
    assert "training against rollouts, last measured" in lines and max(map(len, lines)) <= 80
    assert f"  {'tokens':<24}{mismatch['train_rollout_tokens']:>10}" in lines
    assert "rollouts" not in str(PolicyReport.of_rank(2, memory(1), ()))
