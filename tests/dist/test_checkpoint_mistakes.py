"""Ranks that are called differently, fail alone, or are left alone by their script: they stay
together, and what was saved is what was meant.
"""

from __future__ import annotations

import gc
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_policy.checkpoint import manifest, saving, tracker
from megatron_policy.checkpoint.common_state import source_dtypes
from megatron_policy.convert import convert, verify
from megatron_policy.errors import CheckpointError, ConfigError, ConversionError
from megatron_policy.policy import MegatronPolicy
from megatron_policy.workers.worker import MegatronPolicyWorkerImpl
from tests.dist.cases import open_policy
from tests.dist.layouts import FSDP2_LAYOUTS, SIZES, VOCAB, layout
from tests.dist.resuming import (
    TOKENIZER,
    config_of,
    differing,
    everything_of,
    iteration,
    leftovers,
    optimizer_of,
    paths,
    prints,
    replaced,
    train,
    weights_of,
)
from tests.dist.test_launch import ROOT
from tests.ranks import RankPool
from tests.unit.training_checkpoints import flip

ASYNC = {"checkpoint": {"async_save": True}}
TP2 = layout(2, tp=2).megatron
FSDP2 = FSDP2_LAYOUTS["FSDP2 x 2"].megatron
ENGINES = pytest.mark.parametrize(
    "megatron", [pytest.param(TP2, id="TP2"), pytest.param(FSDP2, id="FSDP2 x 2")]
)


@pytest.fixture(scope="module")
def model(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("qwen2", tied=True, **SIZES | {"layers": 1})


def heard(call: Callable[[], object]) -> str:
    try:
        call()
    except (CheckpointError, ConfigError) as error:
        return str(error)
    return "nothing"


def fail_alone(config: dict[str, Any], root: Path) -> None:
    """Calls that only one rank cannot carry out, or makes so, fail on this one."""
    with open_policy(config, tokenizer=TOKENIZER, init_reference_model=False) as policy:
        train(policy, range(1))
        first, save = policy.rank == 0, partial(policy.save_checkpoint, **paths(root))
        (root / "file").write_text("no directory")
        said = heard(lambda: save(tokenizer_path=root / "file" / "x"))
        assert "Not a directory" in said
        beside = {"tokenizer_path": root / "tokenizer"}
        said = heard(lambda: save(**beside, host_data={} if first else {"a": {1}}))
        assert "host_data['a'] is a set" in said and not (root / "tokenizer").exists()
        assert "host_data is a list: give a dict" in heard(lambda: save(host_data=[]))
        said = heard(lambda: policy.save_checkpoint(root / "file"))
        assert f"{root / 'file'} is a file: give a directory to save checkpoints in" in said
        said = heard(lambda: save(hf_export=root / "weights" / "x"))
        assert "choose a separate directory" in said
        elsewhere = paths(root / "other" if first else root)
        assert "call it alike on all ranks" in heard(lambda: policy.save_checkpoint(**elsewhere))
        assert [path for path in root.iterdir() if path.is_dir()] == []
        train(policy, [1])
        save(**beside)
        assert any((root / "tokenizer").iterdir())
        assert "fresh_optimizer" in heard(lambda: policy.load_checkpoint(root / "weights"))
        assert policy.load_checkpoint(**paths(root)).step == 2


@pytest.mark.parametrize(
    ("megatron", "more"),
    [(TP2, {}), (TP2, ASYNC), (FSDP2, ASYNC)],
    ids=["sync", "async", "FSDP2 x 2, async"],
)
def test_a_call_that_one_rank_cannot_make_fails_on_all_and_the_next_works(
    ranks: RankPool, model: Path, tmp_path: Path, megatron: dict[str, Any], more: dict[str, Any]
) -> None:
    ranks.run(2, fail_alone, config_of(model, megatron, more), tmp_path)
    assert leftovers(tmp_path / "weights") == leftovers(tmp_path / "optimizer") == []


SCRIPT = """
import shutil, sys
from tests.dist.resuming import config_of, paths, train
from pathlib import Path
from megatron_policy.policy import MegatronPolicy
policy = MegatronPolicy(
    config_of(sys.argv[1], {"checkpoint": {"async_save": True}}), init_reference_model=False
)
shutil.rmtree(sys.argv[1])  # what a save needs of it is known by now
train(policy, range(1))
policy.save_checkpoint(**paths(Path(sys.argv[2])))
"""


@pytest.mark.nightly
def test_a_script_that_ends_leaves_its_last_save_complete(model: Path, tmp_path: Path) -> None:
    base = shutil.copytree(model, tmp_path / "base")
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT, str(base), str(tmp_path)],
        env=environment | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert not done.returncode, done.stderr[-3000:]
    saved = manifest.read(tracker.find(tmp_path / "weights"))
    assert tracker.companion(saved, tmp_path / "optimizer") == iteration(tmp_path / "optimizer", 1)


