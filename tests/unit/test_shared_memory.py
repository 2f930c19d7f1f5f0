"""Shared memory without a name: another process reads it, and nothing of it is ever left."""

from __future__ import annotations

import gc
import multiprocessing as mp
import os
import resource
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_policy.errors import RefitError
from megatron_policy.refit.transports.ipc import shared_memory
from megatron_policy.refit.transports.ipc.shared_memory import (
    DIRECTORY,
    ExportedBuffer,
    SharedMemory,
    attach,
    create,
    open_exported,
    read_handle,
)
from tests.other_process import OtherProcess, shared_memory_of
from tests.small_disk import MIB, free, small_disk

FORK = mp.get_context("fork")
HOST = torch.device("cpu")


@pytest.fixture(scope="module")
def other() -> Iterator[OtherProcess]:
    process = OtherProcess()
    yield process
    process.kill()


@pytest.fixture
def memory() -> Iterator[SharedMemory]:
    made = create(5000)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    gc.collect()
    assert shared_memory_of("self") == []


def read(handle: Any) -> tuple[bytes, list[str]]:
    """The memory's bytes, and what stays open when it is closed."""
    found = attach(handle)
    content = found.tensor().numpy().tobytes()
    assert found.close()
    return content, shared_memory_of("self")


def scribble(handle: Any) -> int:
    found = attach(handle)
    found.tensor().fill_(7)
    return int(found.tensor().sum())


def test_another_process_reads_what_is_written_and_writes_and_keeps_nothing(
    memory: SharedMemory, other: OtherProcess
) -> None:
    for value in (1, 2):
        memory.tensor().fill_(value)
        assert other.call(read, memory.handle()) == (bytes([value]) * 5000, [])
    memory.tensor().fill_(1)
    assert other.call(scribble, memory.handle()) == 7 * 5000
    assert int(memory.tensor().sum()) == 5000


def test_nobody_sees_a_file(memory: SharedMemory, tmp_path: Path) -> None:
    assert "(deleted)" in os.readlink(f"/proc/self/fd/{memory.handle().fd}")
    elsewhere = create(100, str(tmp_path))
    assert os.listdir(tmp_path) == []
    assert elsewhere.close()


def forked(function: Any) -> tuple[Any, Any]:
    """Our end of the pipe that the function is called with, and its process."""
    ours, theirs = FORK.Pipe()
    process = FORK.Process(target=function, args=(theirs,))
    process.start()
    return ours, process


def test_a_process_forked_meanwhile_does_not_keep_it(memory: SharedMemory) -> None:
    ours, process = forked(
        lambda pipe: pipe.send([x for x in shared_memory_of("self") if "-" in x.split()[0]])
    )
    assert ours.recv() == []
    process.join()


def make_and_be_killed(pipe: Any) -> None:
    made = create(MIB)
    pipe.send(made.handle())
    pipe.recv()


def test_the_memory_of_a_killed_process_is_gone_and_its_handle_refused() -> None:
    ours, process = forked(make_and_be_killed)
    handle = ours.recv()
    attached = attach(handle)
    process.kill()
    process.join()
    assert attached.close()
    with pytest.raises(RefitError, match="same machine"):
        attach(handle)


@pytest.mark.parametrize(
    "changes",
    [
        lambda h: {"started": h.started - 1},  # its process's number was given to another
        lambda h: {"inode": h.inode + 1},
        lambda h: {"nbytes": h.nbytes + 1},
        lambda h: {"fd": 0},
        lambda h: {"fd": 4000},
        lambda h: {"pid": 2**22 + 1},
    ],
)
def test_a_handle_of_something_else_is_refused(memory: SharedMemory, changes: Any) -> None:
    handle = memory.handle()
    with pytest.raises(RefitError, match="send the weights again"):
        attach(replace(handle, **changes(handle)))


