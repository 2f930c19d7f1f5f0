"""The chunked recurrences give what their definitions give token by token, and so do gradients of
every input.

The truth is in fp64. There, another order of the same sums leaves 1e-12 of the largest value. In
fp32 a result may be `ROOM` times as far from the truth as the definition itself is in fp32.

Shapes: N tokens, Q sequences, H heads, G key heads or groups, K key and V value channels,
D channels of a convolution, W taps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch

from megatron_policy.recurrence import decay, delta_rule
from megatron_policy.recurrence.chunks import Chunks, sequences_of, wide
from megatron_policy.recurrence.convolution import (
    Windows,
    convolve,
    convolve_step,
    gated_convolve,
)
from megatron_policy.recurrence.gates import (
    gate_then_normalise,
    log_decay,
    normalise_then_gate,
    time_steps,
    write_strength,
)
from megatron_policy.recurrence.state_space import state_space, state_space_step
from tests import margins
from tests import recurrence_oracle as oracle

Tensors = dict[str, torch.Tensor]
Compute = Callable[..., tuple[torch.Tensor, torch.Tensor]]

SIZE, ROOM, EXACT = 16, 8.0, 1e-12
EDGES = (1, SIZE - 1, 0, SIZE, SIZE + 1, 3 * SIZE + 5, 2)
TWENTY = (3, 17, 1, 9, 40, 2, 16, 15, 1, 5, 8, 33, 4, 11, 7, 2, 1, 18, 6, 10)


@dataclass(frozen=True)
class Case:
    """A recurrence; `strong` decays forget a state within a token or two, others keep it long."""

    kind: str = "delta"
    heads: int = 4
    groups: int = 2
    by_channel: bool = False
    doubled: bool = False
    strong: bool = False

    def draw(self, sequences: tuple[range, ...], seed: int = 0) -> Tensors:
        random = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=random).double()

        tokens, (heads, groups, keys, values) = sum(map(len, sequences)), self.sizes
        rates = normal(tokens, heads, *[keys] * self.by_channel).abs() * (400 if self.strong else 1)
        state = normal(len(sequences), heads, keys, values)
        if self.kind == "delta":
            return {
                "q": normal(tokens, groups, keys),
                "k": normal(tokens, groups, keys),
                "v": normal(tokens, heads, values),
                "g": -0.1 * rates,
                "beta": normal(tokens, heads).sigmoid() * (2 if self.doubled else 1),
                "state": state,
            }
        return {
            "x": normal(tokens, heads, values),
            "dt": 0.1 * rates,
            "A_log": normal(heads),
            "b": normal(tokens, groups, keys),
            "c": normal(tokens, groups, keys),
            "d": normal(heads),
            "state": state,
        }

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        return self.heads, self.groups, 8, 6

    def run(self, inputs: Tensors, chunks: Chunks) -> tuple[torch.Tensor, torch.Tensor]:
        *others, state = inputs.values()
        compute: Compute = delta_rule.delta_rule if self.kind == "delta" else state_space
        return compute(*others, chunks, state)

    def define(self, inputs: Tensors, sequences: Any) -> tuple[torch.Tensor, torch.Tensor]:
        compute: Compute = oracle.delta_rule if self.kind == "delta" else oracle.state_space
        return compute(*inputs.values(), sequences)


CASES = {
    "delta": Case(),
    "delta, a key head for every value head": Case(groups=4),
    "delta, beta up to 2": Case(doubled=True),
    "delta, strong decays": Case(strong=True),
    "delta, decays per channel": Case(by_channel=True),
    "delta, strong decays per channel": Case(by_channel=True, strong=True, groups=4),
    "state space": Case("space"),
    "state space, one group": Case("space", groups=1),
    "state space, strong decays": Case("space", strong=True),
}


def differentiate(compute: Callable[[Tensors], Any], inputs: Tensors, dtype: Any) -> Tensors:
    """Outputs, last states, and the gradients of all inputs for a random direction of both."""
    leaves = {name: x.to(dtype).requires_grad_() for name, x in inputs.items()}
    random, results = torch.Generator().manual_seed(1), compute(leaves)
    pushes = [torch.randn(x.shape, generator=random).to(x) for x in results]
    grads = torch.autograd.grad(results, list(leaves.values()), pushes)
    found = dict(zip(("output", "last"), results, strict=True))
    return found | {f"gradient of {n}": g for n, g in zip(leaves, grads, strict=True)}


def define_all(define: Callable[[Tensors], Any], inputs: Tensors) -> tuple[Tensors, Tensors]:
    """The truth, and the same in fp32."""
    truth, rounded = (differentiate(define, inputs, t) for t in (torch.float64, torch.float32))
    return truth, rounded


def assert_right(compute: Any, defined_twice: tuple[Tensors, Tensors], inputs: Tensors) -> None:
    """In fp64 and fp32."""
    truth, defined = defined_twice
    exact = differentiate(compute, inputs, torch.float64)
    rounded = differentiate(compute, inputs, torch.float32)
    for name, true in truth.items():
        assert exact[name].dtype == torch.float64
        size = float(true.detach().abs().max()) if true.numel() else 0.0
        margins.check(f"fp64 {name}", furthest(exact[name], true), EXACT * max(size, 1.0))
        rounding = max(furthest(defined[name], true), 2**-24 * size, 1e-30)
        margins.check(f"fp32 {name}", furthest(rounded[name], true), ROOM * rounding)


def furthest(found: torch.Tensor, true: torch.Tensor) -> float:
    assert found.shape == true.shape
    assert bool(found.isfinite().all())
    return float((found.double() - true).abs().max()) if true.numel() else 0.0


@cache
def definition_of(case: Case, sequences: tuple[range, ...]) -> tuple[Tensors, Tensors]:
    return define_all(lambda x: case.define(x, sequences), case.draw(sequences))


def check(case: Case, chunks: Chunks) -> None:
    defined = definition_of(case, chunks.sequences)
    assert_right(lambda x: case.run(x, chunks), defined, case.draw(chunks.sequences))


@pytest.mark.parametrize("name", CASES)
def test_chunks_give_what_tokens_give_one_by_one(name: str) -> None:
    check(CASES[name], Chunks.of(sequences_of(EDGES), SIZE, together=3))


def _mask_late(sums: torch.Tensor, dtype: torch.dtype, place: int = -1) -> torch.Tensor:
    between = (sums.unsqueeze(place) - sums.unsqueeze(place - 1)).to(dtype).exp()
    return between.masked_fill(decay._later(sums, place), 0)


def _leave_unscaled(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return delta_rule._unit(q), delta_rule._unit(k)


FAULTS: dict[str, tuple[str, Any, str]] = {
    "masked after exp": ("decay._between", _mask_late, "delta, strong decays"),
    "masked after exp, per channel": (
        "decay._between",
        _mask_late,
        "delta, strong decays per channel",
    ),
    "queries not scaled": ("delta_rule._scale", _leave_unscaled, "delta"),
    "keys of any length": ("delta_rule._unit", wide, "delta"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place, fault, case = FAULTS[name]
    monkeypatch.setattr(f"megatron_policy.recurrence.{place}", fault)
    with margins.apart(), pytest.raises(AssertionError):
        check(CASES[case], Chunks.of(sequences_of(EDGES), SIZE, together=3))


@pytest.mark.parametrize("name", ["delta", "state space"])
def test_a_state_that_outlives_its_sequence_is_seen(name: str) -> None:
    case, apart = CASES[name], Chunks.of(sequences_of(TWENTY), SIZE)
    joined = Chunks.of((range(apart.tokens),), SIZE)
    inputs = case.draw(apart.sequences)
    inputs["state"] = torch.zeros_like(inputs["state"])
    found, _ = case.run(inputs | {"state": inputs["state"][:1]}, joined)
    true, _ = case.define(inputs, apart.sequences)
    assert furthest(found[:3], true[:3]) < EXACT
    assert furthest(found[3:], true[3:]) > 0.01 * float(true.abs().max())


@pytest.mark.parametrize("name", ["delta", "state space"])
@pytest.mark.parametrize("together", [1, 7, 1000])
def test_twenty_sequences_in_a_row_are_apart_however_many_chunks_are_computed_at_once(
    name: str, together: int
) -> None:
    check(CASES[name], Chunks.of(sequences_of(TWENTY), SIZE, together))


def test_padded_rows_are_sequences_of_every_rth_token() -> None:
    chunks = Chunks.of(sequences_of((5, SIZE + 1), rows=3), SIZE, 2)
    assert sorted(n for one in chunks.sequences for n in one) == list(range(3 * (SIZE + 6)))
    check(CASES["delta"], chunks)


@pytest.mark.parametrize("name", ["delta", "delta, decays per channel", "state space"])
def test_without_tokens_states_stay(name: str) -> None:
    case, chunks = CASES[name], Chunks.of(sequences_of((0, 0)), SIZE)
    inputs = case.draw(chunks.sequences)
    out, last = case.run(inputs, chunks)
    assert out.shape == (0, 4, 6) and last.equal(inputs["state"])


@pytest.mark.parametrize("name", CASES)
def test_a_sequence_gives_what_it_gives_alone(name: str) -> None:
    """To the last bit but for the kernels' own choices; here in fp64."""
    case, chunks = CASES[name], Chunks.of(sequences_of(TWENTY), SIZE)
    inputs = case.draw(chunks.sequences)
    del inputs["state"]
    packed, _ = case.run(inputs | {"state": None}, chunks)  # type: ignore[dict-item]
    for q, one in enumerate(chunks.sequences[:6]):
        alone = {n: x[one.start : one.stop] if x.ndim > 1 else x for n, x in inputs.items()}
        single = Chunks.of(sequences_of((TWENTY[q],)), SIZE)
        out, _ = case.run(alone | {"state": None}, single)  # type: ignore[dict-item]
        alone_is = furthest(packed[one.start : one.stop], out)
        assert alone_is <= EXACT * float(out.abs().max())


