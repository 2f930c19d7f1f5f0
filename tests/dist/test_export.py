"""Exporting to Hugging Face format: complete, bit-equal, loadable, and all or nothing."""

from __future__ import annotations

import os
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
from megatron_policy.errors import ConfigError, ExportError, RefitError
from megatron_policy.refit.transports.disk import HfDirectory
from megatron_policy.refit.transports.peft import PeftDirectory
from megatron_policy.workers.refits import EngineRefits
from tests import oracle
from tests.checkpoints import make_checkpoint
from tests.dist.cases import GLOBAL_BATCH, LOSSES, open_policy, own_share, policy_config
from tests.dist.layouts import LAYOUTS, LENGTH, SIZES, VOCAB
from tests.exact import Exact, assert_equal
from tests.soak.exports import MODEL, soak


def export(config: dict[str, Any], path: Path, options: dict[str, Any] | None = None) -> None:
    with open_policy(config, init_optimizer=False, init_reference_model=False) as policy:
        policy.export_hf(path, **(options or {}))


def planned_dtypes(config: dict[str, Any]) -> list[torch.dtype]:
    """Of the same tensors, planned one after another for engines that differ in their dtype."""
    with open_policy(config, init_optimizer=False, init_reference_model=False) as policy:
        plan = policy.exporter.plan
        plans = plan(), plan(dtype=torch.float16), plan(), plan(as_stored=True)
        told = [EngineRefits(policy).prepare_refit_info(as_stored=of) for of in (False, True)]
        planned = [each.tensors[0].dtype for each in plans]
        return planned + [next(iter(info.values()))[1] for info in told]


def test_plans_for_engines_of_different_dtypes_are_different_plans(ranks, checkpoints) -> None:
    config = policy_config(checkpoints[True], {}, refit_dtype="bfloat16")
    wide, bf16, fp16 = torch.float32, torch.bfloat16, torch.float16
    assert ranks.run(1, planned_dtypes, config) == [[bf16, fp16, bf16, wide, bf16, wide]]


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    with HfReader(path) as reader:
        return {name: reader.tensor(name).clone() for name in reader.shapes}


def assert_same_tensors(a: Path, b: Path) -> None:
    ours, theirs = tensors_of(a), tensors_of(b)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        assert torch.equal(ours[name], tensor), name


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


def train_and_export(config: dict[str, Any], root: Path) -> torch.Tensor:
    """The log-probabilities of a policy that is exported before and after a step."""
    data = oracle.make_batch(GLOBAL_BATCH, LENGTH, VOCAB)
    with open_policy(config) as policy:
        policy.export_hf(root / "untrained")
        policy.train(own_share(policy, data), LOSSES["token"](), mbs=1)
        policy.export_hf(root / "trained")
        # Without lengths padding is read like text, as transformers reads it.
        return policy.logprobs(BatchedDataDict({"input_ids": data["input_ids"]}))


@pytest.mark.parametrize(
    ("name", "tied"),
    [
        ("TP2xPP2xDP2+SP", True),
        ("one process", False),
        ("TP2+SP", False),
        ("PP2 uneven", True),
        ("PP2xVPP2", False),
        ("TP4 over 2 groups", True),
        ("TP4 over 2 groups", False),
    ],
)
def test_transformers_reads_the_policy_and_what_was_not_trained_is_bit_equal(
    ranks, checkpoints, tmp_path: Path, name: str, tied: bool
) -> None:
    case, path = LAYOUTS[name], checkpoints[tied]
    results = ranks.run(case.world, train_and_export, policy_config(path, case.megatron), tmp_path)
    assert_same_tensors(tmp_path / "untrained", path)
    configs = [
        AutoModelForCausalLM.from_pretrained(each).config.to_dict() | {"_name_or_path": ""}
        for each in (tmp_path / "untrained", path)
    ]
    assert configs[0] == configs[1]
    assert AutoTokenizer.from_pretrained(tmp_path / "untrained")("bit for bit").input_ids
    tokens = oracle.make_batch(GLOBAL_BATCH, LENGTH, VOCAB)["input_ids"]
    expected = Exact.of(tmp_path / "trained", partial(oracle.hf_logprobs, tokens=tokens))
    for logprobs in results:
        assert_equal("logprobs", logprobs[:, 1:], expected)


