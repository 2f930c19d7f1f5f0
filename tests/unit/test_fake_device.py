"""Every family under every kind of layout on GPUs that are not there (see `tests/fake_device`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_policy.converters.registry import FAMILIES
from tests.fake_device.cases import FOUND, HIDDEN, WAITING, Case, cases
from tests.fake_device.layouts import Layout
from tests.families import EXPERTS

ROOT = Path(__file__).resolve().parents[2]
CASES = list(cases())
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "TORCHDYNAMO_DISABLE": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
LONGEST_S = 3000
"""All takes 5 minutes of a core; on a loaded machine it has a small share of one."""
NAMED_WAITS = {
    "megatron/core/transformer/moe/token_dispatcher.py _maybe_dtoh_and_synchronize": (
        "how many tokens each expert of this rank takes, by which they are sent and multiplied"
    ),
}
"""Where the host waits for the GPU between cutting a batch and the loss, and for what."""
Results = dict[str, dict[str, Any]]


def sweep(directory: Path, *words: str) -> Results:
    """What became of the cases of these words, by their names. A process of its own: tests here
    have adapted Megatron-Core to the CPU.
    """
    if torch.version.cuda is None:
        pytest.skip("fake tensors on a GPU need a CUDA build of torch")
    command = [sys.executable, "-W", "ignore", "-m", "tests.fake_device.sweep", str(directory)]
    done = subprocess.run(
        [*command, *words],
        cwd=ROOT,
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=LONGEST_S,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {line["case"]: line for line in lines}


@pytest.fixture(scope="module")
def along_all(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Of the layout along all axes but virtual stages, and of the planted faults."""
    return sweep(tmp_path_factory.mktemp("fake_device"), "all", "planted")


@pytest.fixture(scope="module")
def along_each(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Of every other layout."""
    others = sorted({case.layout.name for case in CASES} - {"all"})
    return sweep(tmp_path_factory.mktemp("fake_device"), *others)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_family_runs_forward_on_gpus_along_all_axes(along_all: Results, family: str) -> None:
    assert_run_forward(
        along_all, [c for c in CASES if (c.family, c.layout.name) == (family, "all")]
    )


@pytest.mark.nightly
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_family_runs_forward_on_gpus_along_each_axis(along_each: Results, family: str) -> None:
    own = [case for case in CASES if case.family == family and case.layout.name != "all"]
    assert_run_forward(along_each, own)


def assert_run_forward(results: Results, cases: list[Case]) -> None:
    """With the collectives without which they cannot be right, and no wait that is not named."""
    assert cases, "no published model of the family"
    errors = {case.name: results[case.name].get("error") for case in cases}
    failed = [f"{name}\n{error}" for name, error in errors.items() if error]
    assert not failed, f"{len(failed)} of {len(cases)} failed\n" + "\n".join(failed)
    for case in cases:
        called = set(results[case.name]["collectives"])
        missing = needed(case) - called
        assert not missing, f"{case.name} never called {missing}, only {called}"
        waits = set(results[case.name]["waits"]) - set(NAMED_WAITS)
        assert not waits, f"in {case.name} the host waits for the GPU in {waits}"


def needed(case: Case) -> set[str]:
    """Collectives without which a rank cannot have computed its part."""
    layout = case.layout
    tensor_parallel = {"allgather_base", "reduce_scatter_base"} if layout.sp else {"allreduce"}
    found = tensor_parallel if layout.tp > 1 else set()
    stage = case.rank * layout.pp // layout.world
    if layout.pp > 1:
        found |= {"send"} if stage < layout.pp - 1 or layout.vpp > 1 else set()
        found |= {"recv"} if stage > 0 or layout.vpp > 1 else set()
    found |= {"alltoall_base"} if layout.ep > 1 and layout.pp == 1 else set()
    return found | ({"allgather_base"} if layout.cp > 1 else set())


@pytest.mark.parametrize("axis", ["tp", "sp", "pp", "vpp", "cp", "ep", "etp", "dp"])
def test_every_family_is_split_along_every_axis_that_it_has(axis: str) -> None:
    split = {case.family for case in CASES if width(case.layout, axis) > 1}
    expected = set(EXPERTS) if axis in ("ep", "etp") else set(FAMILIES)
    if axis == "etp":
        expected -= {family for family, each in EXPERTS.items() if each.expert_biases}
    assert split == expected


def width(layout: Layout, axis: str) -> int:
    """How many ranks a layout has along an axis; 2 for sequence parallelism."""
    if axis == "dp":
        return layout.world // (layout.tp * layout.pp * layout.cp)
    return 1 + layout.sp if axis == "sp" else int(getattr(layout, axis))


SAID = (
    "the index torch.int64",
    "allreduce: a tensor torch.float32 [4] on cpu",
    "unflatten",
    "megatron_policy/lm_head/output.py _scores_at",
    "megatron_policy/training/losses.py count_valid",
    "megatron_policy/training/step.py loss",
)
PLANTED = dict(zip((*FOUND, *WAITING), SAID, strict=True))


@pytest.mark.parametrize("case", PLANTED, ids=lambda case: case.fault)
def test_a_planted_fault_or_wait_is_found(along_all: Results, case: Case) -> None:
    found = along_all[case.name]
    if case in FOUND:
        assert PLANTED[case] in found.get("error", "")
    else:
        assert found["waits"] == [PLANTED[case]]


def test_every_named_wait_occurs(along_all: Results) -> None:
    found = {place for line in along_all.values() for place in line.get("waits", ())}
    assert found >= set(NAMED_WAITS)


def test_a_small_layout_hides_what_a_large_one_shows(along_all: Results) -> None:
    assert "error" not in along_all[HIDDEN.name], along_all[HIDDEN.name]["error"]
