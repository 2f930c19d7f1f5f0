"""Directories appear whole, replace others at once, and come together or not at all."""

from __future__ import annotations

import errno
import multiprocessing
import os
from pathlib import Path

import pytest

from megatron_policy.converters import renaming
from megatron_policy.converters.publishing import (
    clean_leftovers,
    new_directories,
    new_directory,
    publish,
    stage,
)
from megatron_policy.errors import ConfigError

FORK = multiprocessing.get_context("fork")


@pytest.fixture(params=["exchange", "two renames"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """How one directory takes the place of another."""
    if request.param == "two renames":
        monkeypatch.setattr(renaming, "_renameat2", lambda: None)
    elif not can_exchange(tmp_path):
        pytest.skip("this file system cannot exchange two names")
    return request.param


def can_exchange(folder: Path) -> bool:
    for name in ("a", "b"):
        (folder / name).mkdir()
    done = renaming.exchanged(folder / "a", folder / "b")
    for name in ("a", "b"):
        (folder / name).rmdir()
    return done


def write(place: Path, text: str) -> None:
    (place / "metadata.json").write_text(text)
    (place / ".metadata").write_text(text)


def held(*places: Path) -> list[str | None]:
    return [
        (place / ".metadata").read_text() if (place / ".metadata").exists() else None
        for place in places
    ]


def test_a_directory_that_is_replaced_is_never_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not can_exchange(tmp_path):
        pytest.skip("this file system cannot exchange two names")
    out, (done, looks, missed) = tmp_path / "out", (FORK.Value("q", 0) for _ in range(3))
    with new_directory(out) as partial:
        write(partial, "first")

    def look() -> None:
        missed.value += not os.path.isdir(out)
        looks.value += 1

    def look_all_the_time() -> None:
        while not done.value:
            look()

    rename = Path.rename

    def look_after(path: Path, to: Path) -> Path:
        found = rename(path, to)
        look()  # where it would be missed, if two renames replaced it
        return found

    monkeypatch.setattr(Path, "rename", look_after)
    watcher = FORK.Process(target=look_all_the_time, daemon=True)
    watcher.start()
    try:
        while not looks.value:
            assert watcher.is_alive()
        for number in range(30):
            if number % 2:
                with new_directory(out, overwrite=True) as partial:
                    write(partial, str(number))
            else:
                write(stage(out, overwrite=True), str(number))
                publish(tmp_path / ".out.partial", out, overwrite=True)
            assert held(out) == [str(number)]
    finally:
        done.value = 1
        watcher.join(10)
    assert watcher.exitcode == 0 and missed.value == 0
    assert os.listdir(tmp_path) == ["out"]


def test_several_directories_come_together_and_replace_what_was_there(
    tmp_path: Path, way: str
) -> None:
    places = tmp_path / "a" / "one", tmp_path / "b" / "c" / "two"
    for text in ("old", "new"):
        with new_directories(places, overwrite=text == "new") as partials:
            for partial in partials:
                write(partial, text)
            assert held(*places) == [None if text == "old" else "old"] * 2
        assert held(*places) == [text] * 2
    assert [os.listdir(place.parent) for place in places] == [["one"], ["two"]]


@pytest.mark.parametrize("before", ["old", None])
def test_when_one_cannot_be_published_the_others_are_what_they_were(
    tmp_path: Path, way: str, before: str | None
) -> None:
    places = tmp_path / "one", tmp_path / "two"
    if before:
        with new_directories(places) as partials:
            for partial in partials:
                write(partial, before)
    with (
        pytest.raises(ConfigError, match=r"two exists and is no checkpoint"),
        new_directories(places, overwrite=True) as partials,
    ):
        for partial in partials:
            write(partial, "new")
        places[1].mkdir(exist_ok=True)
        for name in os.listdir(places[1]):
            (places[1] / name).unlink()
        (places[1] / "thesis").touch()
    assert held(places[0]) == [before]
    assert os.listdir(places[1]) == ["thesis"]
    assert sorted(os.listdir(tmp_path)) == ["one", "two"] if before else ["two"]


def test_a_failure_leaves_neither_directories_nor_the_parents_they_were_given(
    tmp_path: Path,
) -> None:
    with (
        pytest.raises(RuntimeError, match="full"),
        new_directories([tmp_path / "a" / "b" / "one", tmp_path / "a" / "two"]) as partials,
    ):
        write(partials[0], "half")
        raise RuntimeError("full")
    assert os.listdir(tmp_path) == []


def test_leftovers_of_any_step_go_and_those_in_use_or_of_others_stay(tmp_path: Path) -> None:
    for name in (".iter_0000001.partial-ab", ".iter_0000007.replaced", ".iter_0000008.replaced"):
        (tmp_path / name / "hf").mkdir(parents=True)
    for name in ("iter_0000008", ".other.partial-ab", "iter_0000003", ".iter_notes"):
        (tmp_path / name).mkdir()
    with new_directory(tmp_path / "iter_0000002") as running:
        clean_leftovers(tmp_path)
        assert running.is_dir()
    clean_leftovers(tmp_path / "nowhere")
    kept = {"iter_0000002", "iter_0000003", "iter_0000007", "iter_0000008"}
    assert set(os.listdir(tmp_path)) == kept | {".other.partial-ab", ".iter_notes"}
    assert (tmp_path / "iter_0000007" / "hf").is_dir()
    assert not (tmp_path / "iter_0000008" / "hf").exists()


@pytest.mark.parametrize("names", [["checkpoint.json"], ["__0_0.distcp", "hf"]])
def test_a_training_checkpoint_that_was_damaged_may_be_replaced(
    tmp_path: Path, names: list[str]
) -> None:
    place = tmp_path / "iter_0000002"
    place.mkdir()
    for name in names:
        (place / name).touch()
    with new_directory(place, overwrite=True) as partial:
        write(partial, "new")
    assert held(place) == ["new"] and len(os.listdir(place)) == 2


def test_what_the_system_refuses_is_an_error_and_what_it_cannot_do_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        renaming.exchanged(tmp_path / "a", tmp_path / "b")
    assert caught.value.filename == str(tmp_path / "a")
    for number in (errno.EINVAL, errno.ENOSYS):
        monkeypatch.setattr(renaming.ctypes, "get_errno", lambda number=number: number)
        assert not renaming.exchanged(tmp_path / "a", tmp_path / "b")


def test_leftovers_that_are_whole_are_spared_on_request(tmp_path: Path) -> None:
    for name, file in (("1", "checkpoint.json"), ("2", "half")):
        folder = tmp_path / f".iter_0000001.partial-{name}"
        folder.mkdir()
        (folder / file).write_text("{}")
    clean_leftovers(tmp_path, unless="checkpoint.json")
    assert [path.name for path in tmp_path.iterdir()] == [".iter_0000001.partial-1"]
    clean_leftovers(tmp_path)
    assert not list(tmp_path.iterdir())