def write_everywhere(config: dict[str, Any], folder: Path) -> None:
    """Write the model in every way, after its own directory has lost its tokenizer."""
    source = Path(config["model_name"])
    given = AutoTokenizer.from_pretrained(source)
    given.chat_template = TEMPLATE
    given.pad_token = given.eos_token
    with open_policy(config, tokenizer=given, init_reference_model=False) as policy:
        policy.export_hf(folder / "export")
        policy.refit(HfDirectory(folder / "refit"))
        if policy.rank == 0:
            shutil.rmtree(source / "assets")
            (source / "config.json").rename(source / "elsewhere")
        with pytest.raises(ConfigError, match=r"no longer has its config\.json"):
            policy.export_hf(folder / "none")
        if policy.rank == 0:
            (source / "elsewhere").rename(source / "config.json")
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


def fail_to_export(config: dict[str, Any], path: Path) -> str:
    with open_policy(config, init_optimizer=False, init_reference_model=False) as policy:
        with pytest.raises(ExportError) as error:
            policy.export_hf(path)
        return str(error.value)


def test_a_path_that_cannot_be_made_fails_on_every_rank_alike(ranks, checkpoints) -> None:
    config = policy_config(checkpoints[True], LAYOUTS["TP2"].megatron)
    for message in ranks.run(2, fail_to_export, config, Path("/proc/nowhere/exported")):
        assert message.startswith("rank 0: ")


def export_onto_what_it_is_made_of(config: dict[str, Any], link: Path, away: Path) -> None:
    """Nothing is written over the policy's model or reference, or into or around them, by any way
    to write a directory.
    """
    model, reference = Path(config["model_name"]), Path(config["reference_model_name"])
    before = [bits_of(model), bits_of(reference)]
    destinations = {
        model: "policy.model_name",
        model / "exported": "policy.model_name",
        model.parent: "policy.model_name",
        link: "policy.model_name",
        Path(os.path.relpath(model)): "policy.model_name",
        reference: "policy.reference_model_name",
    }
    with open_policy(config) as policy:
        for path, key in destinations.items():
            said = rf"{re.escape(str(path))} overlaps .*, which is {key}.*Choose a path apart from"
            for export in (policy.export_hf, policy.export_peft):
                with pytest.raises(ConfigError, match=said):
                    export(path, overwrite=True)
            with pytest.raises(RefitError, match=said):
                policy.refit(HfDirectory(path, overwrite=True))
            with pytest.raises(RefitError, match=said):
                policy.refit(PeftDirectory(path, overwrite=True), adapters=True)
            with pytest.raises(ConfigError, match=said):
                policy.save_checkpoint(away, hf_export=path)
        assert not away.exists()
    assert [bits_of(model), bits_of(reference)] == before


def bits_of(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


@pytest.mark.parametrize("layout", ["TP2", "one process"])
def test_no_export_replaces_what_its_policy_was_made_from(
    ranks, checkpoint, tmp_path: Path, layout: str
) -> None:
    source = checkpoint("qwen2", **SIZES)
    model, reference = (tmp_path / each / each for each in ("model", "reference"))
    for each in (model, reference):
        shutil.copytree(source, each)
    link, away = tmp_path / "link", tmp_path / "away"
    link.symlink_to(model)
    megatron = LAYOUTS[layout].megatron | {"peft": {"enabled": True, "dim": 2, "alpha": 2}}
    config = policy_config(model, megatron, reference_model_name=str(reference))
    ranks.run(LAYOUTS[layout].world, export_onto_what_it_is_made_of, config, link, away)


@pytest.mark.parametrize("ranks_of_each", [1, 2])
def test_exports_at_once_leave_the_weights_of_one_of_them_whoever_is_killed(
    checkpoint, tmp_path: Path, ranks_of_each: int
) -> None:
    worlds = (ranks_of_each, ranks_of_each)
    assert soak(checkpoint("qwen2", **MODEL), tmp_path / "exports", 6, worlds) == []
