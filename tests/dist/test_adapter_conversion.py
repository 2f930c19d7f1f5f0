"""`convert` and policies agree on adapters: what a policy saves becomes what it exports, and a
policy resumes from what is converted.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron_policy.adapters.peft_files import ADAPTER_CONFIG, ADAPTER_MODEL, BASE
from megatron_policy.batch import BatchedDataDict
from megatron_policy.checkpoint import manifest, tracker
from megatron_policy.convert import convert, verify
from megatron_policy.converters.formats.hf_config import read_config
from megatron_policy.errors import CheckpointError, ConfigError
from tests import oracle, peft_models
from tests.dist.cases import GLOBAL_BATCH, LOSSES, open_policy, own_steps
from tests.dist.layouts import EXPERT_LAYOUTS, LAYOUTS, LENGTH, SIZES, VOCAB
from tests.dist.test_adapter_handover import ANEW, fresh_adapters
from tests.dist.test_adapters import ALL, LATENT, adapted
from tests.dist.test_export import tensors_of
from tests.exact import Exact, assert_equal
from tests.families import SAMPLES
from tests.unit.test_merging import assert_alike

DATA = oracle.make_batch(GLOBAL_BATCH, LENGTH, VOCAB)
TOKENS = BatchedDataDict({"input_ids": DATA["input_ids"]})

CASES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "fused, TP2+SP": ("qwen2", "TP2+SP", {}, {}),
    "each module, PP2": ("qwen2", "PP2", {"target_modules": ALL}, {}),
    "experts, EP2xTP2": ("qwen3_moe", "EP2xTP2+SP", {}, {}),
    "latent attention, one process": ("deepseek_v3", "one process", {"target_modules": LATENT}, {}),
    "stacked experts, EP2xPP2": ("gpt_oss", "EP2xPP2", {}, {}),
    "stacked experts, EP2xTP2": ("gpt_oss", "EP2xTP2+SP", {}, {}),
    "experts without gates, EP2xTP2": ("nemotron_h", "EP2xTP2+SP", {}, {}),
    "experts, shared and dense": ("qwen2_moe", "one process", {}, {}),
    "a new head, TP2+SP": ("qwen2", "TP2+SP", {}, {"reward_model_type": "regression"}),
    "a new head, PP2": ("qwen2", "PP2", {}, {"reward_model_type": "bradley_terry"}),
}
"""Family, layout, adapters and head; the head is saved as it was made."""


def train_and_save(config: dict[str, Any], root: Path) -> torch.Tensor | None:
    """The log-probabilities of a policy that was trained a step, and saved in every form."""
    head = "reward_model_cfg" in config
    with open_policy(config, init_reference_model=False) as policy:
        if not head:
            policy.train(own_steps(policy, DATA)[0], LOSSES["token"](), mbs=1)
        policy.save_checkpoint(root / "saved", root / "optimizer")
        policy.export_peft(root / "exported")
        policy.export_hf(root / "merged")
        return None if head else policy.logprobs(TOKENS)


def resume(config: dict[str, Any], path: Path) -> dict[str, Any]:
    """A policy with other first values, which goes on from the checkpoint."""
    with open_policy(config | {"seed": 7}, init_reference_model=False) as policy:
        before = {n: t.clone() for n, t in policy.export(adapters=True)}
        with pytest.raises(CheckpointError, match="fresh_optimizer=True"):
            policy.load_checkpoint(path)
        report = policy.load_checkpoint(path, fresh_optimizer=True)
        for whole in (path, config["model_name"]):
            with pytest.raises(ConfigError, match=r"is a checkpoint itself: give a directory"):
                policy.save_checkpoint(whole)
        seen = {
            "before": before,
            "adapters": {n: t.clone() for n, t in policy.export(adapters=True)},
            "step": report.step,
            "restored": report.restored,
        }
        if "reward_model_cfg" not in config:
            seen["logprobs"] = policy.logprobs(TOKENS)
            policy.train(own_steps(policy, DATA)[0], LOSSES["token"](), mbs=1)
        return seen


@pytest.mark.parametrize("name", CASES)
def test_what_a_policy_saves_becomes_what_it_exports_and_back(
    ranks, checkpoint, tmp_path: Path, name: str
) -> None:
    family, layout, peft, head = CASES[name]
    path = checkpoint(family, tied=False, **SIZES)
    assert_goes_there_and_back(ranks, path, tmp_path, layout, peft, head)
    if name.startswith("fused"):  # whose one A is handed over for each module
        exported = load_file(tmp_path / "exported" / ADAPTER_MODEL)
        layer = "base_model.model.model.layers.1.self_attn"
        first, *others = (exported[f"{layer}.{each}_proj.lora_A.weight"] for each in "qkv")
        assert all(torch.equal(first, each) for each in others)


def assert_goes_there_and_back(
    ranks: Any,
    path: Path,
    tmp_path: Path,
    layout: str,
    peft: dict[str, Any],
    head: dict[str, Any],
) -> None:
    """What a policy saves becomes what it exports, resumes, and merges as its export does."""
    case, family = (LAYOUTS | EXPERT_LAYOUTS)[layout], read_config(path)["model_type"]
    top: dict[str, Any] = {"hf_config_overrides": {SAMPLES[family].epsilon: 0.01}}
    if head:
        top["reward_model_cfg"] = {"enabled": True, **head}
    config = adapted(path, case.megatron, None, **ANEW, **peft) | top
    (logprobs, *_) = ranks.run(case.world, train_and_save, config, tmp_path)
    saved, exported, converted = (tmp_path / n for n in ("saved", "exported", "converted"))

    convert(saved, converted, "hf", base=path)
    one, other = (load_file(p / ADAPTER_MODEL) for p in (exported, converted))
    assert one.keys() == other.keys() and all(torch.equal(t, other[n]) for n, t in one.items())
    for file in (ADAPTER_CONFIG, BASE):
        assert (exported / file).read_bytes() == (converted / file).read_bytes()
    assert verify(saved, exported).equal and verify(exported, converted).equal

    convert(exported, tmp_path / "again", "mcore")
    assert verify(tmp_path / "again", saved).equal
    step = 0 if head else 1
    assert manifest.read(tmp_path / "again").step == step
    old, new = (manifest.read(tracker.find(p)) for p in (saved, tmp_path / "again"))
    assert (old.tensors, old.config, old.overrides) == (new.tensors, new.config, new.overrides)
    alone = adapted(path, {}, None, **ANEW, **peft) | top
    (resumed,) = ranks.run(1, resume, alone, tmp_path / "again")
    assert resumed["step"] == step and resumed["restored"] == ("weights",)
    (started,) = ranks.run(1, fresh_adapters, adapted(path, {}, converted, **peft) | top)
    for adapters in (resumed["adapters"], started):
        assert adapters.keys() == one.keys()
        assert all(torch.equal(adapters[n], t) for n, t in one.items())
    assert not all(torch.equal(resumed["before"][n], t) for n, t in one.items())
    if family == "gpt_oss":
        return  # whose experts are stacked
    convert(saved, tmp_path / "hf", "hf", base=path, merge=True)
    theirs, ours = tensors_of(tmp_path / "merged"), tensors_of(tmp_path / "hf")
    assert theirs.keys() == ours.keys()
    one_config, other_config = (tmp_path / n / "config.json" for n in ("merged", "hf"))
    assert one_config.read_bytes() == other_config.read_bytes()
    if head:
        for weight, tensor in theirs.items():
            torch.testing.assert_close(ours[weight], tensor, rtol=1e-5, atol=1e-6)
        assert torch.equal(ours["score.weight"], one["base_model.model.score.weight"])
        return
    assert_alike(ours, theirs, path, exported)
    merged = Exact.of(tmp_path / "hf", partial(oracle.hf_logprobs, tokens=DATA["input_ids"]))
    assert_equal("logprobs of the merged checkpoint", logprobs[:, 1:], merged)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["TP2+SP", "PP2xVPP2"])
def test_a_policy_resumes_from_what_peft_has_saved(
    ranks, checkpoint, tmp_path: Path, name: str
) -> None:
    path = checkpoint("qwen2", tied=False, **SIZES)
    peft = peft_models.make_adapters(path, tmp_path / "peft", ALL)
    report = convert(peft, tmp_path / "saved", "mcore", base=path)
    assert "target_modules: [q_proj, k_proj, v_proj, o_proj, gate" in report.plan.resumed_with
    exact = peft_models.logprobs(path, peft, DATA["input_ids"])
    case = LAYOUTS[name]
    config = adapted(path, case.megatron, None, target_modules=ALL)
    for seen in ranks.run(case.world, resume, config, tmp_path / "saved"):
        assert_equal("logprobs of peft", seen["logprobs"][:, 1:], exact)
    with pytest.raises(AssertionError, match="of other modules: set"):
        ranks.run(1, resume, adapted(path, {}, None), tmp_path / "saved")
    with pytest.raises(AssertionError, match="another scale: set"):
        other = adapted(path, {}, None, target_modules=ALL, alpha=1.0)
        ranks.run(1, resume, other, tmp_path / "saved")
