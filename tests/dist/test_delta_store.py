"""A chain of deltas in an object store is followed as one in a directory is, and a store that fails
costs no more than a refit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from megatron_policy.errors import ConfigError, MissingPackageError, RefitError
from megatron_policy.refit.deltas.chain import MANIFEST
from megatron_policy.refit.exporter import stream_tensors
from megatron_policy.refit.receive.receiver import Receiver
from megatron_policy.refit.transports.deltas import DeltaDirectory, find_staging
from tests.dist.cases import UNUSED, open_policy, policy_config
from tests.dist.refits import LAYOUTS
from tests.dist.resuming import replaced
from tests.dist.test_delta_refit import (
    BUCKET,
    CASES,
    PHASES,
    Follower,
    chain_in,
    die,
    disturb,
    follow,
    publish,
)
from tests.dist.test_detached_refit import PEFT, SIZES, bits_of
from tests.dist.test_export import tensors_of
from tests.ranks import RankFailure, RankPool
from tests.refit_engine import bits

RANKS_SHARE = "local://"
"""A store that processes of this machine share: fsspec's local files, without renames."""


IN_MEMORY, LOSSES, ADAPTERS = "memory://run", "memory://losses", "memory://adapters"
"""Places in the store of a process, which lasts as long as that."""


def share_folders(call: Callable[..., Any], *args: Any) -> Any:
    """What `call` returns where objects of `RANKS_SHARE` need no folders."""
    fsspec.config.conf["local"] = {"auto_mkdir": True}
    return call(*args)


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=[pytest.mark.daily] * (c == "tp2")) for c in CASES],
)
def test_a_chain_in_a_store_equals_whole_exports(
    ranks: RankPool, checkpoint: Any, tmp_path: Path, case: str
) -> None:
    family, layout, sizes, top = CASES[case]
    world, section = LAYOUTS[layout]
    path = checkpoint(family, **SIZES | {"vocab": 251} | sizes)
    config = policy_config(path, section | top.get("megatron_cfg", {}), refit_bucket_bytes=BUCKET)
    config |= {key: value for key, value in top.items() if key != "megatron_cfg"}
    root = f"{RANKS_SHARE}{tmp_path}/chain"
    first, *_ = ranks.run(world, share_folders, follow, config, root, 9)
    assert not first["wrong"] and first["loads"][0] == 10
    found = tmp_path / "chain"
    chain = share_folders(chain_in, root)
    assert {each.name for each in found.iterdir()} == {MANIFEST, chain.name}
    kept = {f"{version.number:08d}" for version in chain.whole}
    assert {each.name for each in (found / chain.name).iterdir() if each.is_dir()} >= kept
    assert not list_left(root)


def list_left(url: str) -> list[Path]:
    """What trainers of that URL have left on this machine."""
    staging = find_staging(url)
    return list(staging.parent.glob(f".{staging.name}.*"))


def forms_of(path: Path) -> dict[str, Any]:
    return {name: (tuple(t.shape), t.dtype) for name, t in tensors_of(path).items()}


