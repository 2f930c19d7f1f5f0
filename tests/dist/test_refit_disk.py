"""Weights over a directory: bit-equal, with digests, all or nothing; what is damaged is refused."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_policy.convert import verify
from megatron_policy.converters.formats import hf_writing
from megatron_policy.errors import ExportError, RefitError
from megatron_policy.refit.receive.receiver import Receiver
from megatron_policy.refit.transports.disk import HfDirectory
from tests import oracle
from tests.dist.cases import GLOBAL_BATCH, LOSSES, open_policy, own_share, policy_config
from tests.dist.layouts import LAYOUTS, layout
from tests.dist.test_export import assert_same_tensors, tensors_of
from tests.ranks import RankFailure, RankPool
from tests.refit_engine import SmallEngine, bits

CASES = {
    "one process": LAYOUTS["one process"],
    "TP2xPP2": layout(4, tp=2, pp=2),
    "TP2xCP2+SP": LAYOUTS["TP2xCP2+SP"],
}
UNUSED = {"init_optimizer": False, "init_reference_model": False}
SHARD = 50_000


def refit_train_refit(config: dict[str, Any], path: Path) -> dict[str, Any]:
    """Two refits with a step in between: what is exported, sent, and exchanged for it."""
    data = oracle.make_batch(GLOBAL_BATCH, 13, 251)
    with open_policy(config, init_reference_model=False) as policy:
        exported, sent, calls = [], [], []
        for number in range(2):
            exported.append(bits({name: t.clone() for name, t in policy.export()}))
            before = policy.exporter.calls
            transport = HfDirectory(path / str(number), config["model_name"], max_shard_bytes=SHARD)
            sent.append(list(policy.refit(transport).tensors))
            plan = transport.plan(policy.exporter)
            calls.append(policy.exporter.calls - before - plan.collectives)
            policy.train(own_share(policy, data), LOSSES["token"](), mbs=1)
        return {"exported": exported, "sent": sent, "calls": calls}


def engine_of(path: Path, **options: Any) -> tuple[SmallEngine, Receiver]:
    """An engine of zeros for the model at `path`."""
    weights = {name: torch.zeros_like(tensor) for name, tensor in tensors_of(path).items()}
    expected = {name: (tuple(t.shape), t.dtype) for name, t in weights.items()}
    engine = SmallEngine(weights)
    return engine, Receiver(engine.load, **{"expected": expected, **options})


@pytest.mark.parametrize("name", CASES)
def test_the_engine_has_the_exported_weights_bit_for_bit_and_again_a_step_later(
    ranks: RankPool, checkpoint: Any, tmp_path: Path, name: str
) -> None:
    case, path = CASES[name], checkpoint("qwen2", tied=True, vocab=251)
    engine, receiver = engine_of(path)
    config = policy_config(path, case.megatron)
    results = ranks.run(case.world, refit_train_refit, config, tmp_path)
    for number in range(2):
        assert receiver.receive_directory(tmp_path / str(number)).step == number
        for result in results:
            assert bits(engine.weights) == result["exported"][number]
        sent = [name for result in results for name in result["sent"][number]]
        assert sorted(sent) == sorted(engine.weights), "each tensor by one rank"
    for result in results:
        assert max(result["calls"]) <= 3, "exchanges of all ranks, beside the gathering"
    assert bits(tensors_of(path)) == results[0]["exported"][0] != results[0]["exported"][1]
    found = verify(tmp_path / "0", path)
    assert found.equal and found.has_digests == (True, False)


@pytest.fixture(scope="module")
def exported(ranks: RankPool, checkpoint: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An exported directory of several files."""
    config = policy_config(checkpoint("qwen2", tied=True, vocab=251), LAYOUTS["TP2"].megatron)
    path = tmp_path_factory.mktemp("exported") / "0"
    ranks.run(2, export, config, path)
    return path


@pytest.fixture
def published(exported: Path, tmp_path: Path) -> Path:
    """One of a test's own."""
    return shutil.copytree(exported, tmp_path / "published")


def export(config: dict[str, Any], path: Path) -> None:
    with open_policy(config, **UNUSED) as policy:
        policy.export_hf(path, max_shard_bytes=SHARD, overwrite=True)


def _flip(root: Path) -> None:
    file = max(root.glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)


def _cut(root: Path) -> None:
    file = max(root.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-8])


def _lose_a_file(root: Path) -> None:
    max(root.glob("*.safetensors")).unlink()


def _lose_the_manifest(root: Path) -> None:
    (root / "megatron_policy.json").unlink()


def _damage_the_manifest(root: Path) -> None:
    file = root / "megatron_policy.json"
    file.write_bytes(file.read_bytes().replace(b'"step": 0', b'"step": 9'))


DAMAGE: dict[Callable[[Path], None], str] = {
    _flip: "with a wrong digest",
    _cut: "is damaged|truncated|ends",
    _lose_a_file: "safetensors",
    _lose_the_manifest: "names a step",
    _damage_the_manifest: "contradicts its digest",
    shutil.rmtree: "is not a directory",
}


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_what_is_not_whole_is_refused_and_the_engine_keeps_what_it_had(
    published: Path, damage: Callable[[Path], None]
) -> None:
    engine, receiver = engine_of(published)
    whole = shutil.copytree(published, published.with_name("whole"))
    before = bits(engine.weights)
    damage(published)
    with pytest.raises(RefitError, match=DAMAGE[damage]):
        receiver.receive_directory(published)
    assert bits(engine.weights) == before and receiver.step is None
    receiver.receive_directory(whole)
    assert bits(engine.weights) == bits(tensors_of(whole))


