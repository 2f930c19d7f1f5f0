"""The rows of GPUs run on the CPU at toy size; what they measure there means nothing, and is not
looked at.
"""

from __future__ import annotations

import importlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu_rows, run
from benchmarks.gpu_rows import FULL, LOCAL, TOY, GpuBench
from benchmarks.head_once import PRODUCT, PRODUCTS
from tests.ranks import RankPool

H200 = {
    "device": "NVIDIA H200",
    "devices": 1,
    "memory_bytes": 141 * 2**30,
    "product_flops": 800e12,
    "memory_bandwidth": 4.3e12,
}


def test_without_a_gpu_or_for_toy_sizes_of_other_rows_it_ends_with_2_before_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "accelerators", lambda: 0)
    monkeypatch.setattr(gpu_rows, "run_fresh", lambda *_, **__: pytest.fail("it started a program"))
    with pytest.raises(SystemExit) as ended:
        run.main(["--gpu", "--results", str(tmp_path / "results.jsonl")])
    assert ended.value.code == 2
    assert "no GPU is visible" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(SystemExit) as ended:
        run.main(["--toy"])
    assert ended.value.code == 2


@pytest.mark.nightly
def test_every_row_of_gpus_runs_at_toy_size(
    ranks: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_ranks(world: int, module: str, *arguments: Any, **_: Any) -> list[dict[str, Any]]:
        found = ranks.run(world, importlib.import_module(module).run, list(map(str, arguments)))
        return json.loads(json.dumps(found))

    monkeypatch.setattr(gpu_rows, "run_ranks", run_ranks)
    monkeypatch.setattr(gpu_rows, "run_fresh", lambda *given, **_: run_ranks(1, *given)[0])
    results = tmp_path / "results.jsonl"
    run.main(["--gpu", "--toy", "--results", str(results)])
    lines = {line["row"]: line for line in map(json.loads, results.read_text().splitlines())}
    assert list(lines) == [8, 10, 11, 18, 19]
    for line in lines.values():
        made_with = line["made_with"]
        assert made_with["sizes"] == "toy"
        assert {"device", "torch", "megatron-core", "transformer-engine"} <= made_with.keys()
        assert math.isfinite(line["ratio"]) and line["verified"]
        assert line["device_s"].keys() == line["runs"].keys()
        assert all(second > 0 for seconds in line["runs"].values() for second in seconds)
    beside = {row: line["beside"] for row, line in lines.items() if "beside" in line}
    _check_runs(
        {row: {name: len(of) for name, of in line["runs"].items()} for row, line in lines.items()}
    )
    assert "D 16: torch, forward and backward / four products" in beside[8]
    assert {"piece by piece", "staged", "staged, GB/s"} <= beside[11].keys()
    for name in (f"{size}, {LOCAL}" for size in TOY.sizes):
        assert f"{name}: of the product" in beside[18]
        assert f"{name}: seconds / the plan's least" in beside[18]
        assert f"{name}: peak / plan" in beside[19]


def _check_runs(runs: dict[int, dict[str, int]]) -> None:
    """Each program ran three times; of row 10 the first step does not count."""
    did = ("chunks of 4", "chunks of 8", "forward and backward")
    ways = [f"{way}, {what}" for way in ("torch", "plain") for what in did]
    heads = {f"D {width}: {name}" for width in (16, 32) for name in (*ways, PRODUCT, PRODUCTS)}
    assert heads <= runs[8].keys() and set(runs[8].values()) == {3}
    assert runs[10] == {f"large, {LOCAL}: plain loop": 2, f"large, {LOCAL}: ours": 2}
    refits = {
        f"{way}: {what}" for way in ("piece by piece", "staged") for what in ("copy", "refit")
    }
    assert runs[11] == dict.fromkeys(refits, 3)
    assert runs[18] == {f"{size}, {LOCAL}": 3 for size in TOY.sizes}
    assert runs[19] == {}


@pytest.mark.nightly
def test_a_row_runs_in_processes_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # which is slow, and runs elsewhere
    results = tmp_path / "results.jsonl"
    run.main(["--gpu", "--toy", "--rows", "8", "--results", str(results)])
    (line,) = map(json.loads, results.read_text().splitlines())
    assert line["row"] == 8
    assert line["made_with"]["device"].startswith("CPU ")


def test_results_that_differ_from_plain_chunks_are_an_error() -> None:
    from benchmarks.head_once import verify

    right, wrong = torch.ones(8), torch.ones(8) * 1.05
    verify({"plain": lambda: {"logprobs": right}, "ours": lambda: {"logprobs": right}}, "plain")
    with pytest.raises(RuntimeError, match=r"logprobs by ours are 5\.0e-02 off"):
        verify({"plain": lambda: {"logprobs": right}, "ours": lambda: {"logprobs": wrong}}, "plain")


def test_the_largest_model_is_chosen_whose_plan_fits_the_devices() -> None:
    bench = GpuBench(FULL)
    bench.device = H200
    assert bench._largest(LOCAL, 1) == "3B"
    assert bench._largest(LOCAL, 1, copies=2, further=20 * 2**30) == "1.5B"
    assert bench._largest(LOCAL, 8) == "32B"
    bench.device = {**H200, "memory_bytes": 2**30}
    with pytest.raises(RuntimeError, match="no model fits NVIDIA H200"):
        bench._largest(LOCAL, 1)


def test_utilisation_and_memory_are_those_of_the_slowest_and_fullest_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = GpuBench(FULL)
    bench.device = {**H200, "devices": 2}
    largest = bench._largest(LOCAL, 2)

    def rank(seconds: float, peak: int) -> dict[str, Any]:
        speed = {"seconds": seconds, "model_flops": 800e12, "tokens": 8192}
        measured = {"speeds": [speed] * 3, "peak_bytes": peak, "planned_bytes": 100}
        return measured | {"least_seconds": 0.5, "sheet_flops": 1000e12}

    monkeypatch.setattr(GpuBench, "implementations", [LOCAL])
    bench._speeds = {
        ("0.5B", LOCAL): [rank(4.0, 95), rank(4.0, 80)],
        (largest, LOCAL): [rank(1.0, 90), rank(2.0, 107)],
    }
    used = bench.utilisation(tmp_path, 3)
    memory = bench.memory_over_plan(tmp_path, 3)
    assert used.ratio == 0.25  # 800 TFLOP in 2 s on 2 devices that do 800 TFLOP/s each
    assert used.beside[f"{largest}, {LOCAL}: MFU"] == 0.2
    assert used.beside[f"{largest}, {LOCAL}: seconds / the plan's least"] == 4.0
    assert used.beside[f"{largest}, {LOCAL}: tokens/s"] == 4096
    assert memory.ratio == pytest.approx(0.07)
    assert memory.beside[f"0.5B, {LOCAL}: peak / plan"] == 0.95
