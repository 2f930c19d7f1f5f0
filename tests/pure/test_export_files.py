"""The export plan: every tensor in one file, every file with one writer, names known beforehand."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_policy.refit.hf_directory import DirectoryWriter, ExportFile, plan_export
from megatron_policy.refit.plan import RefitTensor


def tensors(*sizes: int, stage: int = 0) -> list[RefitTensor]:
    """Float32 tensors of so many elements."""
    return [RefitTensor(f"s{stage}.t{i}", (n,), torch.float32, stage) for i, n in enumerate(sizes)]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(st.lists(st.integers(0, 30), max_size=12), min_size=1, max_size=3),
    st.integers(1, 200),
    st.integers(1, 4),
)
def test_every_tensor_is_in_one_file_of_its_stage_in_order_and_within_the_limit(
    sizes: list[list[int]], limit: int, writers: int
) -> None:
    inventory = [t for stage, of in enumerate(sizes) for t in tensors(*of, stage=stage)]
    plan = plan_export(inventory, limit, writers)
    assert [tensor for file in plan.files for tensor in file.tensors] == inventory
    for file in plan.files:
        assert {tensor.stage for tensor in file.tensors} == {file.stage}
        assert len(file.tensors) == 1 or sum(t.nbytes for t in file.tensors) <= limit
        assert file.writer in range(writers)
    names = [file.name for file in plan.files]
    assert sorted(set(names)) == names
    assert plan.total_bytes == sum(tensor.nbytes for tensor in inventory)
    assert plan.weight_map == {t.name: file.name for file in plan.files for t in file.tensors}


def test_files_are_named_as_transformers_names_them() -> None:
    assert [f.name for f in plan_export(tensors(1, 1), 8).files] == ["model.safetensors"]
    assert [f.name for f in plan_export(tensors(1, 1), 4).files] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]


def test_the_writers_of_each_stage_share_its_files() -> None:
    plan = plan_export([*tensors(1, 1, 1), *tensors(1, 1, stage=1)], 4, writers=2)
    assert [(f.stage, f.writer) for f in plan.files] == [(0, 0), (0, 1), (0, 0), (1, 0), (1, 1)]


def test_tensors_of_mixed_width_count_their_bytes() -> None:
    half = RefitTensor("half", (3, 2), torch.bfloat16)
    assert half.nbytes == 12
    assert len(plan_export([*tensors(1), half], 16).files) == 1
    assert len(plan_export([*tensors(1), half], 15).files) == 2


def test_a_file_of_very_many_tensors_is_looked_through_once(tmp_path: Path) -> None:
    """Adapters of all experts are in one file."""
    many = tuple(RefitTensor(f"t{i}", (i % 7,), torch.float32) for i in range(40_000))
    assert DirectoryWriter(tmp_path, [ExportFile("one", 0, 0, many)]).largest_bytes == 24
    assert DirectoryWriter(tmp_path, []).largest_bytes == 0


def test_a_file_that_cannot_be_completed_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(os, "fsync", fail)
    monkeypatch.setattr(os, "fdatasync", fail)
    writer = DirectoryWriter(tmp_path, [ExportFile("one", 0, 0, tuple(tensors(1)))])
    with pytest.raises(OSError, match="no space left") as held:
        writer.put("s0.t0", torch.zeros(1))
    assert held.value.errno == errno.ENOSPC
    writer.close()
    links = (Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd"))
    assert str(tmp_path / "one") not in [os.readlink(link) for link in links if link.is_symlink()]
