"""Checkpoints that cannot be read or written: the error says which file and why, the policy and the
checkpoints before stay as they were, and both go on.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from megatron_policy.errors import CheckpointError, ConfigError, ConversionError
from megatron_policy.formats.digests import UNSEALED, sealed
from tests.dist.cases import open_policy
from tests.dist.layouts import LAYOUTS
from tests.dist.resuming import (
    TOKENIZER,
    TRACKER,
    config_of,
    differing,
    drawn,
    everything_of,
    iteration,
    leftovers,
    paths,
    prints,
    replaced,
    resumed,
    train,
    weights_of,
)
from tests.ranks import RankPool
from tests.small_disk import free, small_disk

SIZES = {"layers": 2, "vocab": 251}
TP2 = LAYOUTS["TP2"].megatron
ASYNC = {"checkpoint": {"async_save": True}}
MANIFEST = "checkpoint.json"


@pytest.fixture(scope="module")
def model(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("qwen2", tied=True, **SIZES)


def save_twice(config: dict[str, Any], root: Path) -> dict[str, Any]:
    """Step 1 and step 2, and what there was at the second."""
    with open_policy(config, tokenizer=TOKENIZER) as policy:
        train(policy, range(1))
        policy.save_checkpoint(**paths(root))
        (second,) = train(policy, [1])
        policy.save_checkpoint(**paths(root))
        return {"second": prints({"loss": second["loss"]}), "at 2": prints(weights_of(policy))}


@pytest.fixture(scope="module")
def saved(
    ranks: RankPool, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[dict[str, Any]]]:
    """Where TP2 has saved two steps, and what it was then."""
    root = tmp_path_factory.mktemp("saved") / "run"
    return root, ranks.run(2, save_twice, config_of(model, TP2), root)


def save_once(configs: list[dict[str, Any]], roots: list[Path]) -> None:
    for config, root in zip(configs, roots, strict=True):
        with open_policy(config, init_reference_model=False) as policy:
            train(policy, range(1))
            policy.save_checkpoint(**paths(root))


OTHERS = {"another size": ("qwen2", {"ffn": 96}), "another family": ("qwen3", {})}


@pytest.fixture(scope="module")
def others(
    ranks: RankPool, checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Checkpoints of other models."""
    roots = {name: tmp_path_factory.mktemp("others") / "run" for name in OTHERS}
    made = [checkpoint(family, tied=True, **(SIZES | more)) for family, more in OTHERS.values()]
    ranks.run(1, save_once, [config_of(path) for path in made], list(roots.values()))
    return roots


def flip(path: Path, at: int | None = None) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if at is None else at] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def shards(root: Path) -> list[Path]:
    return sorted(root.glob("*.distcp"))


def flip_in_record(root: Path, where: Callable[[int, int], int]) -> None:
    """A byte of the longest record of the last file; `where` says which, by offset and length."""
    file, records = max(json.loads((root / MANIFEST).read_bytes())["records"].items())
    offset, length, _ = max(records, key=lambda record: record[1])
    flip(root / file, where(offset, length))


def from_the_future(root: Path) -> None:
    content = json.loads((root / MANIFEST).read_bytes())
    content |= {"digest": UNSEALED, "format": content["format"] + 1}
    (root / MANIFEST).write_bytes(sealed(json.dumps(content).encode()))


def exchange_optimizers(root: Path) -> None:
    first, second = (iteration(root / "optimizer", step) for step in (1, 2))
    shutil.rmtree(second)
    first.rename(second)


