"""Every byte of a training checkpoint that is not what was written is found and named."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron_policy.checkpoint import manifest as manifests
from megatron_policy.checkpoint.manifest import NAME, ByteRange, CheckpointManifest
from megatron_policy.checkpoint.verifying import (
    SHOWN,
    check_files,
    records_share,
    verify_records,
)
from megatron_policy.errors import CheckpointError
from megatron_policy.formats.digests import digest_bytes
from tests.unit.training_checkpoints import flip, make_save

WHOLE = (0, 1)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    make_save(tmp_path, 12)
    return tmp_path / "iter_0000012"


def verify(root: Path) -> None:
    found = manifests.read(root)
    check_files(root, found)
    verify_records(root, records_share(found, *WHOLE))


def refused(root: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        verify(root)
    return str(caught.value)


def test_what_was_written_is_accepted_and_each_record_told_of(root: Path) -> None:
    verify(root)
    found, told = manifests.read(root), []
    records = records_share(found, *WHOLE)
    assert len({record[0] for record in records}) == 2
    verify_records(root, records, lambda *numbers: told.append(numbers))
    assert [total for _, total in told] == [found.nbytes] * 3
    assert told[-1][0] == found.nbytes
    verify_records(root, [])


def test_a_flipped_bit_anywhere_is_found_and_its_file_named(root: Path) -> None:
    for path in sorted(path for path in root.rglob("*") if path.is_file()):
        for at in {0, 1, path.stat().st_size // 2, path.stat().st_size - 1}:
            flip(path, at)
            said = refused(root)
            assert f"{path} is damaged" in said and "another checkpoint" in said
            flip(path, at)
    verify(root)


def test_a_damaged_record_is_named_with_its_place_and_its_tensor(root: Path) -> None:
    (name, first, *_), *_ = manifests.read(root).records.items()
    flip(root / name, first[0].offset + 900)
    said = refused(root)
    assert f"the {first[0].length} bytes from 0 on, which hold one.weight, contradict" in said
    # Without the index that says which tensor it is.
    (root / ".metadata").unlink()
    with pytest.raises(CheckpointError, match=f"{first[0].length} bytes from 0 on contradict"):
        verify_records(root, records_share(manifests.read(root), *WHOLE))


def test_every_file_that_is_missing_or_short_is_named(root: Path) -> None:
    for path in sorted(path for path in root.rglob("*") if path.is_file() and path.name != NAME):
        content = path.read_bytes()
        os.truncate(path, len(content) - 1)
        said = refused(root)
        assert str(path) in said and ("damaged" in said or "is truncated: it has" in said)
        path.unlink()
        assert f"{root} lacks {path.relative_to(root)}, which its {NAME} names" in refused(root)
        path.mkdir()
        assert f"{root} lacks {path.relative_to(root)}" in refused(root)
        path.rmdir()
        path.write_bytes(content)
    verify(root)


def test_a_record_that_goes_missing_after_the_files_were_checked_is_named(root: Path) -> None:
    found = manifests.read(root)
    records, path = records_share(found, *WHOLE), root / next(iter(found.records))
    os.truncate(path, found.records[path.name][-1].offset + 5)
    with pytest.raises(CheckpointError, match=f"{path} is truncated: it ends within the"):
        verify_records(root, records)
    path.unlink()
    with pytest.raises(CheckpointError, match=f"{path} cannot be read: No such file"):
        verify_records(root, records)


def test_a_record_larger_than_the_buffer_is_one_digest(tmp_path: Path) -> None:
    content = os.urandom(2**21 + 17)
    (tmp_path / "file").write_bytes(b"xyz" + content)
    share = ("file", 3, len(content), digest_bytes(content))
    verify_records(tmp_path, [share])
    for at in (3, 2**20 + 3, 2**21 + 19):
        flip(tmp_path / "file", at)
        with pytest.raises(CheckpointError, match="from 3 on contradict"):
            verify_records(tmp_path, [share])
        flip(tmp_path / "file", at)


def test_of_many_problems_the_first_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(100))
    with pytest.raises(CheckpointError) as caught:
        verify_records(tmp_path, [("file", at, 1, "wrong") for at in range(100)])
    assert str(caught.value).count("damaged") == SHOWN
    many = {str(number): "00" for number in range(SHOWN + 3)}
    with pytest.raises(CheckpointError, match="and 3 more"):
        check_files(tmp_path, make_manifest({}, files=many))


def make_manifest(lengths: dict[str, list[int]], **fields: object) -> CheckpointManifest:
    records = {}
    for name, each in lengths.items():
        starts = [sum(each[:number]) for number in range(len(each))]
        records[name] = tuple(map(ByteRange, starts, each, [name] * len(each)))
    values = {"id": "", "step": 0, "contains": (), "optimizer_elsewhere": False}
    values |= {"versions": {}, "layout": {}, "family": "", "config": "", "tensors": {}}
    return CheckpointManifest(**values | {"records": records, "files": {}} | fields)


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 64])
@pytest.mark.parametrize(
    "lengths",
    [
        {"a": [10] * 50, "b": [], "c": [20] * 25},
        {"a": [0, 1, 0], "b": [0]},
        {"a": [0]},
        {},
        {"a": [1000], "b": [1] * 10},
    ],
)
def test_shares_are_every_record_once_in_order_and_of_equal_bytes(
    lengths: dict[str, list[int]], parts: int
) -> None:
    found = make_manifest(lengths)
    shares = [records_share(found, part, parts) for part in range(parts)]
    every = [(name, *record) for name, records in found.records.items() for record in records]
    assert [record for share in shares for record in share] == every
    largest = max((length for _, _, length, _ in every), default=0)
    for share in shares:
        assert abs(sum(record[2] for record in share) - found.nbytes / parts) <= largest