def test_a_closed_memory_cannot_be_opened_and_is_unmapped_with_the_last_tensor(
    memory: SharedMemory,
) -> None:
    handle, view = memory.handle(), memory.tensor()[3:5]
    assert not memory.close()
    del view
    assert memory.close() and memory.close()
    with pytest.raises(RefitError):
        attach(handle)


def test_a_file_system_that_knows_no_nameless_files_is_not_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: OtherProcess
) -> None:
    real = os.open

    def refusing(path: Any, flags: int, *rest: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(95, "Operation not supported")
        return real(path, flags, *rest)

    monkeypatch.setattr(shared_memory.os, "open", refusing)
    made = create(64, str(tmp_path))
    made.tensor().fill_(9)
    monkeypatch.undo()
    assert other.call(read, made.handle())[0] == bytes([9]) * 64
    assert made.close()


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[str]:
    with small_disk(tmp_path / "tiny") as path:
        yield path


def test_a_full_file_system_is_an_error_with_numbers_and_less_still_fits(tiny: str) -> None:
    assert free(tiny) == MIB
    with pytest.raises(RefitError, match=r"2,097,152 bytes .*1,048,576 bytes free.*--shm-size"):
        create(2 * MIB, tiny)
    assert free(tiny) == MIB
    made = create(MIB // 2, tiny)
    with pytest.raises(RefitError):
        create(MIB, tiny)
    view = made.tensor().fill_(1)
    assert free(tiny) <= MIB // 2 and not made.close()
    assert free(tiny) == MIB, "though a tensor of it is held"
    view.sum()  # and can be read
    with pytest.raises(RefitError, match="/nowhere"):
        create(1, "/nowhere")
    assert DIRECTORY == "/dev/shm"


def say_limited(pipe: Any) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, MIB))
    with pytest.raises(RefitError) as refused:
        create(2 * MIB)
    made = create(MIB).close()
    pipe.send((str(refused.value), made, shared_memory_of("self")))


def test_memory_that_may_not_grow_is_an_error_and_leaves_nothing() -> None:
    ours, process = forked(say_limited)
    refused, made, left = ours.recv()
    process.join()
    assert "2,097,152 bytes" in refused and made is True and left == []


def test_an_exported_buffer_is_gone_when_it_is_closed_although_somebody_holds_it() -> None:
    exported = ExportedBuffer(1000, HOST)
    held = exported.buffer
    held.typed(torch.float32).fill_(2)
    handle, rebuild = exported.handle(), exported.rebuild(torch.float32)
    sums: list[float] = []
    for each in (handle, read_handle(rebuild)):
        open_exported(each, lambda memory: sums.append(float(memory.view(torch.float32).sum())))
    function, arguments = rebuild
    changed = [*arguments[:6], 3, *arguments[7:]]  # as the host's receivers do
    sums.append(float(function(*changed).sum()))
    assert sums == [512.0] * 3
    exported.close()
    assert held.memory.numel() == 0 and shared_memory_of("self") == []
    with pytest.raises(RefitError):
        open_exported(handle, print)


def test_an_error_that_is_kept_does_not_keep_the_memory_and_who_keeps_a_tensor_is_told() -> None:
    exported = ExportedBuffer(1000, HOST)

    def fail(memory: torch.Tensor) -> None:
        part = memory[5:]
        try:
            raise KeyError(str(part.sum()))
        except KeyError as error:
            raise RefitError("no") from error

    with pytest.raises(RefitError) as raised:
        open_exported(exported.handle(), fail)
    exported.close()
    assert shared_memory_of("self") == [] and str(raised.value) == "no"
    exported = ExportedBuffer(1000, HOST)
    kept: list[torch.Tensor] = []
    with pytest.raises(RefitError, match="copy what it keeps"):
        open_exported(exported.handle(), kept.append)
    kept.clear()
    exported.close()


@pytest.mark.parametrize("rebuild", [(os.system, ("true",)), None, (1, 2, 3), ("x", ())])
def test_only_the_two_kinds_of_handles_are_opened(rebuild: Any) -> None:
    with pytest.raises(RefitError, match="handle"):
        read_handle(rebuild)