WEIGHTS, OPTIMIZER = Path("weights/iter_0000002"), Path("optimizer/iter_0000002")
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a tensor's byte": (
        lambda root: flip_in_record(root / WEIGHTS, lambda offset, length: offset + length // 2),
        r"weights/iter_0000002/__1_0\.distcp",
    ),
    "a byte around a tensor": (
        lambda root: flip_in_record(root / WEIGHTS, lambda offset, length: offset + 1),
        r"weights/iter_0000002/__1_0\.distcp",
    ),
    "the last byte of a record": (
        lambda root: flip_in_record(root / WEIGHTS, lambda offset, length: offset + length - 1),
        r"weights/iter_0000002/__1_0\.distcp",
    ),
    "a moment's byte": (
        lambda root: flip_in_record(root / OPTIMIZER, lambda offset, length: offset + length // 2),
        r"optimizer/iter_0000002/__1_0\.distcp",
    ),
    **{
        f"a byte of {name}": (
            lambda root, name=name: flip(root / WEIGHTS / name),
            rf"weights/iter_0000002/{name}",
        )
        for name in (".metadata", "metadata.json", "common.pt", MANIFEST, "hf/config.json")
    },
    "a byte of the optimizer's metadata": (
        lambda root: flip(root / OPTIMIZER / ".metadata"),
        r"optimizer/iter_0000002/\.metadata",
    ),
    "half the metadata": (lambda root: cut(root / WEIGHTS / ".metadata"), r"\.metadata"),
    "half the manifest": (lambda root: cut(root / WEIGHTS / MANIFEST), MANIFEST),
    "half a shard": (lambda root: cut(shards(root / WEIGHTS)[-1]), r"__1_0\.distcp"),
    "half an optimizer shard": (lambda root: cut(shards(root / OPTIMIZER)[0]), r"__0_0\.distcp"),
    "no shard": (lambda root: shards(root / WEIGHTS)[0].unlink(), r"__0_0\.distcp"),
    "no optimizer shard": (lambda root: shards(root / OPTIMIZER)[-1].unlink(), r"__1_0\.distcp"),
    "no metadata": (lambda root: (root / WEIGHTS / ".metadata").unlink(), r"\.metadata"),
    "no manifest": (lambda root: (root / WEIGHTS / MANIFEST).unlink(), MANIFEST),
    "no iteration": (lambda root: shutil.rmtree(root / WEIGHTS), "iter_0000002"),
    "no weights": (lambda root: shutil.rmtree(root / "weights"), "weights"),
    "no optimizer": (lambda root: shutil.rmtree(root / "optimizer"), "fresh_optimizer"),
    "a tracker without a number": (
        lambda root: (root / "weights" / TRACKER).write_text("two"),
        f"{TRACKER}.*two",
    ),
    "a newer version": (lambda root: from_the_future(root / WEIGHTS), f"{MANIFEST}.*format 2"),
    "an optimizer of another save": (exchange_optimizers, "optimizer/iter_0000002"),
}


ABSENT = ("no optimizer", "an optimizer of another save")


def load_what_is_damaged(
    config: dict[str, Any], bad: dict[str, Path], good: Path, bare: dict[str, Any]
) -> dict[str, Any]:
    """What this rank hears of each, what it then differs in, and how it goes on."""
    heard: dict[str, tuple[str, list[str]]] = {}
    starts = []
    for name in ("a tensor's byte", "no optimizer"):
        with pytest.raises(CheckpointError) as error, resumed(config, bad[name]):
            pass
        starts.append(str(error.value))
    with pytest.raises(ConversionError) as refusal, resumed(bare, good):
        pass
    with open_policy(config, tokenizer=TOKENIZER) as policy:
        train(policy, range(1))
        drawn(policy)
        before = prints(everything_of(policy))
        for name, root in bad.items():
            with pytest.raises(CheckpointError) as error:
                policy.load_checkpoint(**paths(root))
            if name not in ABSENT:
                with pytest.raises(CheckpointError):
                    policy.load_checkpoint(**paths(root), fresh_optimizer=True)
            heard[name] = str(error.value), differing(before, prints(everything_of(policy)))
        (second,) = train(policy, [1])
        policy.load_checkpoint(**paths(good))
        loaded = prints(weights_of(policy))
        train(policy, [3])
        fresh = policy.load_checkpoint(good / "weights", fresh_optimizer=True)
        again = prints(weights_of(policy))
        train(policy, [3])
    return {
        "heard": heard,
        "starts": starts,
        "refusal": str(refusal.value),
        "second": prints({"loss": second["loss"]}),
        "loaded": loaded,
        "fresh": (again, dict(fresh.not_restored)),
    }