@contextmanager
def failing(name: str, at: int, error: Exception, half: bool) -> Iterator[None]:
    """The store fails in a call of that method; `half` of what it writes is there as a part."""
    calls = iter(range(1, 1000))

    def fail(call: Callable[..., Any]) -> Callable[..., Any]:
        def act(store: Any, *args: Any, **options: Any) -> Any:
            if next(calls) != at:
                return call(store, *args, **options)
            if half:
                call(store, f"{args[0]}.part", args[1][: len(args[1]) // 2])
            raise error

        return act

    with replaced(MemoryFileSystem, name, fail):
        yield


FAULTS: dict[str, tuple[str, int, bool]] = {
    "the list": ("find", 1, False),
    "a file of a whole version": ("put_file", 2, False),
    "a delta, halfway": ("pipe_file", 2, True),
    "the manifest": ("pipe_file", 3, False),
}
"""A method of a store, and in which call of a second refit, or of a first one, it fails."""


def publish_despite(path: Path) -> None:
    """Refits of which some fail: the engine keeps what it has, and has all of the next one."""
    with open_policy(policy_config(path, {}), **UNUSED) as policy:
        follower, to = Follower(forms_of(path), IN_MEMORY), DeltaDirectory(IN_MEMORY)
        had = bits(follower.engine.weights)
        for number, (name, at, half) in enumerate(FAULTS.values()):
            fault = PermissionError("no credentials")
            policy.exporter.published.clear()  # the next one is whole
            with failing(name, at, fault, half), pytest.raises(RefitError) as raised:
                for _ in range(2):
                    disturb(policy, number, 0.1)
                    policy.refit(to)
                    had = follower.receive()
            said = str(raised.value)
            assert IN_MEMORY in said and "no credentials" in said and "has this process" in said
            with suppress(RefitError):  # nothing was published yet
                follower.receive()
            assert bits(follower.engine.weights) == had
            policy.refit(to)
            had = follower.receive()
            assert had == bits_of(policy)
            names = {each.split("/")[2] for each in MemoryFileSystem().find("/run")}
            assert names == {MANIFEST, chain_in(IN_MEMORY).name}


def test_a_store_that_fails_costs_one_refit(ranks: RankPool, checkpoint: Any) -> None:
    ranks.run(1, publish_despite, checkpoint("qwen2", **SIZES))


def publish_past_loss(path: Path) -> None:
    """Engines while objects go that the manifest names, and while two policies publish."""
    store = MemoryFileSystem()
    with open_policy(policy_config(path, {}), **UNUSED) as policy:
        to, forms = DeltaDirectory(LOSSES, whole_every=3), forms_of(path)
        late = Follower(forms, LOSSES)
        with pytest.raises(RefitError, match="published nothing"):
            late.receive()
        for number in range(3):
            disturb(policy, number, 0.1)
            policy.refit(to)
        chain = chain_in(LOSSES)
        store.rm_file(f"/losses/{chain.name_file(1, 0)}")
        with pytest.raises(RefitError, match="is gone"):
            late.receive()
        gone = policy.refit(to).why_whole  # a new chain: the old one is not whole
        assert gone == "files that were published there are gone"
        assert late.receive() == bits_of(policy) and chain_in(LOSSES).name != chain.name
        chain = chain_in(LOSSES)
        store.rm_file(f"/losses/{chain.name_whole(0)}/model.safetensors")
        with pytest.raises(RefitError):
            Follower(forms, LOSSES).receive()
        assert late.receive() == bits_of(policy)
        for number in range(8):  # as if there were another policy
            kept = policy.exporter.published.pop(LOSSES)
            disturb(policy, number, 0.1)
            policy.refit(to)
            assert late.receive() == bits_of(policy)
            policy.exporter.published[LOSSES] = kept
            assert policy.refit(to).why_whole == f"{MANIFEST} there is not what was published last"
            assert late.receive() == bits_of(policy)
        newest = chain_in(LOSSES)
        assert len({name.split("/")[2] for name in store.find("/losses")}) == 2
        assert newest.name != kept.chain.name


def test_objects_that_go_and_two_trainers_of_one_store_leave_engines_whole(
    ranks: RankPool, checkpoint: Any
) -> None:
    ranks.run(1, publish_past_loss, checkpoint("qwen2", **SIZES))


def publish_adapters(path: Path, megatron: dict[str, Any]) -> None:
    with open_policy(policy_config(path, megatron), **UNUSED) as policy:
        exporter = policy.exporter.select(adapters=True)
        follower = Follower(exporter.plan().info(), ADAPTERS)
        for number in range(4):
            disturb(policy, number, 0.1)
            policy.refit(DeltaDirectory(ADAPTERS, whole_every=2), adapters=True)
            now = {n: t.clone() for n, t in stream_tensors(exporter, exporter.plan(as_stored=True))}
            assert follower.receive() == bits(now)
        assert follower.receiver.model.adapters is not None


def test_a_store_has_adapters_alone(ranks: RankPool, checkpoint: Any) -> None:
    ranks.run(1, publish_adapters, checkpoint("qwen2", **SIZES), PEFT)


def test_urls_that_name_no_place_are_refused() -> None:
    for url, said in {"nowhere://run": "Protocol not known", "memory://": "has no name"}.items():
        for act in (DeltaDirectory, Receiver(lambda weights: None).receive_deltas):
            with pytest.raises(ConfigError, match=said):
                act(url)
    if find_spec("s3fs") is None:
        with pytest.raises(MissingPackageError, match="s3fs reads and writes s3:// URLs"):
            DeltaDirectory("s3://bucket/run")


@pytest.mark.parametrize("phase", [p for p in PHASES if p != "after a version is published"])
def test_a_trainer_killed_in_any_phase_leaves_a_store_that_can_be_followed(
    ranks: RankPool, checkpoint: Any, tmp_path: Path, phase: str
) -> None:
    path, root = checkpoint("qwen2", **SIZES), f"{RANKS_SHARE}{tmp_path}/chain"
    follower = Follower(forms_of(path), root)
    with pytest.raises(RankFailure, match="died: exit code -9"):
        ranks.run(2, share_folders, die, path, LAYOUTS["tp2"][1], root, phase, 2, tmp_path)
    moments = [torch.load(file) for file in tmp_path.glob("*.bits")]
    assert len(list_left(root)) == (phase == "while a whole version is written")
    try:
        assert share_folders(follower.receive) in moments
    except RefitError:
        assert phase == "while a whole version is written", "the first two were published"
    section = LAYOUTS["tp2"][1]
    seen, *_ = ranks.run(2, share_folders, publish, path, section, root, [200, 201])
    assert follower.receive() == seen[-1] and not list_left(root)