STEPS = {"delta": delta_rule.delta_step, "space": state_space_step}


@pytest.mark.parametrize("name", CASES)
def test_a_text_read_in_parts_and_then_token_by_token_equals_the_whole(name: str) -> None:
    case, length = CASES[name], 3 * SIZE + 5
    whole = Chunks.of(sequences_of((length,)), SIZE)
    inputs = case.draw(whole.sequences)
    out, last = case.run(inputs, whole)
    state, found, start = inputs["state"], [], 0
    for count in (SIZE + 3, 1, SIZE, *[1] * (length - 2 * SIZE - 4)):
        here = slice(start, start + count)
        part = {n: x[here] if x.ndim > 1 else x for n, x in inputs.items() if n != "state"}
        if count > 1:
            now, state = case.run(part | {"state": state}, Chunks.of(sequences_of((count,)), SIZE))
        else:
            now, state = STEPS[case.kind](*part.values(), state)
        found.append(now)
        start += count
    for one, other in ((torch.cat(found), out), (state, last)):
        assert furthest(one, other) <= EXACT * float(other.abs().max())


@pytest.mark.parametrize("name", ["delta", "state space"])
def test_filler_of_any_values_after_a_sequence_changes_nothing_before_it(name: str) -> None:
    """A row of filler alone neither, whose outputs have no gradient."""
    case, chunks = CASES[name], Chunks.of(sequences_of((SIZE + 4,), rows=2), SIZE)
    drawn = case.draw(chunks.sequences)
    filler = torch.zeros(2 * (SIZE + 4), dtype=torch.bool)
    filler[1::2] = filler[2 * SIZE :] = True
    grads = []
    for factor in (1.0, 50.0):
        inputs = {
            n: torch.where(filler.view(-1, *[1] * (x.ndim - 1)), factor * x, x)
            if x.size(0) == filler.numel()
            else x
            for n, x in drawn.items()
        }
        leaves = {n: x.requires_grad_() for n, x in inputs.items()}
        out, _ = case.run(leaves, chunks)
        found = torch.autograd.grad(out[~filler].square().sum(), list(leaves.values()))
        grads.append([out[~filler].detach(), *found])
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
        if one.size(0) == filler.numel():
            assert not one[filler].any()


