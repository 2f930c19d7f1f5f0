"""Conversion with little memory, on a full disk, and killed: never more, never half of it."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_policy.convert import convert, verify
from megatron_policy.converters.formats.hf_config import read_config
from megatron_policy.converters.formats.safetensors_format import encode
from megatron_policy.converters.table import bind
from megatron_policy.errors import ConfigError, ExportError
from tests.ranks import ENVIRONMENT, ROOT

MIB = 2**20
FORK = multiprocessing.get_context("fork")
SMALL = {"layers": 4, "vocab": 250}

MODELS = {
    "a large embedding": {
        "model_type": "qwen2",
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": 100_003,
        "tie_word_embeddings": True,
    },
    "transposed experts stacked in one tensor": {
        "model_type": "gpt_oss",
        "hidden_size": 768,
        "intermediate_size": 2000,
        "num_hidden_layers": 1,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "num_local_experts": 14,
        "vocab_size": 1000,
        "layer_types": ["sliding_attention"],
    },
}

MEASURED = """
import sys
from pathlib import Path
from megatron_policy.convert import convert
from torch.distributed.checkpoint import filesystem, metadata  # imported when it writes

def memory(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(field))) * 1024

before = memory("VmRSS")
folder, dtype = Path(sys.argv[1]), sys.argv[2]
convert(folder / "source", folder / "mcore", "mcore", max_memory=8 * 2**20)
convert(folder / "mcore", folder / "hf", "hf", dtype=dtype, max_memory=8 * 2**20)
print(memory("VmHWM") - before)
"""


def write_zeros(path: Path, fields: dict[str, Any]) -> int:
    """A checkpoint of that config whose weights are all zero, which takes no time; its largest
    tensor's bytes.
    """
    path.mkdir()
    (path / "config.json").write_text(json.dumps(fields))
    shapes = bind(read_config(path)).hf_shapes()
    header, places = encode({name: (torch.bfloat16, shape) for name, shape in shapes.items()})
    file = path / "model.safetensors"
    file.write_bytes(header)
    os.truncate(file, max(place.end for place in places.values()))
    return max(place.end - place.start for place in places.values())


@pytest.mark.dear
@pytest.mark.parametrize(("model", "dtype"), zip(MODELS, ("float32", "bfloat16"), strict=True))
def test_memory_is_bounded_whatever_the_largest_tensor(tmp_path, model: str, dtype: str) -> None:
    largest = write_zeros(tmp_path / "source", MODELS[model])
    # What transformers imports to read a config is the greater part of this.
    allowed = 8 * MIB + 45 * MIB
    assert largest > 1.5 * allowed
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, str(tmp_path), dtype],
        env=os.environ | ENVIRONMENT,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < allowed


def run_forked(*arguments: Any, file_size: int | None = None, **options: Any) -> BaseProcess:
    """`convert` in a process of its own, which ends with the number of its outcome."""
    process = FORK.Process(target=_forked, args=(arguments, options, file_size))
    process.start()
    return process


DONE, REFUSED, NOT_WRITTEN = 0, 20, 21


def _forked(arguments: Any, options: Any, file_size: int | None) -> None:
    if file_size is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_size, file_size))
    code = DONE
    try:
        convert(*arguments, **options)
    except ConfigError:
        code = REFUSED
    except ExportError as error:
        assert "cannot be written: File too large" in str(error)
        code = NOT_WRITTEN
    os._exit(code)


def leftovers(folder: Path) -> list[str]:
    return [name for name in os.listdir(folder) if name.startswith(".")]


class KillAt:
    """Ends this process once that many bytes are converted."""

    def __init__(self, share: float) -> None:
        self.share = share

    def __call__(self, done: int, total: int) -> None:
        if done >= self.share * total:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("to", ["mcore", "hf"])
def test_a_killed_conversion_leaves_all_or_nothing_and_can_be_repeated(
    checkpoint, tmp_path, to: str
) -> None:
    path = source = checkpoint("qwen2", **SMALL)
    if to == "hf":
        source = tmp_path / "source"
        convert(path, source, "mcore")
    out = tmp_path / "out"
    out.mkdir()
    for share in (0.01, 0.5, 1.0):
        process = run_forked(source, out / "x", to, progress=KillAt(share))
        process.join()
        assert process.exitcode == -signal.SIGKILL and not (out / "x").exists()
    choose = random.Random(to)
    started = time.monotonic()
    run_forked(source, out / "first", to).join()
    takes = time.monotonic() - started
    for _ in range(4):  # whenever it is, during or after
        process = run_forked(source, out / "x", to)
        time.sleep(choose.uniform(0, takes))
        process.kill()
        process.join()
        if (out / "x").exists():
            assert verify(path, out / "x").equal
            # It is there, so without `overwrite` it stays.
            with pytest.raises(ConfigError, match="exists"):
                convert(source, out / "x", to)
            (out / "x").rename(tmp_path / f"x{time.monotonic_ns()}")
    convert(source, out / "x", to)
    assert verify(path, out / "x").equal
    assert leftovers(out) == []


@pytest.mark.parametrize("share", [0.01, 0.5, 1.0])
def test_a_checkpoint_to_replace_survives_whoever_is_killed_replacing_it(
    checkpoint, tmp_path, share: float
) -> None:
    old, new, out = checkpoint("qwen2", **SMALL), checkpoint("llama", **SMALL), tmp_path / "out"
    convert(old, out, "mcore")
    process = run_forked(new, out, "mcore", overwrite=True, progress=KillAt(share))
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert verify(old, out).equal and len(leftovers(tmp_path)) == 1
    convert(new, out, "mcore", overwrite=True)
    assert verify(new, out).equal and leftovers(tmp_path) == []


def test_a_checkpoint_moved_aside_by_a_killed_process_comes_back(checkpoint, tmp_path) -> None:
    out = tmp_path / "out"
    convert(checkpoint("qwen2", **SMALL), out, "mcore")
    out.rename(tmp_path / ".out.replaced")  # as between the two renames that replace it
    with pytest.raises(ConfigError, match="exists"):
        convert(checkpoint("llama", **SMALL), out, "mcore")
    assert verify(checkpoint("qwen2", **SMALL), out).equal and os.listdir(tmp_path) == ["out"]


class WaitFor:
    """Holds a conversion up halfway until a file is there."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __call__(self, done: int, total: int) -> None:
        if done > total // 2:
            self.file.with_suffix(".waiting").touch()
            while not self.file.exists():
                time.sleep(0.01)


