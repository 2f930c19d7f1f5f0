"""Writers of metrics: what each has written can be read back, and what is missing is named."""

from __future__ import annotations

import json
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from megatron_policy.config import PolicyConfig
from megatron_policy.errors import ConfigError, MissingPackageError
from megatron_policy.monitoring import JsonlWriter, TensorBoardWriter, WandbWriter
from megatron_policy.monitoring.writers import configured_writers
from tests.pure.test_config import minimal

STEPS = {1: {"train/loss": 2.5, "moe/share": 0.125}, 2: {"train/loss": 1.25}}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_line_is_in_the_file_before_the_writer_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "metrics.jsonl"
    writer = JsonlWriter(path)
    assert not path.parent.exists()
    for number, (step, metrics) in enumerate(STEPS.items(), 1):
        writer.write(step, metrics)
        *_, last = found = lines(path)
        assert len(found) == number and last.pop("time") > 0
        assert last == {"step": step} | metrics
    writer.close()


def test_a_file_is_continued_and_half_a_line_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for end in ("", '{"step": 2, "train/lo'):
        with path.open("a") as file:
            file.write(end)
        writer = JsonlWriter(path)
        writer.write(7, {"a": 1.0})
        writer.write(8, {"a": 2.0})
        writer.close()
    assert [each["step"] for each in lines(path)] == [7, 8, 7, 8]
    path.write_text("x" * 200_000)  # no complete line at all, and longer than what is read at once
    JsonlWriter(path).write(9, {})
    assert [each["step"] for each in lines(path)] == [9]


def test_numbers_that_are_not_finite_are_null(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    JsonlWriter(path).write(1, {"a": float("inf"), "b": float("nan"), "c": 0.5})
    (line,) = lines(path)
    assert (line["a"], line["b"], line["c"]) == (None, None, 0.5)


def test_a_directory_in_place_of_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a directory; name a file in it"):
        JsonlWriter(tmp_path)


def test_tensorboard_reads_each_scalar_and_hides_what_is_taken_again(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first, resumed = TensorBoardWriter(tmp_path), TensorBoardWriter(tmp_path)
    for step, metrics in STEPS.items():
        first.write(step, metrics)
    first.close()
    resumed.write(2, {"train/loss": 1.5})
    resumed.write(3, {"train/loss": 1.0})
    resumed.close()
    found = EventAccumulator(str(tmp_path)).Reload()
    losses = [(each.step, each.value) for each in found.Scalars("train/loss")]
    assert losses == [(1, 2.5), (2, 1.5), (3, 1.0)]
    assert [each.value for each in found.Scalars("moe/share")] == [0.125]


class Run:
    """Stands in for a run of W&B: keeps the calls."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.calls.append((name, step_metric))

    def log(self, record: dict[str, float]) -> None:
        self.calls.append(record)

    def finish(self) -> None:
        self.calls.append("finished")


def test_wandb_gets_each_record_with_the_optimizer_step_as_axis(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, settings = Run(), {}
    module: Any = ModuleType("wandb")
    module.__spec__ = ModuleSpec("wandb", None)
    module.init = lambda **given: settings.update(given) or run
    monkeypatch.setitem(sys.modules, "wandb", module)
    writer = WandbWriter("project", name="run", id="7", mode="offline", directory=Path("here"))
    assert settings == {}, "a rank that does not write starts no run"
    for step, metrics in STEPS.items():
        writer.write(step, metrics)
    writer.close()
    writer.close()
    expected = {"project": "project", "name": "run", "id": "7", "mode": "offline"}
    assert settings == expected | {"resume": "allow", "dir": "here"}
    records = [{"step": step} | metrics for step, metrics in STEPS.items()]
    assert run.calls == [("step", None), ("*", "step"), *records, "finished"]


@pytest.mark.parametrize(
    ("package", "make", "key"),
    [
        ("tensorboard", lambda: TensorBoardWriter("x"), "metrics.tensorboard"),
        ("wandb", lambda: WandbWriter(), "metrics.wandb"),
    ],
)
def test_a_package_that_is_missing_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, package: str, make: Any, key: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    said = rf'{key} use .*not installed. Install it: pip install "{package}>'
    with pytest.raises(MissingPackageError, match=said):
        make()


def test_a_configuration_names_writers(tmp_path: Path) -> None:
    section = {"jsonl": str(tmp_path / "a"), "tensorboard": str(tmp_path / "b"), "wandb": None}
    writers = configured_writers(PolicyConfig.parse(minimal(metrics=section)).metrics)
    assert [type(each) for each in writers] == [JsonlWriter, TensorBoardWriter]
    assert configured_writers(PolicyConfig.parse(minimal()).metrics) == []
    with pytest.raises(ConfigError, match=r"metrics\.jsnl.*jsonl"):
        PolicyConfig.parse(minimal(metrics={"jsnl": "x"}))