@pytest.fixture(scope="module")
def attempts(
    ranks: RankPool,
    model: Path,
    saved: tuple[Path, list[dict[str, Any]]],
    others: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> list[dict[str, Any]]:
    """Both ranks try to load each of the damaged checkpoints, in one life."""
    folder = tmp_path_factory.mktemp("damaged")
    bad = {name: shutil.copytree(saved[0], folder / str(n)) for n, name in enumerate(DAMAGE)}
    for name, root in bad.items():
        DAMAGE[name][0](root)
    bare = shutil.copytree(model, folder / "bare", ignore=shutil.ignore_patterns("*.safetensors"))
    configs = [config_of(path, TP2) for path in (model, bare)]
    return ranks.run(2, load_what_is_damaged, configs[0], bad | others, saved[0], configs[1])


WORDS = {name: words for name, (_, words) in DAMAGE.items()} | {
    "another size": "of a different qwen2 model",
    "another family": "of a qwen3 model, but this policy's is qwen2",
}


@pytest.mark.parametrize("name", WORDS)
def test_what_is_not_whole_is_refused_by_name_and_nothing_of_it_is_loaded(
    attempts: list[dict[str, Any]], name: str
) -> None:
    for seen in attempts:
        message, changed = seen["heard"][name]
        assert re.search(WORDS[name], message), message
        assert changed == []


def test_after_all_refusals_the_policy_trains_on_and_loads_what_is_whole(
    attempts: list[dict[str, Any]], saved: tuple[Path, list[dict[str, Any]]]
) -> None:
    for seen, then in zip(attempts, saved[1], strict=True):
        assert seen["second"] == then["second"]
        assert differing(seen["loaded"], then["at 2"]) == []
        weights, not_restored = seen["fresh"]
        assert differing(weights, then["at 2"]) == []
        assert "optimizer" in not_restored


def test_a_policy_that_cannot_start_from_a_checkpoint_says_why_and_leaves_no_trace(
    attempts: list[dict[str, Any]],
) -> None:
    for seen in attempts:
        assert "__1_0.distcp" in seen["starts"][0] and "fresh_optimizer" in seen["starts"][1]
        assert "safetensors" in seen["refusal"], "the reference is the model of the config"


@contextmanager
def large_files_forbidden(forbidden: bool) -> Iterator[None]:
    """Within this context files of this process cannot grow."""
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the write fails instead
    unlimited = resource.RLIM_INFINITY
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000 if forbidden else unlimited, unlimited))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (unlimited, unlimited))
        signal.signal(signal.SIGXFSZ, handler)


def fail_to_save(config: dict[str, Any], root: Path, background: bool) -> list[dict[str, Any]]:
    """What this rank hears of saves that one of them cannot write, and what it loads then."""
    seen = []
    with open_policy(config, tokenizer=TOKENIZER, init_reference_model=False) as policy:
        train(policy, range(1))
        policy.save_checkpoint(**paths(root))
        policy.finalize_async_save()
        for culprit in range(2):
            last = policy.steps
            good = prints(weights_of(policy))
            train(policy, [last])
            before = prints(everything_of(policy))
            with large_files_forbidden(policy.rank == culprit):
                if background:
                    policy.save_checkpoint(**paths(root))
                with pytest.raises(CheckpointError) as error:
                    # The next call after a save in the background, whichever it is.
                    if background and culprit:
                        policy.finalize_async_save()
                    else:
                        policy.save_checkpoint(**paths(root))
            changed = differing(before, prints(everything_of(policy)))
            report = policy.load_checkpoint(**paths(root))
            differ = differing(good, prints(weights_of(policy)))
            train(policy, [last])
            policy.save_checkpoint(**paths(root))
            policy.finalize_async_save()
            seen.append(
                {
                    "message": str(error.value),
                    "changed": changed,
                    "loaded": (report.step - last, differ),
                    "left": [name for at in paths(root).values() for name in leftovers(at)],
                    "complete": sorted(p.name for p in (root / "weights").glob("iter_*")),
                }
            )
    return seen


@pytest.mark.parametrize("background", [False, True], ids=["sync", "async"])
def test_a_file_that_cannot_grow_fails_all_ranks_and_the_next_save_works(
    ranks: RankPool, model: Path, tmp_path: Path, background: bool
) -> None:
    config = config_of(model, TP2, ASYNC if background else {})
    for attempts in ranks.run(2, fail_to_save, config, tmp_path, background):
        for culprit, seen in enumerate(attempts):
            assert f"__{culprit}_0.distcp" in seen["message"]
            assert "File too large" in seen["message"]
            assert seen["changed"] == [] and seen["loaded"] == (0, []) and seen["left"] == []
            assert seen["complete"] == [f"iter_{n:07d}" for n in range(1, culprit + 3)]