def assert_started_anew(policy: MegatronPolicy) -> None:
    """No step was taken, there are no moments, and main parameters are the weights."""
    held = optimizer_of(policy)
    assert all(int(held.pop(name)) <= 0 for name in list(held) if name.endswith(".step"))
    assert all(name.count(".") == 2 for name in held), "no moments, only main parameters"
    if policy.config.megatron_cfg.enabled:
        mains, weights = (
            prints({name: each.bfloat16().view(-1) for name, each in found.items()})
            for found in (held, weights_of(policy))
        )
        assert {*mains.values()} == {*weights.values()}


def save_for_sgd_and_adam(config: dict[str, Any], other: dict[str, Any], root: Path) -> list[str]:
    """Saves under one optimizer, loads under another; what is said without and with leave."""
    with open_policy(config, tokenizer=TOKENIZER) as policy:
        train(policy, range(1))
        policy.save_checkpoint(**paths(root), hf_export=root / "hf")
    with open_policy(other, tokenizer=TOKENIZER) as policy:
        train(policy, [2])  # which makes moments
        refused = heard(lambda: policy.load_checkpoint(**paths(root)))
        report = policy.load_checkpoint(**paths(root), fresh_optimizer=True)
        assert_started_anew(policy)
        train(policy, [1])
        policy.load_checkpoint(root / "weights", fresh_optimizer=True)
        assert_started_anew(policy)
        return [refused, report.not_restored["optimizer"], *report.restored]


@pytest.mark.daily
@pytest.mark.parametrize("engine", ["FSDP2", "Megatron-Core"])
def test_another_optimizer_is_refused_and_started_anew_where_that_is_allowed(
    ranks: RankPool, checkpoint: Callable[..., Path], tmp_path: Path, engine: str
) -> None:
    path = checkpoint("qwen2", tied=True, vocab=VOCAB, layers=1)
    sgd = {"optimizer": {"optimizer": "sgd", "sgd_momentum": 0.9}}
    configs = [config_of(path, more, precision="bfloat16") for more in (sgd, {})]
    if engine == "FSDP2":
        top = {"name": "torch.optim.SGD", "kwargs": {"lr": 0.01, "momentum": 0.9}}
        configs = [
            config_of(path, FSDP2, precision="bfloat16", **more)
            for more in ({"optimizer": top}, {})
        ]
    (seen,) = ranks.run(1, save_for_sgd_and_adam, *configs, tmp_path)
    refused, why, *restored = seen
    assert "needs exp_avg, exp_avg_sq" in refused and "fresh_optimizer" in refused
    assert "momentum_buffer" in why and restored == ["weights", "random numbers"]
    saved = iteration(tmp_path / "weights", 1)
    convert(saved, tmp_path / "converted", to="hf")
    assert set(source_dtypes(saved).values()) == {torch.float32}, "trained in bf16"
    assert verify(tmp_path / "converted", tmp_path / "hf").equal, "bits or dtypes differ"
    flip(saved / "__0_0.distcp", 3000)
    with pytest.raises(ConversionError, match=r"__0_0\.distcp is damaged"):
        convert(saved, tmp_path / "damaged", to="hf")
    assert not (tmp_path / "damaged").exists()


