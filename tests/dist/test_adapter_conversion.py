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

from megatron_policy.batch import BatchedDataDict
from megatron_policy.checkpoint import manifest, tracker
from megatron_policy.convert import convert, verify
from megatron_policy.converters.formats.peft_files import ADAPTER_CONFIG, ADAPTER_MODEL, BASE
from megatron_policy.errors import CheckpointError, ConfigError
from tests import oracle, peft_models
from tests.dist.cases import GLOBAL_BATCH, LOSSES, open_policy, own_steps
from tests.dist.layouts import EXPERT_LAYOUTS, LAYOUTS, LENGTH, SIZES, VOCAB
from tests.dist.test_adapter_handover import ANEW
from tests.dist.test_adapters import ALL, LATENT, adapted
from tests.dist.test_export import tensors_of
from tests.exact import Exact, InDouble, assert_equal
from tests.unit.test_merging import assert_alike

DATA = oracle.make_batch(GLOBAL_BATCH, LENGTH, VOCAB)
TOKENS = BatchedDataDict({"input_ids": DATA["input_ids"]})
OVERRIDES = {"rms_norm_eps": 0.01}

CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "fused, TP2+SP": ("qwen2", "TP2+SP", {}),
    "each module, PP2": ("qwen2", "PP2", {"target_modules": ALL}),
    "experts, EP2xTP2": ("qwen3_moe", "EP2xTP2+SP", {}),
    "latent attention, one process": ("deepseek_v3", "one process", {"target_modules": LATENT}),
}


def train_and_save(config: dict[str, Any], root: Path) -> dict[str, torch.Tensor]:
    with open_policy(config, init_reference_model=False) as policy:
        policy.train(own_steps(policy, DATA)[0], LOSSES["token"](), mbs=1)
        policy.save_checkpoint(root / "saved", root / "optimizer")
        policy.export_peft(root / "exported")
        policy.export_hf(root / "merged")
        return {"logprobs": policy.logprobs(TOKENS)}


def resume(config: dict[str, Any], path: Path) -> dict[str, Any]:
    """A policy with other first values, which goes on from the checkpoint."""
    with open_policy(config | {"seed": 7}, init_reference_model=False) as policy:
        before = {n: t.clone() for n, t in policy.export(adapters=True)}
        with pytest.raises(CheckpointError, match="fresh_optimizer=True"):
            policy.load_checkpoint(path)
        report = policy.load_checkpoint(path, fresh_optimizer=True)
        with pytest.raises(ConfigError, match=r"is a checkpoint itself: give a directory"):
            policy.save_checkpoint(path)
        adapters = {n: t.clone() for n, t in policy.export(adapters=True)}
        logprobs = policy.logprobs(TOKENS)
        policy.train(own_steps(policy, DATA)[0], LOSSES["token"](), mbs=1)
        return {
            "before": before,
            "adapters": adapters,
            "step": report.step,
            "restored": report.restored,
            "logprobs": logprobs,
        }


