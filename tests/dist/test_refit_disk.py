"""Weights, or adapters alone, over a directory: all or nothing; what is damaged is refused."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from megatron_policy.convert import check
from megatron_policy.converters.files import publishing
from megatron_policy.converters.formats import hf_writing
from megatron_policy.errors import ConfigError, ExportError, RefitError
from megatron_policy.refit.digest import Digests
from megatron_policy.refit.receive.receiver import Receiver
from megatron_policy.refit.transports.disk import HfDirectory
from megatron_policy.refit.transports.ipc.handles import IpcHandles
from megatron_policy.refit.transports.peft import PeftDirectory
from tests.dist.cases import open_policy, policy_config
from tests.dist.layouts import FSDP2_LAYOUTS, LAYOUTS, SIZES
from tests.dist.resuming import large_files_forbidden, replaced
from tests.dist.test_adapter_handover import ANEW
from tests.dist.test_adapters import adapted
from tests.dist.test_export import assert_same_tensors, tensors_of
from tests.dist.test_fsdp2_unlisted import make
from tests.ranks import RankFailure, RankPool
from tests.refit_engine import SmallEngine, bits
from tests.small_disk import small_disk
from tests.unit.edited import edit

UNUSED = {"init_optimizer": False, "init_reference_model": False}
SHARD = 50_000


def engine_of(path: Path) -> tuple[SmallEngine, Receiver]:
    """An engine of zeros for the model at `path`."""
    weights = {name: torch.zeros_like(tensor) for name, tensor in tensors_of(path).items()}
    engine = SmallEngine(weights)
    expected = {name: (tuple(t.shape), t.dtype) for name, t in weights.items()}
    return engine, Receiver(engine.load, expected=expected)


@pytest.fixture(scope="module")
def exported(ranks: RankPool, checkpoint: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An exported directory of several files."""
    config = policy_config(checkpoint("qwen2", tied=True, vocab=251), LAYOUTS["TP2"].megatron)
    path = tmp_path_factory.mktemp("exported") / "0"
    ranks.run(2, export, config, path)
    return path


def export(config: dict[str, Any], path: Path) -> None:
    with open_policy(config, **UNUSED) as policy:
        policy.export_hf(path, max_shard_bytes=SHARD, overwrite=True)


