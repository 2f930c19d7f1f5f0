"""Exporting to Hugging Face format: complete, bit-equal, loadable, and all or nothing."""

from __future__ import annotations

import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_policy.batch import BatchedDataDict
from megatron_policy.checkpoint.verifying import verify as verify_save
from megatron_policy.convert import check, convert
from megatron_policy.converters.formats.hf_files import HfReader
from megatron_policy.errors import ConfigError, ExportError
from megatron_policy.refit.transports.disk import HfDirectory
from tests import oracle
from tests.checkpoints import make_checkpoint
from tests.dist.cases import GLOBAL_BATCH, LOSSES, open_policy, own_share, policy_config
from tests.dist.layouts import LAYOUTS, LENGTH, VOCAB
from tests.exact import Exact, assert_equal
from tests.small_disk import small_disk

EXPORTING = (
    "one process",
    "TP2+SP",
    "PP2 uneven",
    "PP2xVPP2",
    "TP2xPP2xDP2+SP",
    "TP4 over 2 groups",
)


def export(config: dict[str, Any], path: Path, options: dict[str, Any] | None = None) -> None:
    with open_policy(config, init_optimizer=False, init_reference_model=False) as policy:
        policy.export_hf(path, **(options or {}))


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    with HfReader(path) as reader:
        return {name: reader.tensor(name).clone() for name in reader.shapes}


def assert_same_tensors(a: Path, b: Path) -> None:
    ours, theirs = tensors_of(a), tensors_of(b)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        assert torch.equal(ours[name], tensor), name