@pytest.mark.parametrize("overwrite", [False, True])
def test_two_conversions_to_one_place_do_not_destroy_each_other(
    checkpoint, tmp_path, overwrite: bool
) -> None:
    one, other = checkpoint("qwen2", **SMALL), checkpoint("llama", **SMALL)
    out, go = tmp_path / "out", tmp_path / "go"
    slow = run_forked(one, out, "mcore", overwrite=overwrite, progress=WaitFor(go))
    while not go.with_suffix(".waiting").exists():
        assert slow.is_alive()
        time.sleep(0.01)
    convert(other, out, "mcore", overwrite=overwrite)
    assert verify(other, out).equal
    go.touch()
    slow.join()
    assert slow.exitcode == (DONE if overwrite else REFUSED)
    assert verify(one if overwrite else other, out).equal
    assert leftovers(tmp_path) == []


def test_an_interrupted_conversion_leaves_nothing(checkpoint, tmp_path) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(checkpoint("qwen2"), tmp_path / "a" / "b" / "out", "mcore", progress=interrupt)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("to", ["mcore", "hf"])
@pytest.mark.parametrize("size", [1000, 100_000, 300_000])
def test_a_file_that_may_not_grow_fails_the_conversion_and_leaves_nothing(
    checkpoint, tmp_path, size: int, to: str
) -> None:
    source = checkpoint("qwen2", **SMALL)
    if to == "hf":
        convert(source, tmp_path / "mcore", "mcore")
        source = tmp_path / "mcore"
    before = os.listdir(tmp_path)
    process = run_forked(source, tmp_path / "out", to, file_size=size)
    process.join()
    assert process.exitcode == NOT_WRITTEN
    assert os.listdir(tmp_path) == before


@pytest.fixture
def tiny_disk(tmp_path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("file systems cannot be mounted here")
    yield path
    subprocess.run(["umount", str(path)], check=True)


def test_a_disk_without_room_is_said_before_anything_is_written(checkpoint, tiny_disk) -> None:
    path = checkpoint("qwen2", vocab=4000, layers=4)
    with pytest.raises(ExportError, match=r"needs [\d,]+ bytes"):
        convert(path, tiny_disk / "out", "mcore")
    assert os.listdir(tiny_disk) == []


def test_a_disk_that_fills_up_meanwhile_fails_the_conversion_and_leaves_nothing(
    checkpoint, tiny_disk: Path
) -> None:
    def fill(done: int, total: int) -> None:
        file = tiny_disk / "somebody-elses"
        if not file.exists():
            file.write_bytes(bytes(600_000))

    with pytest.raises(ExportError, match="No space left on device"):
        convert(checkpoint("qwen2", **SMALL), tiny_disk / "out", "mcore", progress=fill)
    assert os.listdir(tiny_disk) == ["somebody-elses"]


def test_a_directory_that_cannot_be_written_is_named(checkpoint, tmp_path) -> None:
    (tmp_path / "file").write_text("x")
    for out in ("file/out", "file"):
        with pytest.raises((ExportError, ConfigError), match="file"):
            convert(checkpoint("qwen2", **SMALL), tmp_path / out, "mcore", overwrite=True)
    assert (tmp_path / "file").read_text() == "x"
