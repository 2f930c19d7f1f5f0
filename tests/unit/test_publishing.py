"""Directories appear whole, replace others at once, and come together or not at all."""

from __future__ import annotations

import errno
import multiprocessing
import os
import shutil
from pathlib import Path

import pytest

from megatron_policy.converters.files import locking, publishing
from megatron_policy.converters.files.publishing import (
    Staged,
    clean_leftovers,
    new_directories,
    new_directory,
)
from megatron_policy.errors import ConfigError

FORK = multiprocessing.get_context("fork")


@pytest.fixture(params=["exchange", "two renames"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """How one directory takes the place of another."""
    if request.param == "two renames":
        monkeypatch.setattr(publishing, "_renameat2", lambda: None)
    elif not can_exchange(tmp_path):
        pytest.skip("this file system cannot exchange two names")
    return request.param


def can_exchange(folder: Path) -> bool:
    places = folder / "a", folder / "b"
    for place in places:
        place.mkdir()
    done = publishing.exchanged(*places)
    for place in places:
        place.rmdir()
    return done


def write(place: Path, text: str) -> None:
    (place / "metadata.json").write_text(text)
    (place / ".metadata").write_text(text)


def held(*places: Path) -> list[str | None]:
    files = [place / ".metadata" for place in places]
    return [file.read_text() if file.exists() else None for file in files]


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
                staged = Staged([out], overwrite=True)
                write(staged.partials[0], str(number))
                staged.publish()
            assert held(out) == [str(number)]
    finally:
        done.value = 1
        watcher.join(10)
    assert watcher.exitcode == 0 and missed.value == 0
    assert os.listdir(tmp_path) == ["out"]


def test_several_directories_come_together_and_replace_what_was_there_on_request(
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
    with pytest.raises(ConfigError, match="overwrite=True"):
        Staged(places)
    (places[1] / "metadata.json").rename(places[1] / "thesis.tex")
    (places[1] / ".metadata").unlink()
    for overwrite in (False, True):
        with pytest.raises(ConfigError, match="is not a checkpoint"):
            Staged(places[1:], overwrite)
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
        pytest.raises(ConfigError, match=r"two exists and is not a checkpoint"),
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


def test_leftovers_go_and_those_in_use_of_others_or_whole_on_request_stay(tmp_path: Path) -> None:
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
    whole = tmp_path / "on request" / ".iter_0000001.partial-1"
    for place, file in ((whole, "checkpoint.json"), (whole.with_name(f"{whole.name}2"), "half")):
        place.mkdir(parents=True)
        (place / file).write_text("{}")
    clean_leftovers(whole.parent, unless="checkpoint.json")
    assert list(whole.parent.iterdir()) == [whole]
    clean_leftovers(whole.parent)
    assert not list(whole.parent.iterdir())


def test_a_training_checkpoint_that_was_damaged_may_be_replaced(tmp_path: Path) -> None:
    for number, names in enumerate((["checkpoint.json"], ["__0_0.distcp", "hf"])):
        place = tmp_path / f"iter_000000{number}"
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
        publishing.exchanged(tmp_path / "a", tmp_path / "b")
    assert caught.value.filename == str(tmp_path / "a")
    for number in (errno.EINVAL, errno.ENOSYS):
        monkeypatch.setattr(publishing.ctypes, "get_errno", lambda number=number: number)
        assert not publishing.exchanged(tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize("first_to_end", [0, 1])
def test_two_that_write_for_one_destination_have_directories_of_their_own(
    tmp_path: Path, way: str, first_to_end: int
) -> None:
    out = tmp_path / "out"
    both = [Staged([out], overwrite=True) for _ in range(2)]
    for number, staged in enumerate(both):
        write(staged.partials[0], str(number))
    both[first_to_end].publish()
    assert held(out) == [str(first_to_end)]
    both[1 - first_to_end].publish()
    assert held(out) == [str(1 - first_to_end)]
    assert os.listdir(tmp_path) == ["out"]


def test_one_that_gives_up_takes_only_its_own_directory(tmp_path: Path) -> None:
    out = tmp_path / "out"
    lasting, failing = Staged([out]), Staged([out])
    write(lasting.partials[0], "whole")
    failing.drop()
    lasting.publish()
    failing.drop()
    assert held(out) == ["whole"] and os.listdir(tmp_path) == ["out"]


def leave_behind(out: Path) -> None:
    write(Staged([out], overwrite=True).partials[0], "half")
    os._exit(9)


def left_behind(out: Path) -> Path:
    """What a process has left that is dead."""
    process = FORK.Process(target=leave_behind, args=(out,))
    process.start()
    process.join(60)
    assert process.exitcode == 9
    (partial,) = out.parent.glob(f".{out.name}.partial-*")
    return partial


def publish_once(out: Path, text: str) -> None:
    with new_directory(out, overwrite=True) as partial:
        write(partial, text)


def age(place: Path) -> None:
    for path in (*place.iterdir(), place):
        os.utime(path, (0, 0))


def test_what_a_dead_process_wrote_goes_and_another_machines_stays_until_it_is_old(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Machines that share a file system need not see each other's locks."""
    out = tmp_path / "out"
    left_behind(out)
    publish_once(out, "of this machine")
    assert os.listdir(tmp_path) == ["out"] and not caplog.text
    other = left_behind(out)
    other = other.rename(other.with_name(f".out.partial-00000000-{other.name[-12:]}"))
    for text in ("first", "second"):
        publish_once(out, text)
        assert sorted(os.listdir(tmp_path)) == [other.name, "out"]
        assert str(other) in caplog.text and "cannot be checked from here" in caplog.text
        caplog.clear()
    age(other)
    publish_once(out, "third")
    assert os.listdir(tmp_path) == ["out"] and held(out) == ["third"] and not caplog.text


def test_without_locks_what_is_written_beside_stays_and_is_named_until_it_is_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_locks(handle: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(locking.fcntl, "flock", no_locks)
    out = tmp_path / "out"
    running = Staged([out], overwrite=True)
    write(running.partials[0], "running")
    publish_once(out, "first")
    assert str(running.partials[0]) in caplog.text
    running.publish()
    assert held(out) == ["running"]
    age(left_behind(out))
    publish_once(out, "last")
    assert os.listdir(tmp_path) == ["out"] and held(out) == ["last"]


def test_one_that_is_slow_to_remove_what_it_replaced_takes_nothing_of_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where names cannot be exchanged, all of them move the old one aside to the same name."""
    monkeypatch.setattr(publishing, "_renameat2", lambda: None)
    out = tmp_path / "out"
    publish_once(out, "old")
    slow = Staged([out], overwrite=True)
    write(slow.partials[0], "slow")
    remove = publishing._remove_replaced

    def removed_late(old: Path, partial: Path, final: Path) -> None:
        shutil.rmtree(old)
        final.rename(old)  # as by the next, which is killed before it has put its own there
        remove(old, partial, final)

    monkeypatch.setattr(publishing, "_remove_replaced", removed_late)
    slow.publish()
    clean_leftovers(tmp_path, names="out")
    assert held(out) == ["slow"]


def test_a_directory_that_holds_training_checkpoints_is_never_replaced(tmp_path: Path) -> None:
    with new_directory(tmp_path / "mixed") as partial:
        write(partial, "old")
    (tmp_path / "mixed" / "iter_0000002").mkdir()
    with (
        pytest.raises(ConfigError, match=r"mixed holds training checkpoints \(iter_\*\)"),
        new_directory(tmp_path / "mixed", overwrite=True) as partial,
    ):
        write(partial, "new")
    assert held(tmp_path / "mixed") == ["old"]
