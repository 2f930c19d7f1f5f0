"""Warnings of libraries become one line; nobody else's do, and errors stay errors."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator

import pytest
import torch

from megatron_policy.device import is_accelerated
from megatron_policy.monitoring.library_warnings import VARIABLE, collect_warnings

LIBRARY = torch.__file__


@pytest.fixture(autouse=True)
def plain_filters(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.delenv("RANK", raising=False)
    with warnings.catch_warnings():
        warnings.resetwarnings()
        yield


def warn(text: str, file: str = LIBRARY, line: int = 1) -> None:
    warnings.warn_explicit(text, UserWarning, file, line)


def test_warnings_of_libraries_are_one_line_with_the_first_of_each_kind(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with warnings.catch_warnings(record=True) as shown, collect_warnings():
        for line in range(3):
            warn("no  fused\nkernels", line=line)
        warn("b" * 500)
    (record,) = caplog.records
    line = record.getMessage()
    assert line.startswith(
        f"4 warnings of libraries (set {VARIABLE}=all to see them): UserWarning:"
    )
    assert "no fused kernels" in line and "b" * 50 in line and "b" * 200 not in line
    assert shown == []


def test_others_warnings_are_shown_as_ever_also_after_an_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with (
        warnings.catch_warnings(record=True) as shown,
        pytest.raises(ZeroDivisionError),
        collect_warnings(),
    ):
        warn("mine", __file__)
        warn("of torch")
        raise ZeroDivisionError
    assert [str(each.message) for each in shown] == ["mine"]
    assert "1 warning of libraries" in caplog.text


def test_a_filter_that_makes_errors_of_warnings_still_does(
    caplog: pytest.LogCaptureFixture,
) -> None:
    warnings.simplefilter("error")
    with pytest.raises(UserWarning, match="stop here"), collect_warnings():
        warn("stop here")
    with pytest.raises(FutureWarning):  # nor does what is ignored later come before it
        warnings.warn("`torch.distributed.a_name` is deprecated", FutureWarning, stacklevel=1)
    assert caplog.text == ""


def test_a_variable_shows_all_and_collects_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "all")
    with warnings.catch_warnings(record=True) as shown, collect_warnings():
        warn("of torch")
    assert [str(each.message) for each in shown] == ["of torch"]
    assert caplog.text == ""


def test_only_rank_0_warns(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "3")
    with caplog.at_level(logging.INFO), collect_warnings():
        warn("of torch")
    assert [record.levelname for record in caplog.records] == ["INFO"]


def test_advice_of_a_step_that_is_for_nobody_is_not_shown_afterwards_and_other_warnings_are() -> (
    None
):
    said = (
        "The .grad attribute of a Tensor that is not a leaf Tensor is being accessed.",
        "\nset the environment variable CUDA_DEVICE_MAX_CONNECTIONS to 1 for maximum speedup",
        "something else",
    )
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        warnings.filters[:] = []
        with collect_warnings():
            pass
        for text in said:
            for module in (
                "megatron.core.optimizer.optimizer",
                "torch.distributed.c10d_logger",
                "my_own",
            ):
                warnings.warn_explicit(text, UserWarning, "file.py", 1, module=module, registry={})
    hidden = 1 if is_accelerated() else 2
    assert len(shown) == 3 * len(said) - 2 * hidden
    assert sum("something else" in str(each.message) for each in shown) == 3