def save_where_none_can(config: dict[str, Any], bad: list[Path], good: Path) -> list[str]:
    """What this rank hears of places that cannot be written to, and of data that cannot be kept."""
    heard = []
    with open_policy(config, init_reference_model=False) as policy:
        for root in bad:
            with pytest.raises(CheckpointError) as error:
                policy.save_checkpoint(**paths(root))
            heard.append(str(error.value))
        for data in ({"model": object()}, {"nested": {1: [object()]}}, {"f": train}):
            with pytest.raises(ConfigError, match="host_data"):
                policy.save_checkpoint(**paths(good), host_data=data)
        assert policy.rank or not good.exists(), "written before it was refused"
        policy.save_checkpoint(**paths(good))
        policy.load_checkpoint(**paths(good))
    return heard


@contextmanager
def read_only(path: Path) -> Iterator[Path]:
    """A directory that nobody can write to; skips the test where root cannot be kept from it."""
    if os.geteuid():
        path.mkdir(0o500)
        yield path
        return
    with small_disk(path) as mounted:
        subprocess.run(["mount", "-o", "remount,ro", mounted], check=True)
        yield Path(mounted)


def test_a_place_that_cannot_be_written_to_is_named_and_data_that_are_not_plain_are_refused(
    ranks: RankPool, model: Path, tmp_path: Path
) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("mine")
    with read_only(tmp_path / "read-only") as mounted:
        bad = [in_the_way / "run", mounted / "run"]
        heard = ranks.run(2, save_where_none_can, config_of(model, TP2), bad, tmp_path / "good")
    for file, directory in heard:
        assert str(in_the_way) in file and "Not a directory" in file
        assert str(mounted) in directory and re.search("Read-only|Permission denied", directory)
    assert in_the_way.read_text() == "mine"


def fill_the_disk(config: dict[str, Any], root: Path) -> dict[str, Any]:
    weights = root / "weights"
    with open_policy(config, init_reference_model=False) as policy:
        train(policy, range(1))
        policy.save_checkpoint(weights)
        first = prints(weights_of(policy))
        left = free(str(root))
        train(policy, [1])
        second = prints(weights_of(policy))
        with pytest.raises(CheckpointError) as error:
            policy.save_checkpoint(**paths(root))
        policy.load_checkpoint(weights, fresh_optimizer=True)
        lost = differing(first, prints(weights_of(policy)))
        taken = left - free(str(root))
        train(policy, [1])
        policy.save_checkpoint(weights)
        report = policy.load_checkpoint(weights, fresh_optimizer=True)
        return {
            "message": str(error.value),
            "lost": lost,
            "taken": taken,
            "moved": first != second,
            "step": report.step,
        }


def test_a_full_disk_costs_no_checkpoint_and_no_room(
    ranks: RankPool, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    config = config_of(checkpoint("qwen2", tied=True, layers=1, vocab=251), TP2)
    with small_disk(tmp_path / "disk") as mounted:
        for seen in ranks.run(2, fill_the_disk, config, Path(mounted)):
            assert "No space left on device" in seen["message"] and mounted in seen["message"]
            assert seen["lost"] == [] and seen["taken"] < 50_000 and seen["moved"]
            assert seen["step"] == 2
        assert leftovers(Path(mounted) / "weights") == []


def save_while_one_is_under_way(config: dict[str, Any], root: Path) -> dict[str, Any]:
    """What is complete when the second save returns, and when the policy has left."""
    allowed = threading.Event()

    def late(fsync: Callable[[int], None]) -> Callable[[int], None]:
        def call(fd: int) -> None:
            allowed.wait(60)
            fsync(fd)

        return call

    with open_policy(config, init_reference_model=False) as policy, replaced(os, "fsync", late):
        train(policy, range(1))
        policy.save_checkpoint(**paths(root))
        train(policy, [1])
        before = sorted(p.name for p in (root / "weights").glob("iter_*"))
        threading.Timer(0.5, allowed.set).start()
        policy.save_checkpoint(**paths(root))
        between = (root / "weights" / TRACKER).read_text()
        saved = prints(weights_of(policy))
    after = (root / "weights" / TRACKER).read_text()
    with resumed(config, root, init_reference_model=False) as policy:
        differ = differing(saved, prints(weights_of(policy)))
    return {"before": before, "between": between, "after": after, "differ": differ}


def test_a_save_waits_for_the_one_under_way_and_so_does_leaving(
    ranks: RankPool, model: Path, tmp_path: Path
) -> None:
    for seen in ranks.run(2, save_while_one_is_under_way, config_of(model, TP2, ASYNC), tmp_path):
        assert seen["before"] == [], "the save blocks the training"
        assert seen["between"] in ("1", "2"), "the second did not wait for the first"
        assert seen["after"] == "2" and seen["differ"] == []