def test_gates_of_tokens_reach_their_parameters() -> None:
    """Of a delta net's A_log and dt_bias and of Mamba2's dt_bias, through the whole recurrence."""
    chunks = Chunks.of(sequences_of(EDGES), SIZE, 3)
    random = torch.Generator().manual_seed(2)
    gates = {
        "a": torch.randn(chunks.tokens, 4, generator=random).double(),
        "A_log": torch.rand(4, generator=random).double(),
        "dt_bias": torch.randn(4, generator=random).double(),
    }

    def delta(run: Any) -> Any:
        others = CASES["delta"].draw(chunks.sequences)

        def compute(x: Tensors) -> Any:
            mine = {n: y.to(x["a"].dtype) for n, y in others.items()}
            return run(mine | {"g": log_decay(x["a"], x["A_log"], x["dt_bias"])})

        return compute

    def space(run: Any) -> Any:
        others = CASES["state space"].draw(chunks.sequences)

        def compute(x: Tensors) -> Any:
            mine = {n: y.to(x["a"].dtype) for n, y in others.items()}
            mine |= {"dt": time_steps(x["a"], x["dt_bias"]), "A_log": x["A_log"]}
            return run(mine)

        return compute

    for kind, make in (("delta", delta), ("state space", space)):
        case = CASES[kind]
        define = make(lambda x, case=case: case.define(x, chunks.sequences))
        compute = make(lambda x, case=case: case.run(x, chunks))
        assert_right(compute, define_all(define, gates), gates)


