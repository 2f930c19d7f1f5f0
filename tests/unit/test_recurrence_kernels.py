"""The kernels of flash-linear-attention: interpreted on the CPU against the recurrences' own
definitions token by token, and where they are chosen.

Shapes: N tokens, Q sequences, D channels of a convolution, W taps.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_policy.converters.architecture import DeltaNet, ShortConvolution
from megatron_policy.engines.megatron.layers import recurrent
from megatron_policy.engines.megatron.layers.mixers import DeltaNetMixer, ShortConvolutionMixer
from megatron_policy.engines.megatron.layers.recurrent import TokenSpan, choose_kernels
from megatron_policy.errors import ConfigError
from megatron_policy.recurrence.chunks import Chunks, sequences_of
from megatron_policy.recurrence.convolution import Windows, convolve
from megatron_policy.recurrence.kernels import PACKAGE, Line
from tests import margins
from tests import recurrence_oracle as oracle
from tests.pure.test_recurrence import ROOM, Case, define_all, differentiate, furthest

NOT_INSTALLED = "needs flash-linear-attention"
interpreted = pytest.mark.skipif(
    find_spec(PACKAGE) is None or os.environ.get("TRITON_INTERPRET") != "1",
    reason=f"{NOT_INSTALLED} and TRITON_INTERPRET=1: make test-fla",
)
CASES = {
    "delta": Case(),
    "delta, beta up to 2": Case(doubled=True),
    "delta, strong decays": Case(strong=True),
    "delta, decays per channel": Case(by_channel=True, groups=4),
    "state space": Case("space"),
    "state space, strong decays": Case("space", strong=True),
}
LENGTHS = (65, 0, 1, 3)
ADDED = 2.0**14
"""By how many roundings of fp32 kernels can be off with strong decays, whose logarithms they add in
it: these add up to 2300, of which the gradient of A_log is a sum that cancels.
"""
KEPT = {"g", "beta", "dt", "A_log", "d", "state"}
"""What is fp32 beside 16 bits."""


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Take a kernel's first form, as there is no device to try them on, and let loops of kernels
    count in tensors, as those of compiled ones do.
    """
    import triton.language as tl
    from triton.runtime.autotuner import Autotuner

    def count(*limits: Any) -> Iterator[Any]:
        return map(tl.to_tensor, range(*map(int, limits)))

    monkeypatch.setattr(Autotuner, "_bench", lambda *_, **__: [0.0] * 3)
    for name in ("ops.common.chunk_delta_h", "ops.common.chunk_h"):
        module = importlib.import_module(f"{PACKAGE}.{name}")
        monkeypatch.setattr(module, "range", count, raising=False)
    yield


def assert_right(
    compute: Any, define: Any, inputs: dict[str, torch.Tensor], added: float = 0.0
) -> None:
    """In fp32, or `added` times its rounding off."""
    truth, defined = define_all(define, inputs)
    found = differentiate(compute, inputs, torch.float32)
    for name, true in truth.items():
        size = float(true.detach().abs().max())
        rounding = max(furthest(defined[name], true), 2**-24 * size)
        allowed = max(ROOM * rounding, 2**-24 * added * size)
        margins.check(f"fp32 {name}", furthest(found[name], true), allowed)


def assert_as_exact_in_16_bits(case: Case, dtype: torch.dtype, device: str) -> None:
    """Kernels, which round what they multiply, against the plain code, which does not."""
    sequences = sequences_of(LENGTHS)
    inputs = {
        n: x.float() if n in KEPT else x.to(dtype).float() for n, x in case.draw(sequences).items()
    }
    truth = differentiate(lambda x: case.define(x, sequences), inputs, torch.float64)
    here = {n: x.to(device) for n, x in inputs.items()}

    def run(layout: Any) -> dict[str, torch.Tensor]:
        def compute(x: dict[str, torch.Tensor]) -> Any:
            given = {n: y if n in KEPT else y.to(dtype) for n, y in x.items()}
            return case.run(given, layout.moved(lambda indices: indices.to(device)))

        return differentiate(compute, here, torch.float32)

    plain, found = run(Chunks.of(sequences)), run(Line.of(sequences))
    for name, true in truth.items():
        errors = [
            float((x[name].detach().cpu().double() - true).norm() / true.norm())
            for x in (found, plain)
        ]
        assert errors[0] <= 2 * errors[1] + torch.finfo(dtype).eps, (name, errors)


@interpreted
@pytest.mark.parametrize("name", CASES)
def test_kernels_give_what_tokens_give_one_by_one(interpreter: None, name: str) -> None:
    case, sequences = CASES[name], sequences_of(LENGTHS)
    line = Line.of(sequences)
    assert line.order_N is None
    assert_right(
        lambda x: case.run(x, line),
        lambda x: case.define(x, sequences),
        case.draw(sequences),
        ADDED if case.strong else 0.0,
    )