def load_what_one_does_not_find(config: dict[str, Any], root: Path) -> None:
    """Nothing changes if rank 1 alone finds no state of the optimizer."""

    def hidden(companion: Callable[..., Path]) -> Callable[..., Path]:
        return lambda weights, path: companion(weights, Path("/nowhere") if policy.rank else path)

    with open_policy(config, tokenizer=TOKENIZER) as policy:
        train(policy, range(1))
        policy.save_checkpoint(**paths(root))
        train(policy, [1])
        before = prints(everything_of(policy))
        with replaced(tracker, "companion", hidden):
            said = heard(lambda: policy.load_checkpoint(**paths(root), fresh_optimizer=True))
        assert "all ranks have to see the same directories" in said
        assert differing(before, prints(everything_of(policy))) == []


@ENGINES
def test_an_optimizer_that_one_rank_does_not_find_starts_anew_on_none(
    ranks: RankPool, model: Path, tmp_path: Path, megatron: dict[str, Any]
) -> None:
    ranks.run(2, load_what_one_does_not_find, config_of(model, megatron), tmp_path)


def live_bytes() -> int:
    """Of all tensors' memory in this process."""
    gc.collect()
    found = (each for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter))
    storages = (each.untyped_storage() for each in found)
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


def start_anew(config: dict[str, Any], root: Path) -> list[int]:
    """Bytes of this rank's tensors after each time that the optimizer has begun anew."""
    with open_policy(config, tokenizer=TOKENIZER) as policy:
        train(policy, range(1))
        policy.save_checkpoint(**paths(root))
        seen = []
        for number in (1, 2, 3):
            policy.load_checkpoint(root / "weights", fresh_optimizer=True)
            train(policy, [number])
            policy.save_checkpoint(**paths(root))
            policy.finalize_async_save()
            seen.append(live_bytes())
        return seen


@pytest.mark.parametrize("background", [False, True], ids=["sync", "async"])
def test_state_that_was_started_anew_does_not_stay_in_memory(
    ranks: RankPool, model: Path, tmp_path: Path, background: bool
) -> None:
    config = config_of(model, ASYNC if background else {})
    ((first, *others),) = ranks.run(1, start_anew, config, tmp_path)
    assert others == [first, first]


def save_twice(config: dict[str, Any], root: Path) -> None:
    with open_policy(config, tokenizer=TOKENIZER, init_reference_model=False) as policy:
        train(policy, range(2))
        policy.save_checkpoint(**paths(root))
        policy.save_checkpoint(root / "elsewhere", root / "later")


def test_state_that_a_killed_save_put_aside_comes_back_before_anything_is_removed(
    ranks: RankPool, model: Path, tmp_path: Path
) -> None:
    ranks.run(1, save_twice, config_of(model), tmp_path)
    weights, optimizer = (tmp_path / name for name in ("weights", "optimizer"))
    place, aside = iteration(optimizer, 2), optimizer / ".iter_0000002.partial-0123456789ab"
    # As a second save of step 2 leaves it that is killed between its two renames.
    place.rename(aside)
    iteration(tmp_path / "later", 2).rename(place)
    found = manifest.read(tracker.find(weights))
    assert tracker.companion(found, optimizer) == aside
    tracker.reunite(weights, optimizer)
    assert tracker.companion(found, optimizer) == place
    assert manifest.read(aside).id != found.id