def change(name: str, how: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    """Changes the last file of that name."""

    def act(root: Path) -> None:
        file = max(root.glob(name))
        file.write_bytes(how(file.read_bytes()))

    return act


def lose(name: str) -> Callable[[Path], object]:
    return lambda root: max(root.glob(name)).unlink()


DAMAGE: dict[str, Callable[[Path], object]] = {
    "with a wrong digest": change("*.safetensors", lambda b: b[:-5] + bytes([b[-5] ^ 1]) + b[-4:]),
    "is damaged|truncated|ends": change("*.safetensors", lambda content: content[:-8]),
    "safetensors": lose("*.safetensors"),
    "names a step": lose("megatron_policy.json"),
    "contradicts its digest": change(
        "megatron_policy.json", lambda content: content.replace(b'"step": 0', b'"step": 9')
    ),
    "is not a directory": shutil.rmtree,
}


def test_what_is_not_whole_is_refused_and_the_engine_keeps_what_it_had(
    exported: Path, tmp_path: Path
) -> None:
    engine, receiver = engine_of(exported)
    before = bits(engine.weights)
    for number, (said, damage) in enumerate(DAMAGE.items()):
        copy = shutil.copytree(exported, tmp_path / str(number))
        damage(copy)
        with pytest.raises(RefitError, match=said):
            receiver.receive_directory(copy)
        assert bits(engine.weights) == before and receiver.step is None, said
    receiver.receive_directory(exported)
    assert bits(engine.weights) == bits(tensors_of(exported))


def test_older_weights_and_those_of_another_model_are_refused(exported: Path) -> None:
    _, receiver = engine_of(exported)
    receiver.step = 1
    with pytest.raises(RefitError, match="step 0 are older than those of step 1"):
        receiver.receive_directory(exported)
    smaller = {name: t for name, t in tensors_of(exported).items() if "norm" not in name}
    expected = {name: (tuple(t.shape), t.dtype) for name, t in smaller.items()}
    other = Receiver(SmallEngine(smaller).load, expected=expected)
    with pytest.raises(RefitError, match="not the weights of the engine's model"):
        other.receive_directory(exported)


def fail_to_write(config: dict[str, Any], path: Path, culprit: int) -> list[str]:
    """What this rank hears of a refit and an export in which a rank's files may not grow."""
    with open_policy(config, **UNUSED) as policy:

        def refit() -> None:
            policy.refit(HfDirectory(path, max_shard_bytes=SHARD))

        with large_files_forbidden(policy.rank == culprit):
            with pytest.raises(RefitError) as of_refit:
                refit()
            with pytest.raises(ExportError) as of_export:
                policy.export_hf(path, max_shard_bytes=SHARD)
        refit()
        return [str(of_refit.value), str(of_export.value)]


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
    stalls = [STALL_S]

    def stalling(put: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any) -> None:
            if policy.rank == 1 and stalls:
                time.sleep(stalls.pop())
            put(*args)

        return call

    with open_policy(config | {"refit_timeout_s": TIMEOUT_S}, **UNUSED) as policy:
        policy.refit(HfDirectory(path, max_shard_bytes=SHARD))
        started = time.monotonic()
        with replaced(hf_writing.ShardFile, "put", stalling), pytest.raises(ExportError):
            policy.export_hf(path, max_shard_bytes=SHARD, overwrite=True)
        seconds = time.monotonic() - started
        time.sleep(max(0.0, STALL_S + 1 - seconds))  # as long as the other one is away
        policy.export_hf(path.with_name("second"), max_shard_bytes=SHARD)
        return seconds


@pytest.mark.nightly
def test_a_rank_that_stalls_while_it_writes_fails_the_others_in_time(
    ranks: RankPool, checkpoint: Any, tmp_path: Path
) -> None:
    path = checkpoint("qwen2", tied=True, vocab=251)
    config = policy_config(path, LAYOUTS["DP2"].megatron)
    seconds = ranks.run(2, stall_while_writing, config, tmp_path / "first")
    assert seconds[0] < 2.4 * TIMEOUT_S, "not as a measurement: it is less than the stall"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["first", "second"]
    for written in ("first", "second"):
        assert_same_tensors(tmp_path / written, path)


def fail_before_a_file_is_filled(config: dict[str, Any], path: Path, culprit: int) -> str:
    """What this rank hears of a refit in which a rank fails beside its transport's session."""

    def failing(add: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any) -> None:
            if policy.rank == culprit:
                raise MemoryError("no room for a digest")
            add(*args)

        return call

    with open_policy(config | {"refit_timeout_s": TIMEOUT_S}, **UNUSED) as policy:
        transport = HfDirectory(path, max_shard_bytes=SHARD)
        with replaced(Digests, "add", failing), pytest.raises(RefitError) as error:
            policy.refit(transport)
        policy.refit(HfDirectory(path.with_name("second"), max_shard_bytes=SHARD))
        return str(error.value)


@pytest.mark.parametrize("culprit", [1, 0])
def test_a_rank_that_fails_before_its_transport_does_not_let_the_others_wait(
    ranks: RankPool, checkpoint: Any, tmp_path: Path, culprit: int
) -> None:
    path = checkpoint("qwen2", tied=True, vocab=251)
    config = policy_config(path, LAYOUTS["DP2"].megatron)
    said = ranks.run(2, fail_before_a_file_is_filled, config, tmp_path / "first", culprit)
    assert said == [f"rank {culprit}: MemoryError: no room for a digest"] * 2
    assert [p.name for p in tmp_path.iterdir()] == ["second"]
    assert_same_tensors(tmp_path / "second", path)


def refuse_to_replace(config: dict[str, Any], path: Path) -> list[str]:
    with open_policy(config, **UNUSED) as policy:
        with pytest.raises(RefitError) as of_refit:
            policy.refit(HfDirectory(path))
        with pytest.raises(ConfigError) as of_export:
            policy.export_hf(path)
        assert policy.rank or (path / "notes.txt").exists()
        policy.refit(HfDirectory(path, overwrite=True))
        return [str(of_refit.value), str(of_export.value)]


def test_a_directory_is_replaced_on_demand_only(
    ranks: RankPool, exported: Path, checkpoint: Any, tmp_path: Path
) -> None:
    path, target = checkpoint("qwen2", tied=True, vocab=251), tmp_path / "published"
    shutil.copytree(exported, target)
    (target / "notes.txt").write_text("mine")
    config = policy_config(path, LAYOUTS["TP2"].megatron)
    for messages in ranks.run(2, refuse_to_replace, config, target):
        assert all(f"{target} exists" in message for message in messages)
    assert not (target / "notes.txt").exists()
    assert_same_tensors(target, path)


def take_config_from(config: dict[str, Any], sources: dict[str, Path], box: Path) -> list[str]:
    """What is said of sources that are other models, by parts of the messages; one has moved."""
    said = []
    with open_policy(config, **UNUSED) as policy:
        policy.refit(HfDirectory(box / "own"))
        policy.refit(HfDirectory(box / "moved", str(sources.pop("moved"))))
        for words, source in sources.items():
            with pytest.raises(RefitError, match=rf"source=.*{words}.*leave it out for") as error:
                policy.refit(HfDirectory(box / "wrong", str(source)))
            said.append(str(error.value))
    return said


@pytest.mark.parametrize("kind", ["a family", "unlisted, FSDP2"])
def test_a_directory_gets_no_config_of_another_model(
    ranks: RankPool, checkpoint: Any, tmp_path: Path, kind: str
) -> None:
    other = checkpoint("llama", vocab=251)
    if kind == "a family":
        path = checkpoint("qwen2", tied=True, vocab=251)
        megatron, what = LAYOUTS["TP2"].megatron, "it is a llama model, not a qwen2 model"
        changed, field = {"rms_norm_eps": 0.5}, "layernorm_epsilon is 0.5, not 1e-06"
    else:
        path = make("stablelm", tmp_path / "stablelm")
        megatron, what = FSDP2_LAYOUTS["FSDP2 x 2"].megatron, "it is a llama model, not a stablelm"
        changed, field = {"num_hidden_layers": 3}, "num_layers is 3, not 2"
    moved = Path(shutil.copytree(path, tmp_path / "elsewhere"))
    sources = {
        "moved": moved,
        what: other,
        re.escape(field): edit(path, tmp_path / "edited", **changed),
        "is not a directory": tmp_path / "nowhere" / "at" / "all",
    }
    config, box = policy_config(path, megatron, hf_config_overrides={}), tmp_path / "box"
    for messages in ranks.run(2, take_config_from, config, sources, box):
        assert len(messages) == 3
    assert sorted(p.name for p in box.iterdir()) == ["moved", "own"]
    for name in ("own", "moved"):
        assert_same_tensors(box / name, path)
        assert (box / name / "config.json").read_text() == (path / "config.json").read_text()
        assert check(box / name).problems == ()


def misuse(config: dict[str, Any], plain: dict[str, Any], box: Path) -> None:
    there, new = box / "there", box / "new"

    def full(put: Any) -> Any:
        def call(*args: Any) -> None:
            raise OSError("no room on this disk")

        return call

    with open_policy(config, init_optimizer=False) as policy:
        refit = partial(policy.refit, adapters=True)
        refit(PeftDirectory(there))
        with pytest.raises(ConfigError, match="writes adapters alone: refit with adapters=True"):
            policy.refit(PeftDirectory(new))
        with pytest.raises(ConfigError, match="HfDirectory writes whole models: take PeftDir"):
            refit(HfDirectory(new))
        with pytest.raises(RefitError, match="exists; choose another path"):
            refit(PeftDirectory(there))
        taken = f"^{there} exists; choose another path, or replace it: overwrite=True$"
        with pytest.raises(ConfigError, match=taken):
            policy.export_peft(there)
        said = f"{new} cannot be written: no room on this disk"
        with replaced(hf_writing.ShardFile, "put", full), pytest.raises(ExportError, match=said):
            policy.export_peft(new)
        refit(PeftDirectory(there, overwrite=True))
        handles = IpcHandles(policy.exporter)
        name = next(iter(policy.exporter.select(adapters=True).plan().info()))
        handles.weights([name], 0, adapters=True)
        with pytest.raises(RefitError, match="adapters alone or whole models: begin again"):
            handles.weights(["model.norm.weight"], 0)
        with pytest.raises(RefitError, match=r"no HF tensor model\.norm\.weight"):
            handles.weights(["model.norm.weight"], 0, adapters=True)
        handles.release()
    with open_policy(plain, init_optimizer=False) as policy:
        with pytest.raises(ConfigError, match="no adapters to hand over"):
            policy.refit(PeftDirectory(new), adapters=True)
        assert sorted(p.name for p in box.iterdir()) == ["there"] or policy.rank
    assert not new.exists()


@pytest.mark.parametrize("layout", ["one process", "TP2"])
def test_what_cannot_be_sent_is_refused_and_the_policy_goes_on(
    ranks, checkpoint, tmp_path: Path, layout: str
) -> None:
    path = checkpoint("qwen2", tied=False, **SIZES)
    config = adapted(path, LAYOUTS[layout].megatron, None, **ANEW)
    plain = config | {"megatron_cfg": {**config["megatron_cfg"], "peft": {"enabled": False}}}
    ranks.run(LAYOUTS[layout].world, misuse, config, plain, tmp_path)


def export_to_a_full_disk(config: dict[str, Any], full: Path) -> list[str]:
    """The errors of exports, of adapters and of a model, and of one that only its writing finds
    without room.
    """
    target, said = full / "exported", []

    def unchecked(check: Any) -> Any:
        return lambda final, needed: None

    with open_policy(config, init_optimizer=False) as policy:
        for export in (policy.export_peft, policy.export_hf):
            with pytest.raises(ExportError) as error:
                export(target)
            said.append(str(error.value))
        with replaced(publishing, "check_room", unchecked), pytest.raises(ExportError) as error:
            policy.export_peft(target)
        return [*said, str(error.value)]


def test_a_disk_without_room_for_an_export_is_named_with_the_bytes_and_left_empty(
    ranks, checkpoint, tmp_path: Path
) -> None:
    path = checkpoint("qwen2", tied=False, **SIZES | {"hidden": 256, "ffn": 512})
    config = adapted(path, LAYOUTS["TP2"].megatron, None, dim=64, **ANEW)
    with small_disk(tmp_path / "full") as full:
        for *early, late in ranks.run(2, export_to_a_full_disk, config, Path(full)):
            needs = rf"{full}/exported needs [\d,]+ bytes, but {full} has 1,048,576 left"
            assert all(re.search(needs, said) for said in early), early
            assert f"{full}/exported cannot be written: No space left on device" in late
            assert re.search(rf"it takes [\d,]+ bytes, and {full} has [\d,]+ left", late)
        assert list(Path(full).iterdir()) == []


def export_adapters(config: dict[str, Any], path: Path) -> None:
    with open_policy(config, init_optimizer=False) as policy:
        policy.export_peft(path)


DAMAGED_ADAPTERS = {
    "adapter_config.json is not what was written": change(
        "adapter_config.json", lambda text: text.replace(b'"lora_alpha": 6', b'"lora_alpha": 7')
    ),
    "1 with a wrong digest": change("*.safetensors", lambda b: b[:-1] + bytes([b[-1] ^ 1])),
    "has no megatron_policy.json that names a step": lose("megatron_policy.json"),
    "has neither model.safetensors nor": lose("adapter_config.json"),
    "adapter_model.safetensors: give a directory": lose("adapter_model.safetensors"),
}


def test_a_directory_of_adapters_that_was_changed_is_refused(
    ranks, checkpoint, tmp_path: Path
) -> None:
    path, whole = checkpoint("qwen2", tied=False, **SIZES), tmp_path / "whole"
    ranks.run(1, export_adapters, adapted(path, {}, None, **ANEW), whole)
    base = AutoModelForCausalLM.from_pretrained(path)
    assert isinstance(PeftModel.from_pretrained(base, str(whole)), PeftModel)
    loaded: list[Any] = []
    Receiver(loaded.append).receive_directory(whole)
    for number, (said, damage) in enumerate(DAMAGED_ADAPTERS.items()):
        copy = shutil.copytree(whole, tmp_path / str(number))
        damage(copy)
        with pytest.raises(RefitError, match=said):
            Receiver(loaded.append).receive_directory(copy)
        assert len(loaded) == 1, said