@interpreted
def test_kernels_see_sequences_of_every_rth_token(interpreter: None) -> None:
    case, sequences = CASES["delta"], sequences_of((1, 5), rows=2)
    line = Line.of(sequences)
    assert_right(
        lambda x: case.run(x, line), lambda x: case.define(x, sequences), case.draw(sequences)
    )


@interpreted
@pytest.mark.parametrize(("biased", "silu", "taps"), [(True, True, 4), (False, False, 3)])
def test_the_kernel_of_convolutions_starts_anew_with_every_sequence(
    interpreter: None, biased: bool, silu: bool, taps: int
) -> None:
    sequences, random = sequences_of(LENGTHS), torch.Generator().manual_seed(0)
    line = Line.of(sequences)
    shapes = {"x": (sum(LENGTHS), 5), "weight": (5, taps), "past": (len(LENGTHS), taps - 1, 5)}
    shapes |= {"bias": (5,)} if biased else {}
    inputs = {name: torch.randn(*of, generator=random).double() for name, of in shapes.items()}

    def compute(x: dict[str, torch.Tensor]) -> Any:
        return convolve(x["x"], x["weight"], x.get("bias"), line, x["past"], silu)

    def define(x: dict[str, torch.Tensor]) -> Any:
        return oracle.convolve(x["x"], x["weight"], x.get("bias"), x["past"], sequences, silu)

    assert_right(compute, define, inputs)


@interpreted
@pytest.mark.parametrize("name", ["delta", "state space"])
def test_in_16_bits_kernels_are_as_exact_as_the_plain_code(interpreter: None, name: str) -> None:
    """In fp16: the interpreter cannot multiply bf16."""
    assert_as_exact_in_16_bits(CASES[name], torch.float16, "cpu")


DELTA_NET = DeltaNet(num_key_heads=2, num_value_heads=4, key_head_dim=8, value_head_dim=6, taps=4)


def make_mixer(kind: Any, part: Any, dtype: torch.dtype) -> Any:
    """A mixer without parameters."""
    mixer = object.__new__(kind)
    torch.nn.Module.__init__(mixer)
    mixer.part, mixer.config = part, SimpleNamespace(params_dtype=dtype)
    return mixer


def test_a_line_has_each_sequence_s_tokens_in_a_row() -> None:
    line = Line.of(sequences_of((1, 2), rows=2))
    assert line.ends_Q.tolist() == [0, 1, 3, 4, 6]
    x_N = torch.arange(6)
    assert line.take(x_N).tolist() == [[0, 2, 4, 1, 3, 5]]
    assert line.put(line.take(x_N)).equal(x_N)


def test_kernels_are_chosen_by_the_configuration_alone(monkeypatch, caplog) -> None:
    monkeypatch.setattr(recurrent, "is_accelerated", lambda: True)
    monkeypatch.setattr(recurrent, "find_spec", lambda name: name == PACKAGE)
    recurrent._say_that_recurrences_are_slow.cache_clear()
    delta = make_mixer(DeltaNetMixer, DELTA_NET, torch.bfloat16)
    short = make_mixer(ShortConvolutionMixer, ShortConvolution(channels=8, taps=3), torch.bfloat16)
    models = [torch.nn.ModuleList([torch.nn.Linear(1, 1), delta]), short]
    choose_kernels(models, PACKAGE)
    assert delta.by_kernels and short.by_kernels and not caplog.messages
    choose_kernels(models, "torch")
    assert not delta.by_kernels and not short.by_kernels
    (said,) = caplog.messages
    assert "recurrence_impl 'fla' takes kernels (pip install 'fla-core>=" in said
    plain, fast = (TokenSpan((3, 2), 1, None, by_kernels) for by_kernels in (False, True))
    assert isinstance(plain.chunks, Chunks) and isinstance(plain.windows(4), Windows)
    assert isinstance(fast.chunks, Line) and fast.windows(4) is fast.chunks


def test_kernels_that_cannot_compute_a_layer_are_refused(monkeypatch) -> None:
    wide_keys = DeltaNet(**{**vars(DELTA_NET), "key_head_dim": 257})
    for installed, visible, part, dtype, said in (
        (True, False, DELTA_NET, torch.bfloat16, "no GPU is visible"),
        (False, True, DELTA_NET, torch.bfloat16, "fla-core>=.* is not installed"),
        (True, True, DELTA_NET, torch.float32, "in torch.float32 they would multiply with fewer"),
        (True, True, wide_keys, torch.bfloat16, "they have at most 256 channels of a key"),
    ):
        monkeypatch.setattr(recurrent, "is_accelerated", lambda visible=visible: visible)
        monkeypatch.setattr(recurrent, "find_spec", lambda _, found=installed: found or None)
        with pytest.raises(ConfigError, match=f"is 'fla', but {said}.*; use 'torch'"):
            choose_kernels([make_mixer(DeltaNetMixer, part, dtype)], PACKAGE)