def save_an_older_step(config: dict[str, Any], root: Path) -> list[str]:
    """The warnings of saves at steps 1, 2 and, after a load of the first, 1 again."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger(saving.__name__)
    log.addHandler(handler)
    try:
        with open_policy(config, tokenizer=TOKENIZER, init_reference_model=False) as policy:
            for number in range(2):
                train(policy, [number])
                policy.save_checkpoint(**paths(root))
            assert said == []
            policy.load_checkpoint(iteration(root / "weights", 1), root / "optimizer")
            policy.save_checkpoint(**paths(root))
    finally:
        log.removeHandler(handler)
    return said


def test_a_save_of_an_older_step_is_the_one_to_load_and_says_so(
    ranks: RankPool, model: Path, tmp_path: Path
) -> None:
    first, second = ranks.run(2, save_an_older_step, config_of(model, TP2), tmp_path)
    weights = tmp_path / "weights"
    assert first == [
        f"{weights}: step 1 is the one to load now, where step 2 was, which stays; load that by "
        "its own path"
    ]
    assert second == [] and tracker.find(weights) == iteration(weights, 1)
    assert tracker.complete(weights) == [iteration(weights, 1), iteration(weights, 2)]


def export_without_the_model(config: dict[str, Any], model: Path, root: Path) -> None:
    """A save with an export says that the model's directory has gone; one without succeeds."""
    moved = model.with_name("moved")
    with open_policy(config, init_reference_model=False) as policy:
        save = partial(policy.save_checkpoint, **paths(root))

        def rename(old: Path, new: Path) -> None:
            torch.distributed.barrier()
            if policy.rank == 0:
                shutil.move(old, new)
            torch.distributed.barrier()

        rename(model / "config.json", moved)
        said = heard(lambda: save(hf_export=root / "hf"))
        assert f"{model} no longer has its config.json: put it back" in said
        rename(moved, model / "config.json")
        rename(model, moved)
        assert f"model {str(model)!r} is not a directory" in heard(
            lambda: save(hf_export=root / "hf")
        )
        assert not root.exists(), "nothing is written before it is known that all can be"
        torch.distributed.barrier()
        save()
        assert policy.load_checkpoint(**paths(root)).step == 0


def test_a_model_that_has_gone_fails_a_save_with_an_export_before_anything_is_written(
    ranks: RankPool, model: Path, tmp_path: Path
) -> None:
    own = shutil.copytree(model, tmp_path / "model")
    ranks.run(2, export_without_the_model, config_of(own, TP2), own, tmp_path / "run")


def refused_at_once(config: dict[str, Any]) -> None:
    with (
        pytest.raises(
            ConversionError, match=r"notes\.txt is a link to.*MEGATRON_POLICY_LINKS_INTO"
        ),
        open_policy(config),
    ):
        pass


def test_a_link_that_leads_out_of_the_model_is_refused_by_every_rank(
    ranks: RankPool, model: Path, tmp_path: Path
) -> None:
    own = shutil.copytree(model, tmp_path / "model")
    (tmp_path / "secret").write_text("of somebody")
    (own / "notes.txt").symlink_to(tmp_path / "secret")
    ranks.run(2, refused_at_once, config_of(own, TP2))


def worker_of(policy: MegatronPolicy) -> MegatronPolicyWorkerImpl:
    """A worker that only saves and loads."""
    worker = object.__new__(MegatronPolicyWorkerImpl)
    worker.policy = policy
    return worker


def save_alone(config: dict[str, Any], root: Path) -> None:
    """Rank 0 gives up a worker's save that rank 1 does not come to."""
    with open_policy(config, init_reference_model=False) as policy:
        over, end = root / "over", time.monotonic() + 60
        if policy.rank == 0:
            with pytest.raises(CheckpointError, match="no sign of life for 2 s"):
                worker_of(policy).save_checkpoint(str(root / "run"), str(root / "run"))
            over.touch()
        while not over.exists():
            assert time.monotonic() < end, "rank 0 did not give up"
            time.sleep(0.01)


def test_a_save_that_a_rank_does_not_come_to_is_a_checkpoint_error_of_a_worker_too(
    ranks: RankPool, model: Path, tmp_path: Path
) -> None:
    config = config_of(model, TP2, checkpoint_timeout_s=2.0, refit_timeout_s=2.0)
    ranks.run(2, save_alone, config, tmp_path)
    assert not (tmp_path / "run").exists()


def save_from_the_host(config: dict[str, Any], root: Path) -> None:
    with open_policy(config, init_reference_model=False) as policy:
        policy.memory.offload(("parameters", "optimizer", "gradients"))
        assert policy.memory.state.name == "idle"
        worker_of(policy).save_checkpoint(str(root), str(root))
        assert policy.memory.state.holds == {"optimizer", "parameters"}


@ENGINES
def test_a_worker_saves_from_host_memory_and_leaves_what_it_saved_on_the_device(
    ranks: RankPool, model: Path, tmp_path: Path, megatron: dict[str, Any]
) -> None:
    ranks.run(2, save_from_the_host, config_of(model, megatron), tmp_path / "run")
