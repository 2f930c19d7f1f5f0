"""What a probe compares, when it does, and what it makes of what it is answered."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_policy.converters.rows import Role
from megatron_policy.errors import ConfigError, RefitError
from megatron_policy.refit.comparison import (
    ROUNDING,
    Tolerance,
    check_rows,
    compare,
    draw_rows,
)
from megatron_policy.refit.probe import (
    BRANCHES,
    SHRINK,
    Disturbance,
    EngineProbe,
    ProbeFacts,
    find_kind,
    list_kinds,
    run_probe,
)
from tests.families import SAMPLES
from tests.pure.test_table import small

FP32 = Tolerance.of([torch.float32])
ROWS = [[1, 2, 3], [4, 5]]


@given(st.integers(2, 300), st.integers(2, 40), st.integers(1, 6), st.integers(0, 9))
def test_rows_reach_the_whole_vocabulary_part_after_part(
    vocabulary: int, length: int, count: int, seed: int
) -> None:
    parts = -(-vocabulary // (length * count))
    drawn = [draw_rows(vocabulary, length, count, seed, part) for part in range(parts)]
    assert {token for rows in drawn for row in rows for token in row} == set(range(vocabulary))
    assert all([len(row) for row in rows] == [length] * count for rows in drawn)
    assert drawn[0] == draw_rows(vocabulary, length, count, seed)


def test_the_coarsest_dtype_decides() -> None:
    fp32, fp16, bf16 = torch.float32, torch.float16, torch.bfloat16
    assert Tolerance.of([fp32, bf16, fp16]).mean == ROUNDING[bf16]
    assert Tolerance.of([fp32, fp16]).reason == "for float16"
    assert Tolerance.of([torch.float8_e4m3fn], 0.25) == Tolerance(0.25, 5.0, "as given")
    with pytest.raises(ConfigError, match="how much float8_e4m3fn rounds is not known: give a"):
        Tolerance.of([fp32, torch.float8_e4m3fn])
    for number in (-1.0, math.inf, math.nan):
        with pytest.raises(ConfigError, match=f"tolerance is {number}: give a finite number"):
            Tolerance.of([fp32], number)


def test_one_token_or_all_of_them() -> None:
    ours = [[-1.0, -2.0], [-3.0]]
    near = compare(ROWS, ours, [[-1.000001, -2.0], [-3.0]], FP32)
    assert near.agrees and near.tokens == 3 and near.worst[0].token == 2
    one = compare(ROWS, ours, [[-1.0, -2.0], [-3.5]], FP32)
    assert not one.agrees and one.largest == 0.5
    assert str(one.worst[0]) == (
        "token 5 at position 1 of row 1 (-3 of the policy, -3.5 of the engine)"
    )
    all_of_them = compare(ROWS, ours, [[-1.00005, -2.00005], [-3.00005]], FP32)
    assert all_of_them.largest < FP32.token and not all_of_them.agrees


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ([[-1.0, -2.0]], "the engine has answered 1 rows of 2 log-probabilities in place of 2 of"),
        ([[-1.0], [-3.0]], r"answered 2 rows of 1 \+ 1 log-probabilities in place of 2 of 2 \+ 1"),
        ([[-1.0, None], [-3.0]], "the engine has answered no log-probabilities"),
        (None, "the engine has answered no log-probabilities"),
        ([[-1.0, math.nan], [-3.0]], "the engine says nan of token 3 at position 2 of row 0"),
        ([[-1.0, -2.0], [-math.inf]], "the engine says -inf of token 5 at position 1 of row 1"),
    ],
)
def test_what_is_no_answer(answer: Any, words: str) -> None:
    good = [[-1.0, -2.0], [-3.0]]
    with pytest.raises(RefitError, match=words):
        compare(ROWS, good, answer, FP32)
    with pytest.raises(RefitError, match=words.replace("engine", "policy")):
        compare(ROWS, answer, good, FP32)


def test_what_is_no_probe() -> None:
    with pytest.raises(ConfigError, match="there are no rows: give rows of at least 2 tokens"):
        check_rows([])
    with pytest.raises(ConfigError, match="row 1 has 1 tokens"):
        EngineProbe(None, rows=[[1, 2], [3]])
    with pytest.raises(ConfigError, match="every is 0"):
        EngineProbe(None, every=0)
    with pytest.raises(ConfigError, match="this probe cannot refit: give it `hand_over`"):
        EngineProbe(None).refit(None)


@pytest.mark.parametrize("family", SAMPLES)
def test_every_parameter_of_every_family_is_of_a_kind(family: str) -> None:
    entries = small(family).entries
    kinds = list_kinds(entries)
    assert {"embedding", "norms", "attention"} <= set(kinds)
    assert "other weights of layers" not in kinds
    for entry in entries:
        kind, name = find_kind(entry), entry.megatron
        if name.startswith("mtp."):
            assert kind is None
        elif entry.row.role is Role.BIAS:
            assert kind == "biases"
        elif entry.row.role is Role.MATRIX:
            assert (kind == "router") == ("router" in name), name
            assert (kind == "experts") == (entry.expert is not None), name
            assert (kind == "attention") == ("self_attention" in name), name


class Entry:
    """What a kind is read from."""

    adapts, where, megatron = "", "layer", "decoder.layers.0.mlp.linear_fc1.weight"

    def __init__(self, role: Role) -> None:
        self.row = type("Row", (), {"role": role, "owns": True})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_disturbed_is_restored_bit_for_bit(dtype: torch.dtype) -> None:
    numbers = torch.randn(7, 9, generator=torch.Generator().manual_seed(0)).to(dtype)
    largest, least = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal / 4
    numbers[0, :4] = torch.tensor([0.0, -0.0, least, -least])
    huge = torch.full((3,), largest)
    held = [
        (Entry(Role.MATRIX), numbers),
        (Entry(Role.MATRIX), numbers),  # one that is held twice
        (Entry(Role.MATRIX), huge.to(dtype)),
    ]
    before = [tensor.clone().view(torch.uint8) for _, tensor in held]
    changed = Disturbance(held, "mlp")  # type: ignore[arg-type]
    assert (numbers.abs() <= SHRINK * before[0].view(dtype).abs()).all()
    changed.undo()
    for (_, tensor), bits in zip(held, before, strict=True):
        assert torch.equal(tensor.view(torch.uint8), bits)
    unfit = torch.ones(3, dtype=dtype).expand(2, 3)  # cannot be written to
    with pytest.raises(RuntimeError):
        Disturbance([*held, (Entry(Role.MATRIX), unfit)], "mlp")  # type: ignore[arg-type]
    assert torch.equal(numbers.view(torch.uint8), before[0])
    biases = [(Entry(Role.BIAS), torch.full((4,), float(number))) for number in (0, 3)]
    changed = Disturbance(biases, "biases")  # type: ignore[arg-type]
    assert [tensor[0].item() for _, tensor in biases] == [1.0, 6.0]
    changed.undo()
    assert not biases[0][1].view(torch.uint8).any() and biases[1][1].tolist() == [3.0] * 4


class Numbers:
    """A policy and an engine of two numbers: a kind of weights each, of which the engine can keep
    an old one. A log-probability is minus their sum.
    """

    def __init__(self, *stale: str) -> None:
        self.own, self.engine = {"norms": 1.0, "mlp": 1.0}, {"norms": 1.0, "mlp": 1.0}
        self.stale, self.changed, self.refits, self.marks = stale, "", 0, 0
        self.form = 1  # in which the engine takes the second

    def probe_facts(self, adapters: bool) -> ProbeFacts:
        return ProbeFacts(9, 3, (torch.float32,), 5, tuple(self.own))

    def probe_logprobs(self, rows: Any) -> list[list[float]]:
        return [[-sum(self.own.values())] * (len(row) - 1) for row in rows]

    def disturb_weights(self, kind: str | None, adapters: bool) -> None:
        if self.changed:
            self.own[self.changed] /= SHRINK if self.changed in BRANCHES else 2
        self.changed = kind or ""
        if kind:
            self.own[kind] *= SHRINK if kind in BRANCHES else 2

    def once(self, call: Callable[[], Any]) -> Any:
        return call()

    def together(self, hand_over: Callable[[], Any]) -> Any:
        return hand_over()

    def probe(self, probe: EngineProbe) -> Any:
        return run_probe(probe, self)

    def ask(self, rows: Any) -> list[list[float]]:
        return [[-sum(self.engine.values())] * (len(row) - 1) for row in rows]

    def hand_over(self) -> int:
        self.refits += 1
        self.engine |= {kind: own for kind, own in self.own.items() if kind not in self.stale}
        self.engine["mlp"] *= self.form
        return self.refits

    def mark(self) -> None:
        self.marks += 1


def test_a_probe_closes_the_first_refit_and_each_nth_and_those_after_a_failure() -> None:
    pair = Numbers()
    probe = EngineProbe(pair.ask, pair.hand_over, pair.mark, every=3)
    counts = []
    for _ in range(8):
        probe.refit(pair)
        counts.append(probe.probes)
    assert counts == [1, 1, 1, 2, 2, 2, 3, 3] and pair.refits == 8
    pair.stale = ("mlp",)
    pair.own["mlp"] = 3.0
    assert probe.refit(pair) == 9  # not due
    for marks in (2, 4):
        with pytest.raises(RefitError, match=r"weights of step 5.* does not follow its mlp:"):
            probe.refit(pair)
        assert pair.marks == marks
    assert pair.own == {"norms": 1.0, "mlp": 3.0} and probe.probes == 3
    pair.stale = ()
    probe.refit(pair)
    assert probe.probes == 4
    every = EngineProbe(pair.ask, pair.hand_over, every=1)
    for number in range(1, 4):
        every.refit(pair)
        assert every.probes == number


def test_what_a_probe_concludes() -> None:
    def refusal(pair: Numbers, **options: Any) -> str:
        with pytest.raises(RefitError) as refused:
            run_probe(EngineProbe(pair.ask, **options), pair)
        return str(refused.value)

    pair = Numbers()
    pair.engine["mlp"] = 7.0
    assert refusal(pair).endswith("(-2 of the policy, -8 of the engine)")  # it only tells
    words = refusal(pair, hand_over=pair.hand_over)
    assert words.endswith("were changed, or not taken") and pair.refits == 1
    pair = Numbers("norms", "mlp")
    words = refusal(pair, hand_over=pair.hand_over, thorough=True)
    assert "It does not follow its norms, mlp: these arrive" in words
    pair = Numbers()
    pair.engine["of another model"] = 1.0
    words = refusal(pair, hand_over=pair.hand_over)
    assert "It follows each kind of weights: a part of one is stale, or" in words
    pair = Numbers()
    pair.form = pair.engine["mlp"] = 3
    words = refusal(pair, hand_over=pair.hand_over)
    assert "Without its mlp it agrees: its kernels read them in another form," in words
    pair = Numbers()
    pair.own["norms"] = pair.engine["norms"] = 0.0
    pair.engine["of another model"] = 1.0
    words = refusal(pair, hand_over=pair.hand_over)
    assert words.endswith("Nothing can be said of its norms")
    pair = Numbers()

    def hand_over() -> int:
        if pair.refits == 3:  # the last one, after each kind was changed
            pair.engine["of another model"] = 1.0
        return pair.hand_over()

    words = refusal(pair, hand_over=hand_over, mark_mixed=pair.mark, thorough=True)
    assert pair.marks == 1 and "-3 of the engine" in words
    with pytest.raises(ConfigError, match="a thorough probe refits: give it `hand_over`"):
        EngineProbe(pair.ask, thorough=True)


def test_an_engine_that_cannot_be_marked_is_told_of_and_one_without_a_voice_refused() -> None:
    pair = Numbers("mlp")
    pair.own["mlp"] = 2.0

    def mark() -> None:
        raise RefitError("it is gone")

    with pytest.raises(RefitError, match="It could not be marked as mixed: it is gone"):
        run_probe(EngineProbe(pair.ask, mark_mixed=mark), pair)
    with pytest.raises(RefitError, match="the probe has no `ask` where it is needed"):
        run_probe(EngineProbe(None), pair)