@pytest.mark.parametrize("name", EXPORTING)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_what_was_not_trained_comes_back_bit_equal(
    ranks, checkpoints, tmp_path: Path, name: str, tied: bool
) -> None:
    case, target = LAYOUTS[name], tmp_path / "exported"
    config = policy_config(checkpoints[tied], case.megatron)
    ranks.run(case.world, export, config, target)
    assert_same_tensors(target, checkpoints[tied])
    model = AutoModelForCausalLM.from_pretrained(target)
    assert model.config.to_dict() | {"_name_or_path": ""} == AutoModelForCausalLM.from_pretrained(
        checkpoints[tied]
    ).config.to_dict() | {"_name_or_path": ""}
    assert AutoTokenizer.from_pretrained(target)("bit for bit").input_ids


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_bf16_weights_survive_fp32_training_precision_and_small_shards(
    ranks, tmp_path: Path, family: str
) -> None:
    source = make_checkpoint(tmp_path / "source", family, dtype="bfloat16", max_shard_size="60KB")
    config = policy_config(source, LAYOUTS["TP2"].megatron, precision="float32")
    ranks.run(2, export, config, tmp_path / "exported", {"max_shard_bytes": 50_000})
    files = sorted(p.name for p in (tmp_path / "exported").glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert_same_tensors(tmp_path / "exported", source)


def train_and_export(config: dict[str, Any], path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    data = oracle.make_batch(GLOBAL_BATCH, LENGTH, VOCAB)
    with open_policy(config) as policy:
        policy.train(own_share(policy, data), LOSSES["token"](), mbs=1)
        policy.export_hf(path)
        # Without lengths padding is read like text, as transformers reads it.
        tokens = BatchedDataDict({"input_ids": data["input_ids"]})
        return data["input_ids"], policy.logprobs(tokens)


def test_transformers_reads_the_trained_policy(ranks, checkpoints, tmp_path: Path) -> None:
    case = LAYOUTS["TP2xPP2xDP2+SP"]
    config = policy_config(checkpoints[True], case.megatron)
    results = ranks.run(case.world, train_and_export, config, tmp_path / "trained")
    for tokens, logprobs in results:
        expected = Exact.of(tmp_path / "trained", partial(oracle.hf_logprobs, tokens=tokens))
        assert_equal("logprobs", logprobs[:, 1:], expected)


def export_error(config: dict[str, Any], path: Path) -> tuple[str, str]:
    with open_policy(config, init_optimizer=False, init_reference_model=False) as policy:
        with pytest.raises((ConfigError, ExportError)) as error:
            policy.export_hf(path)
        return type(error.value).__name__, str(error.value)


def test_an_existing_directory_is_refused_on_every_rank_and_left_alone(
    ranks, checkpoints, tmp_path: Path
) -> None:
    target = tmp_path / "taken"
    target.mkdir()
    (target / "notes.txt").write_text("mine")
    config = policy_config(checkpoints[True], LAYOUTS["TP2"].megatron)
    for kind, message in ranks.run(2, export_error, config, target):
        assert kind == "ConfigError" and str(target) in message
    assert [p.name for p in target.iterdir()] == ["notes.txt"]


def write_everywhere(config: dict[str, Any], folder: Path) -> None:
    """Write the model in every way, after its own directory has lost its tokenizer."""
    source = Path(config["model_name"])
    given = AutoTokenizer.from_pretrained(source)
    given.chat_template = TEMPLATE
    given.pad_token = given.eos_token
    with open_policy(config, tokenizer=given, init_reference_model=False) as policy:
        policy.export_hf(folder / "export")
        policy.refit(HfDirectory(folder / "refit", config["model_name"]))
        if policy.rank == 0:
            shutil.rmtree(source / "assets")
        policy.save_checkpoint(folder / "weights", None, folder / "tokenizer")
        policy.save_checkpoint(folder / "weights", None, hf_export=folder / "saved")


TEMPLATE = "{{ messages }} given"


@pytest.mark.parametrize("layout", ["one process", "TP2"])
def test_every_directory_has_the_given_tokenizer_and_the_files_in_folders(
    ranks, checkpoint, tmp_path: Path, layout: str
) -> None:
    source = Path(shutil.copytree(checkpoint("qwen2"), tmp_path / "source"))
    (source / "assets").mkdir()
    (source / "assets" / "notes.txt").write_text("notes")
    case = LAYOUTS[layout]
    ranks.run(case.world, write_everywhere, policy_config(source, case.megatron), tmp_path)
    saved = tmp_path / "weights" / "iter_0000000" / "hf"
    convert(tmp_path / "weights", tmp_path / "converted", "hf")
    for place in ("export", "refit", saved, "converted", "saved", "tokenizer"):
        found = AutoTokenizer.from_pretrained(tmp_path / place)
        assert found.chat_template == TEMPLATE and found.pad_token_id == found.eos_token_id, place
        notes, was_there = tmp_path / place / "assets" / "notes.txt", place != "saved"
        assert notes.is_file() == (was_there and place != "tokenizer"), place
    for place in ("export", "refit", "saved", "converted"):
        assert check(tmp_path / place).problems == ()
    verify_save(tmp_path / "weights" / "iter_0000000")


def export_to_a_full_disk(config: dict[str, Any], path: Path) -> str:
    with open_policy(config, init_optimizer=False, init_reference_model=False) as policy:
        with pytest.raises(ExportError) as error:
            policy.export_hf(path)
        return str(error.value)


def test_a_disk_without_room_for_an_export_is_named_with_the_bytes(
    ranks, checkpoint, tmp_path: Path
) -> None:
    source = checkpoint("qwen2", hidden=256, ffn=512)
    config = policy_config(source, LAYOUTS["TP2"].megatron)
    with small_disk(tmp_path / "full") as full:
        for message in ranks.run(2, export_to_a_full_disk, config, Path(full) / "exported"):
            assert re.search(
                rf"{full}/exported needs [\d,]+ bytes, but {full} has 1,048,576", message
            )
        assert list(Path(full).iterdir()) == []


def fail_to_write(config: dict[str, Any], path: Path, rank: int) -> str:
    """The error every rank sees when one rank cannot write its file."""
    from megatron_policy.converters.formats import hf_writing

    original = hf_writing.ShardFile.put

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    with open_policy(config, init_optimizer=False, init_reference_model=False) as policy:
        if policy.rank == rank:
            hf_writing.ShardFile.put = full
        try:
            with pytest.raises(ExportError) as error:
                policy.export_hf(path, max_shard_bytes=50_000)
        finally:
            hf_writing.ShardFile.put = original
        policy.export_hf(path.with_name("second"), max_shard_bytes=50_000)
        return str(error.value)


def test_a_rank_that_cannot_write_fails_all_and_publishes_nothing(
    ranks, checkpoints, tmp_path: Path
) -> None:
    target = tmp_path / "exported"
    config = policy_config(checkpoints[False], LAYOUTS["TP2"].megatron)
    for message in ranks.run(2, fail_to_write, config, target, 1):
        assert "rank 1" in message and f"{target} cannot be written: No space left" in message
        assert re.search(rf"it takes [\d,]+ bytes, and {tmp_path} has [\d,]+ left", message)
    assert [p.name for p in tmp_path.iterdir()] == ["second"], "something was left behind"
    assert_same_tensors(target.with_name("second"), checkpoints[False])


def test_a_path_that_cannot_be_made_fails_on_every_rank_alike(ranks, checkpoints) -> None:
    config = policy_config(checkpoints[True], LAYOUTS["TP2"].megatron)
    for kind, message in ranks.run(2, export_error, config, Path("/proc/nowhere/exported")):
        assert kind == "ExportError" and message.startswith("rank 0: ")