@pytest.mark.parametrize("name", CASES)
def test_what_a_policy_saves_becomes_what_it_exports_and_back(
    ranks, checkpoint, tmp_path: Path, name: str
) -> None:
    family, layout, peft = CASES[name]
    case = (LAYOUTS | EXPERT_LAYOUTS)[layout]
    path = checkpoint(family, tied=False, **SIZES)
    top = {"hf_config_overrides": OVERRIDES}
    config = adapted(path, case.megatron, None, **ANEW, **peft) | top
    (seen, *_) = ranks.run(case.world, train_and_save, config, tmp_path)
    saved, exported = tmp_path / "saved", tmp_path / "exported"

    convert(saved, tmp_path / "converted", "hf", base=path)
    one, other = (load_file(p / ADAPTER_MODEL) for p in (exported, tmp_path / "converted"))
    assert one.keys() == other.keys() and all(torch.equal(t, other[n]) for n, t in one.items())
    for file in (ADAPTER_CONFIG, BASE):
        assert (exported / file).read_bytes() == (tmp_path / "converted" / file).read_bytes()
    assert verify(saved, exported).equal and verify(exported, tmp_path / "converted").equal

    convert(exported, tmp_path / "again", "mcore")
    assert verify(tmp_path / "again", saved).equal
    assert manifest.read(tmp_path / "again").step == 1
    old, new = (manifest.read(tracker.find(p)) for p in (saved, tmp_path / "again"))
    assert (old.tensors, old.config, old.overrides) == (new.tensors, new.config, new.overrides)
    alone = adapted(path, {}, None, **ANEW, **peft) | top
    (resumed,) = ranks.run(1, resume, alone, tmp_path / "again")
    assert resumed["step"] == 1 and resumed["restored"] == ("weights",)
    assert all(torch.equal(resumed["adapters"][n], t) for n, t in one.items())
    assert not all(torch.equal(resumed["before"][n], t) for n, t in one.items())

    convert(saved, tmp_path / "hf", "hf", merge=True)
    theirs, ours = tensors_of(tmp_path / "merged"), tensors_of(tmp_path / "hf")
    assert theirs.keys() == ours.keys()
    assert_alike(ours, theirs, path, exported)
    one_config, other_config = (tmp_path / n / "config.json" for n in ("merged", "hf"))
    assert one_config.read_bytes() == other_config.read_bytes()
    merged = Exact.of(tmp_path / "hf", partial(oracle.hf_logprobs, tokens=DATA["input_ids"]))
    assert_equal("logprobs of the merged checkpoint", seen["logprobs"][:, 1:], merged)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["TP2+SP", "PP2xVPP2"])
def test_a_policy_resumes_from_what_peft_has_saved(
    ranks, checkpoint, tmp_path: Path, name: str
) -> None:
    path = checkpoint("qwen2", tied=False, **SIZES)
    peft = peft_models.make_adapters(path, tmp_path / "peft", ALL)
    report = convert(peft, tmp_path / "saved", "mcore", base=path)
    assert "target_modules: [q_proj, k_proj, v_proj, o_proj, gate" in report.plan.resumed_with
    load = peft_models.Loads(peft)
    rounded, double = oracle.hf_logprobs(load(path), DATA["input_ids"]), load(path, torch.float64)
    with InDouble():
        exact = oracle.hf_logprobs(double, DATA["input_ids"]).detach()
    case = LAYOUTS[name]
    config = adapted(path, case.megatron, None, target_modules=ALL)
    for seen in ranks.run(case.world, resume, config, tmp_path / "saved"):
        expected = Exact.between(rounded.detach(), exact)
        assert_equal("logprobs of peft", seen["logprobs"][:, 1:], expected)
    with pytest.raises(AssertionError, match="of other modules: set"):
        ranks.run(1, resume, adapted(path, {}, None), tmp_path / "saved")
    with pytest.raises(AssertionError, match="another scale: set"):
        other = adapted(path, {}, None, target_modules=ALL, alpha=1.0)
        ranks.run(1, resume, other, tmp_path / "saved")


def started(config: dict[str, Any]) -> None:
    with open_policy(config, init_optimizer=False):
        pass


@pytest.mark.nightly
def test_adapters_of_another_base_or_with_other_overrides_are_not_gone_on_with(
    ranks, checkpoint, tmp_path: Path
) -> None:
    path = checkpoint("qwen2", tied=False, **SIZES)
    other = checkpoint("qwen2", tied=False, seed=3, **SIZES)
    peft = peft_models.make_adapters(path, tmp_path / "peft", ALL)
    ranks.run(1, started, adapted(path, {}, peft, target_modules=ALL))
    with pytest.raises(AssertionError, match=r"were trained on .*base_model_name_or_path of adapt"):
        ranks.run(1, started, adapted(other, {}, peft, target_modules=ALL))
    convert(peft, tmp_path / "saved", "mcore", base=path)
    convert(tmp_path / "saved", tmp_path / "ours", "hf")
    with pytest.raises(AssertionError, match=r"trained with hf_config_overrides {}, not"):
        overridden = adapted(path, {}, tmp_path / "ours", target_modules=ALL)
        ranks.run(1, started, overridden | {"hf_config_overrides": OVERRIDES})


PARTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "stacked experts, EP2xPP2": ("gpt_oss", "EP2xPP2", {}),
    "stacked experts, EP2xTP2": ("gpt_oss", "EP2xTP2+SP", {}),
    "a new head, TP2+SP": ("qwen2", "TP2+SP", {"reward_model_type": "regression"}),
    "a new head, PP2": ("qwen2", "PP2", {"reward_model_type": "bradley_terry"}),
}


def save(config: dict[str, Any], root: Path) -> None:
    with open_policy(config, init_optimizer=False, init_reference_model=False) as policy:
        policy.save_checkpoint(root / "saved")
        policy.export_peft(root / "exported")
        policy.export_hf(root / "merged")


def start(config: dict[str, Any], path: Path | None) -> dict[str, torch.Tensor]:
    """The adapters of a policy, or of the checkpoint that it loads."""
    with open_policy(config, init_optimizer=False, init_reference_model=False) as policy:
        if path is not None:
            policy.load_checkpoint(path, fresh_optimizer=True)
        return {name: tensor.clone() for name, tensor in policy.export(adapters=True)}


@pytest.mark.nightly
@pytest.mark.parametrize("name", PARTS)
def test_stacked_experts_and_a_head_are_converted_as_the_policy_writes_them(
    ranks, checkpoint, tmp_path: Path, name: str
) -> None:
    family, layout, head = PARTS[name]
    case = (LAYOUTS | EXPERT_LAYOUTS)[layout]
    path = checkpoint(family, tied=False, **SIZES)
    top: dict[str, Any] = {"hf_config_overrides": OVERRIDES}
    if head:
        top["reward_model_cfg"] = {"enabled": True, **head}
    ranks.run(case.world, save, adapted(path, case.megatron, None, **ANEW) | top, tmp_path)
    exported, converted = tmp_path / "exported", tmp_path / "converted"
    convert(tmp_path / "saved", converted, "hf", base=path)
    one, other = (load_file(p / ADAPTER_MODEL) for p in (exported, converted))
    assert one.keys() == other.keys() and all(torch.equal(t, other[n]) for n, t in one.items())
    for file in (ADAPTER_CONFIG, BASE):
        assert (exported / file).read_bytes() == (converted / file).read_bytes()
    convert(exported, tmp_path / "again", "mcore")
    assert verify(tmp_path / "again", tmp_path / "saved").equal
    alone = top | {"seed": 7}
    anew = adapted(path, {}, None, **ANEW) | alone
    (resumed,) = ranks.run(1, start, anew, tmp_path / "again")
    (started_from,) = ranks.run(1, start, adapted(path, {}, converted) | alone, None)
    for seen in (resumed, started_from):
        assert seen.keys() == one.keys() and all(torch.equal(seen[n], t) for n, t in one.items())
    if not head:
        return
    convert(tmp_path / "saved", tmp_path / "hf", "hf", base=path, merge=True)
    theirs, ours = tensors_of(tmp_path / "merged"), tensors_of(tmp_path / "hf")
    assert theirs.keys() == ours.keys()
    for weight, tensor in theirs.items():
        torch.testing.assert_close(ours[weight], tensor, rtol=1e-5, atol=1e-6)
    assert torch.equal(ours["score.weight"], one["base_model.model.score.weight"])
    one_config, other_config = (tmp_path / n / "config.json" for n in ("merged", "hf"))
    assert one_config.read_bytes() == other_config.read_bytes()