def test_time_steps_stay_within_their_limits() -> None:
    found = time_steps(torch.tensor([-9.0, 0.0, 9.0]), torch.zeros(1), (0.01, 2.0))
    torch.testing.assert_close(found, torch.tensor([0.01, 0.6931472, 2.0]))


def test_a_doubled_write_can_undo_more_than_there_is() -> None:
    b = torch.tensor([-3.0, 0.0, 3.0])
    torch.testing.assert_close(write_strength(b), torch.tensor([0.0474259, 0.5, 0.9525741]))
    torch.testing.assert_close(write_strength(b.bfloat16(), doubled=True), 2 * write_strength(b))


@pytest.mark.parametrize("taps", [1, 2, 4])
@pytest.mark.parametrize(("bias", "silu"), [(True, True), (False, True), (False, False)])
def test_a_convolution_starts_anew_with_every_sequence(
    taps: int, bias: bool, silu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In blocks of few channels, with and without inputs before."""
    monkeypatch.setattr("megatron_policy.recurrence.convolution.BLOCK", 400)
    sequences = sequences_of((1, 2, 0, 9, 4), rows=2)
    windows, random = Windows.of(sequences, taps), torch.Generator().manual_seed(3)
    inputs = {
        "x": torch.randn(32, 10, generator=random).double(),
        "weight": torch.randn(10, taps, generator=random).double(),
        "past": torch.randn(len(sequences), taps - 1, 10, generator=random).double(),
    }
    if bias:
        inputs["bias"] = torch.randn(10, generator=random).double()

    def compute(x: Tensors) -> Any:
        return convolve(x["x"], x["weight"], x.get("bias"), windows, x["past"], silu)

    def define(x: Tensors) -> Any:
        return oracle.convolve(x["x"], x["weight"], x.get("bias"), x["past"], sequences, silu)

    assert_right(compute, define_all(define, inputs), inputs)
    zeros, others = torch.zeros_like(inputs["past"]), (inputs["weight"], inputs.get("bias"))
    out, _ = convolve(inputs["x"], *others, windows, None, silu)
    true, _ = oracle.convolve(inputs["x"], *others, zeros, sequences, silu)
    torch.testing.assert_close(out, true, rtol=0, atol=1e-13)


def test_a_convolution_in_steps_equals_the_whole() -> None:
    random = torch.Generator().manual_seed(4)
    x, weight = torch.randn(3, 7, 5, generator=random), torch.randn(5, 4, generator=random)
    bias, windows = torch.randn(5, generator=random), Windows.of(sequences_of((7, 7, 7)), 4)
    out, last = convolve(x.flatten(0, 1), weight, bias, windows)
    past, found = torch.zeros(3, 3, 5), []
    for t in range(7):
        now, past = convolve_step(x[:, t], weight, bias, past)
        found.append(now)
    torch.testing.assert_close(torch.stack(found, 1).flatten(0, 1), out)
    torch.testing.assert_close(past, last)


def test_a_gated_convolution_is_a_convolution_between_two_products() -> None:
    sequences, random = sequences_of((5, 1, 8)), torch.Generator().manual_seed(5)
    windows = Windows.of(sequences, 3)
    inputs = {n: torch.randn(14, 6, generator=random).double() for n in ("b", "c", "x")}
    inputs["weight"] = torch.randn(6, 3, generator=random).double()
    inputs["past"] = torch.randn(3, 2, 6, generator=random).double()

    def define(x: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        product = x["b"] * x["x"]
        out, last = oracle.convolve(product, x["weight"], None, x["past"], sequences, False)
        return x["c"] * out, last

    assert_right(
        lambda x: gated_convolve(x["b"], x["c"], x["x"], x["weight"], None, windows, x["past"]),
        define_all(define, inputs),
        inputs,
    )


NORMS = {
    "normalised, then gated": (normalise_then_gate, True, (6,)),
    "gated, then normalised": (gate_then_normalise, False, (3, 6)),
    "gated alone": (gate_then_normalise, False, None),
}


@pytest.mark.parametrize("name", NORMS)
def test_a_gated_norm_is_its_definition(name: str) -> None:
    compute, after, shape = NORMS[name]
    random = torch.Generator().manual_seed(6)
    inputs = {n: torch.randn(9, 3, 6, generator=random).double() for n in ("y", "gate")}
    if shape is not None:
        inputs["weight"] = torch.randn(shape, generator=random).double()

    def define(x: Tensors) -> tuple[torch.Tensor]:
        gate = x["gate"] / (1 + (-x["gate"]).exp())
        y = x["y"] if after else x["y"] * gate
        if shape is not None:
            y = y / (y.square().sum(-1, keepdim=True) / 6 + 1e-5).sqrt() * x["weight"]
        return (y * gate if after else y,)

    def mine(x: Tensors) -> tuple[torch.Tensor]:
        return (compute(x["y"], x["gate"], x.get("weight"), 1e-5),)  # type: ignore[operator]

    for dtype, least in ((torch.float64, 1e-13), (torch.float32, 2e-6)):
        found, true = (_first_and_gradients(each, inputs, dtype) for each in (mine, define))
        for one, other in zip(found, true, strict=True):
            torch.testing.assert_close(one, other, rtol=least, atol=least * 4)


def _first_and_gradients(compute: Any, inputs: Tensors, dtype: Any) -> list[torch.Tensor]:
    leaves = {name: x.to(dtype).requires_grad_() for name, x in inputs.items()}
    (out,) = compute(leaves)
    push = torch.linspace(-1, 1, out.numel(), dtype=dtype).view_as(out)
    return [out.detach(), *torch.autograd.grad(out, list(leaves.values()), push)]


@pytest.mark.parametrize("name", ["delta", "delta, decays per channel", "state space"])
def test_inputs_in_bf16_are_computed_in_fp32(name: str) -> None:
    """The output is the truth of the rounded inputs, rounded once: half a unit of bf16, with room
    for what fp32 leaves.
    """
    case, chunks = CASES[name], Chunks.of(sequences_of(EDGES), SIZE)
    inputs = {
        name: x.float() if name in ("g", "dt", "beta", "A_log", "d", "state") else x.bfloat16()
        for name, x in case.draw(chunks.sequences).items()
    }
    out, last = case.run(inputs, chunks)
    true, true_last = case.define({n: x.double() for n, x in inputs.items()}, chunks.sequences)
    assert (out.dtype, last.dtype) == (torch.bfloat16, torch.float32)
    assert furthest(out, true) <= 2**-8 * float(true.abs().max())
    assert bool(((out.double() - true).abs() <= 2**-8 * true.abs() + 1e-5).all())
    assert furthest(last, true_last) <= 1e-5 * float(true_last.abs().max())