def test_older_weights_and_those_of_another_model_are_refused(published: Path) -> None:
    _, receiver = engine_of(published)
    receiver.step = 1
    with pytest.raises(RefitError, match="step 0 are older than those of step 1"):
        receiver.receive_directory(published)
    smaller = {name: t for name, t in tensors_of(published).items() if "norm" not in name}
    expected = {name: (tuple(t.shape), t.dtype) for name, t in smaller.items()}
    other = Receiver(SmallEngine(smaller).load, expected=expected)
    with pytest.raises(RefitError, match="not the weights of the engine's model"):
        other.receive_directory(published)


def _cannot_write_large_files() -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the write fails instead
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))


def _can_again() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def fail_to_write(config: dict[str, Any], path: Path, culprit: int) -> tuple[str, str]:
    """What this rank hears of a refit and an export in which a rank's files may not grow."""
    with open_policy(config, **UNUSED) as policy:
        if policy.rank == culprit:
            _cannot_write_large_files()
        try:
            with pytest.raises(RefitError) as refit:
                policy.refit(HfDirectory(path, config["model_name"], max_shard_bytes=SHARD))
            with pytest.raises(ExportError) as export:
                policy.export_hf(path, max_shard_bytes=SHARD)
        finally:
            _can_again()
        policy.refit(HfDirectory(path, config["model_name"], max_shard_bytes=SHARD))
        return str(refit.value), str(export.value)


@pytest.mark.parametrize(("name", "culprit"), [("TP2", 0), ("PP2", 1), ("DP2", 1)])
def test_a_file_that_cannot_grow_fails_all_ranks_and_the_next_refit_works(
    ranks: RankPool, checkpoint: Any, tmp_path: Path, name: str, culprit: int
) -> None:
    path = checkpoint("qwen2", tied=True, vocab=251)
    target = tmp_path / "refit"
    config = policy_config(path, LAYOUTS[name].megatron)
    for messages in ranks.run(2, fail_to_write, config, target, culprit):
        for message in messages:
            assert f"rank {culprit}: ExportError: {target} cannot be written: File too" in message
    assert [p.name for p in tmp_path.iterdir()] == ["refit"], "something was left behind"
    assert_same_tensors(target, path)


def die_while_writing(config: dict[str, Any], path: Path) -> None:
    with open_policy(config, **UNUSED) as policy:
        if policy.rank == 1:
            hf_writing.ShardFile.put = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
        policy.export_hf(path, max_shard_bytes=SHARD)


def test_a_rank_killed_while_it_writes_publishes_nothing_and_the_next_export_works(
    ranks: RankPool, checkpoint: Any, tmp_path: Path
) -> None:
    path, target = checkpoint("qwen2", tied=True, vocab=251), tmp_path / "exported"
    config = policy_config(path, LAYOUTS["TP2"].megatron)
    with pytest.raises(RankFailure, match="died: exit code -9"):
        ranks.run(2, die_while_writing, config, target)
    assert not target.exists()
    ranks.run(2, export, config, target)
    assert [p.name for p in tmp_path.iterdir()] == ["exported"]
    assert_same_tensors(target, path)


TIMEOUT_S, STALL_S = 3.0, 7.5


def stall_while_writing(config: dict[str, Any], path: Path) -> float:
    """Rank 1 stops in the middle of a file; how long this rank waits, before one that works."""
    with open_policy(config | {"refit_timeout_s": TIMEOUT_S}, **UNUSED) as policy:
        original = hf_writing.ShardFile.put

        def stall(*args: Any) -> None:
            hf_writing.ShardFile.put = original
            time.sleep(STALL_S)
            original(*args)

        policy.refit(HfDirectory(path, config["model_name"], max_shard_bytes=SHARD))
        if policy.rank == 1:
            hf_writing.ShardFile.put = stall
        started = time.monotonic()
        with pytest.raises(ExportError):
            policy.export_hf(path, max_shard_bytes=SHARD, overwrite=True)
        seconds = time.monotonic() - started
        time.sleep(max(0.0, STALL_S + 1 - seconds))  # as long as the other one is away
        policy.export_hf(path.with_name("second"), max_shard_bytes=SHARD)
        return seconds


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["DP2"])
def test_a_rank_that_stalls_while_it_writes_fails_the_others_in_time(
    ranks: RankPool, checkpoint: Any, tmp_path: Path, name: str
) -> None:
    path = checkpoint("qwen2", tied=True, vocab=251)
    config = policy_config(path, LAYOUTS[name].megatron)
    seconds = ranks.run(2, stall_while_writing, config, tmp_path / "first")
    assert seconds[0] < 2.4 * TIMEOUT_S, "not as a measurement: it is less than the stall"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["first", "second"]
    for written in ("first", "second"):
        assert_same_tensors(tmp_path / written, path)


def refuse_to_replace(config: dict[str, Any], path: Path) -> str:
    with open_policy(config, **UNUSED) as policy:
        with pytest.raises(RefitError) as error:
            policy.refit(HfDirectory(path, config["model_name"]))
        policy.refit(HfDirectory(path, config["model_name"], overwrite=True))
        return str(error.value)


def test_a_directory_is_replaced_on_demand_only(
    ranks: RankPool, published: Path, checkpoint: Any
) -> None:
    path = checkpoint("qwen2", tied=True, vocab=251)
    marker = published / "notes.txt"
    marker.write_text("mine")
    config = policy_config(path, LAYOUTS["TP2"].megatron)
    for message in ranks.run(2, refuse_to_replace, config, published):
        assert f"{published} exists" in message
    assert not marker.exists()
    assert_same_tensors(published, path)
