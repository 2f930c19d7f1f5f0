"""Checkpoints that cannot be read or written: the error says which file and why, the policy and the
checkpoints before stay as they were, and both go on.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatron_policy.errors import CheckpointError, ConversionError
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
    large_files_forbidden,
    leftovers,
    paths,
    prints,
    resumed,
    train,
    weights_of,
    writers_held,
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


def save_once(configs: list[dict[str, Any]], roots: list[Path]) -> None:
    for config, root in zip(configs, roots, strict=True):
        with open_policy(config, init_reference_model=False) as policy:
            train(policy, range(1))
            policy.save_checkpoint(**paths(root))


def flip(path: Path, at: int | None = None) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if at is None else at] ^= 1
    path.write_bytes(content)


def flip_in_record(where: Callable[[int, int], int], file: Path) -> None:
    """A byte of the file's longest record; `where` says which, by offset and length."""
    records = json.loads((file.parent / MANIFEST).read_bytes())["records"][file.name]
    offset, length, _ = max(records, key=lambda record: record[1])
    flip(file, where(offset, length))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def put_the_first_in_its_place(second: Path) -> None:
    shutil.rmtree(second)
    iteration(second.parent, 1).rename(second)


WEIGHTS, OPTIMIZER = "weights/iter_0000002", "optimizer/iter_0000002"
FIRST, SECOND = "__0_0.distcp", "__1_0.distcp"
AMID = partial(flip_in_record, lambda offset, length: offset + length // 2)
DAMAGE: list[tuple[str, Callable[[Path], object]]] = [
    (f"{WEIGHTS}/{SECOND}", AMID),
    (f"{WEIGHTS}/{SECOND}", partial(flip_in_record, lambda offset, length: offset + 1)),
    (f"{WEIGHTS}/{SECOND}", partial(flip_in_record, lambda offset, length: offset + length - 1)),
    (f"{OPTIMIZER}/{SECOND}", AMID),
    *(
        (f"{WEIGHTS}/{name}", flip)
        for name in (".metadata", "metadata.json", "common.pt", MANIFEST, "hf/config.json")
    ),
    (f"{OPTIMIZER}/.metadata", flip),
    *((f"{WEIGHTS}/{name}", cut) for name in (".metadata", SECOND)),
    (f"{OPTIMIZER}/{FIRST}", cut),
    *((f"{WEIGHTS}/{name}", Path.unlink) for name in (FIRST, ".metadata", MANIFEST)),
    (f"{OPTIMIZER}/{SECOND}", Path.unlink),
    (WEIGHTS, shutil.rmtree),
    ("weights", shutil.rmtree),
    (f"weights/{TRACKER}", lambda path: path.write_text("two")),
]
"""What is damaged, which is what the refusal names, and how."""
ABSENT: list[tuple[str, Callable[[Path], object]]] = [
    ("optimizer", shutil.rmtree),
    (OPTIMIZER, put_the_first_in_its_place),
]
"""Of these the weights alone can be loaded."""
OTHERS = {
    "of a different qwen2 model": ("qwen2", {"ffn": 96}),
    "of a qwen3 model, but this policy's is qwen2": ("qwen3", {}),
}


def load_what_is_damaged(
    config: dict[str, Any], bad: list[tuple[str, Path]], good: Path, bare: dict[str, Any]
) -> dict[str, Any]:
    """How this rank goes on after it has refused each, by name and without a change."""
    for (_, root), words in ((bad[0], SECOND), (bad[-2], "fresh_optimizer")):
        with pytest.raises(CheckpointError, match=words), resumed(config, root):
            pass
    # The reference is the model of the configuration.
    with pytest.raises(ConversionError, match="safetensors"), resumed(bare, good):
        pass
    with open_policy(config, tokenizer=TOKENIZER) as policy:
        train(policy, range(1))
        drawn(policy)
        before = prints(everything_of(policy))
        for number, (words, root) in enumerate(bad):
            with pytest.raises(CheckpointError) as error:
                policy.load_checkpoint(**paths(root))
            assert all(part in str(error.value) for part in words.rsplit("/", 1)), error.value
            if number < len(bad) - len(ABSENT):
                with pytest.raises(CheckpointError):
                    policy.load_checkpoint(**paths(root), fresh_optimizer=True)
            assert differing(before, prints(everything_of(policy))) == [], words
        (second,) = train(policy, [1])
        policy.load_checkpoint(**paths(good))
        loaded = prints(weights_of(policy))
        train(policy, [3])
        fresh = policy.load_checkpoint(good / "weights", fresh_optimizer=True)
        again = prints(weights_of(policy))
        train(policy, [3])
    return {
        "second": prints({"loss": second["loss"]}),
        "loaded": loaded,
        "fresh": (again, dict(fresh.not_restored)),
    }


def test_what_is_not_whole_is_refused_by_name_and_leaves_a_policy_that_trains_on(
    ranks: RankPool, model: Path, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    good = tmp_path / "good"
    saved = ranks.run(2, save_twice, config_of(model, TP2), good)
    others = [(words, tmp_path / str(number)) for number, words in enumerate(OTHERS)]
    made = [checkpoint(family, tied=True, **(SIZES | more)) for family, more in OTHERS.values()]
    ranks.run(1, save_once, [config_of(path) for path in made], [root for _, root in others])
    damaged = []
    for number, (name, damage) in enumerate([*DAMAGE, *ABSENT]):
        damaged.append((name, shutil.copytree(good, tmp_path / f"damaged {number}")))
        damage(tmp_path / f"damaged {number}" / name)
    bad = [*damaged[: len(DAMAGE)], *others, *damaged[len(DAMAGE) :]]
    bare = shutil.copytree(model, tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors"))
    configs = [config_of(path, TP2) for path in (model, bare)]
    attempts = ranks.run(2, load_what_is_damaged, configs[0], bad, good, configs[1])
    for seen, then in zip(attempts, saved, strict=True):
        assert seen["second"] == then["second"]
        assert differing(seen["loaded"], then["at 2"]) == []
        weights, not_restored = seen["fresh"]
        assert differing(weights, then["at 2"]) == []
        assert "optimizer" in not_restored


def fail_to_save(config: dict[str, Any], root: Path, background: bool) -> None:
    """Saves that one rank cannot write fail on this one, which goes on from the last whole one."""
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
                with pytest.raises(CheckpointError, match="File too large") as error:
                    # The next call after a save in the background, whichever it is.
                    if background and culprit:
                        policy.finalize_async_save()
                    else:
                        policy.save_checkpoint(**paths(root))
            assert f"__{culprit}_0.distcp" in str(error.value)
            assert differing(before, prints(everything_of(policy))) == []
            assert policy.load_checkpoint(**paths(root)).step == last
            assert differing(good, prints(weights_of(policy))) == []
            train(policy, [last])
            policy.save_checkpoint(**paths(root))
            policy.finalize_async_save()
            assert [name for at in paths(root).values() for name in leftovers(at)] == []
            complete = sorted(p.name for p in (root / "weights").glob("iter_*"))
            assert complete == [f"iter_{n:07d}" for n in range(1, culprit + 3)]


@pytest.mark.parametrize("background", [False, True], ids=["sync", "async"])
def test_a_file_that_cannot_grow_fails_all_ranks_and_the_next_save_works(
    ranks: RankPool, model: Path, tmp_path: Path, background: bool
) -> None:
    config = config_of(model, TP2, ASYNC if background else {})
    ranks.run(2, fail_to_save, config, tmp_path, background)


def save_where_none_can(config: dict[str, Any], bad: dict[Path, str], good: Path) -> None:
    """Places that cannot be written to are named, with the reason, and another one is taken."""
    with open_policy(config, init_reference_model=False) as policy:
        for root, why in bad.items():
            with pytest.raises(CheckpointError, match=why) as error:
                policy.save_checkpoint(**paths(root))
            assert str(root.parent) in str(error.value)
        policy.save_checkpoint(**paths(good))
        policy.load_checkpoint(**paths(good))


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


def test_a_place_that_cannot_be_written_to_is_named(
    ranks: RankPool, model: Path, tmp_path: Path
) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("mine")
    with read_only(tmp_path / "read-only") as mounted:
        bad = {in_the_way / "run": "Not a directory"}
        bad[mounted / "run"] = "Read-only|Permission denied"
        ranks.run(2, save_where_none_can, config_of(model, TP2), bad, tmp_path / "good")
    assert in_the_way.read_text() == "mine"


def fill_the_disk(config: dict[str, Any], root: Path) -> None:
    """A save that does not fit beside the first costs neither that nor any room."""
    weights = root / "weights"
    with open_policy(config, init_reference_model=False) as policy:
        train(policy, range(1))
        policy.save_checkpoint(weights)
        first, left = prints(weights_of(policy)), free(str(root))
        train(policy, [1])
        assert prints(weights_of(policy)) != first
        with pytest.raises(CheckpointError, match="No space left on device") as error:
            policy.save_checkpoint(**paths(root))
        assert str(root) in str(error.value)
        policy.load_checkpoint(weights, fresh_optimizer=True)
        assert differing(first, prints(weights_of(policy))) == []
        assert left - free(str(root)) < 50_000
        train(policy, [1])
        policy.save_checkpoint(weights)
        assert policy.load_checkpoint(weights, fresh_optimizer=True).step == 2


def test_a_full_disk_costs_no_checkpoint_and_no_room(
    ranks: RankPool, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    config = config_of(checkpoint("qwen2", tied=True, layers=1, vocab=251), TP2)
    with small_disk(tmp_path / "disk") as mounted:
        ranks.run(2, fill_the_disk, config, Path(mounted))
        assert leftovers(Path(mounted) / "weights") == []


def save_while_one_is_under_way(config: dict[str, Any], root: Path) -> None:
    """The second save waits for the first, and leaving the policy for both."""
    tracker = root / "weights" / TRACKER
    with open_policy(config, init_reference_model=False) as policy, writers_held() as allowed:
        train(policy, range(1))
        policy.save_checkpoint(**paths(root))
        train(policy, [1])
        assert [*(root / "weights").glob("iter_*")] == [], "the save blocks the training"
        threading.Timer(0.5, allowed.set).start()
        policy.save_checkpoint(**paths(root))
        assert tracker.read_text() in ("1", "2"), "the second did not wait for the first"
        saved = prints(weights_of(policy))
    assert tracker.read_text() == "2"
    with resumed(config, root, init_reference_model=False) as policy:
        assert differing(saved, prints(weights_of(policy))) == []


def test_a_save_waits_for_the_one_under_way_and_so_does_leaving(
    ranks: RankPool, model: Path, tmp_path: Path
) -> None:
    ranks.run(2, save_while_one_is_under_way, config_of(model, TP2, ASYNC), tmp_path)
