"""Conversion of adapters of stacked experts, and of those that come with a scalar head."""

from __future__ import annotations

import pytest
import torch
from peft import PeftModel
from typer.testing import CliRunner

from megatron_policy.cli import app
from megatron_policy.convert import convert
from megatron_policy.errors import ConversionError
from tests import peft_models, scalar_oracle
from tests.exact import load_hf
from tests.unit.test_convert_adapters import (
    ALL,
    SMALL,
    assert_comes_back,
    assert_resumed,
    changed,
    tensors_of,
    with_tensors,
)
from tests.unit.test_merging import plainly, sides, weights_of

HEAD = "base_model.model.score."
STACKS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@pytest.mark.parametrize(
    ("modules", "stacks", "targets"),
    [
        (["q_proj", "k_proj", "v_proj", "o_proj"], STACKS, None),
        ([], STACKS, ["gate_up_proj", "down_proj"]),
        (["o_proj"], STACKS[1:], ["o_proj", "down_proj"]),
    ],
    ids=["all", "experts alone", "one of two"],
)
def test_adapters_of_stacked_experts_come_back_with_the_same_bits(
    checkpoint, tmp_path, modules: list[str], stacks: list[str], targets: list[str] | None
) -> None:
    base = checkpoint("gpt_oss", tied=False, **SMALL)
    peft = peft_models.make_adapters(base, tmp_path / "peft", modules, stacks=stacks)
    report = assert_comes_back(peft, base, tmp_path)
    assert isinstance(PeftModel.from_pretrained(load_hf(base), str(tmp_path / "back")), PeftModel)
    targets = targets or [*modules, "gate_up_proj", "down_proj"]
    assert f"target_modules: [{', '.join(targets)}]}}" in report.plan.resumed_with
    assert_resumed(tmp_path / "saved", base, targets)
    for source in ("peft", "saved"):
        with pytest.raises(ConversionError, match=r"stacked experts .* call export_hf, or merge"):
            convert(tmp_path / source, tmp_path / "merged", "hf", base=base, merge=True)
        shown = CliRunner().invoke(app, ["inspect", str(tmp_path / source)])
        assert shown.exit_code == 0, shown.output


def test_parameters_that_the_base_has_not_are_refused(checkpoint, tmp_path) -> None:
    base = checkpoint("qwen2", tied=False, **SMALL)
    peft = peft_models.make_adapters(base, tmp_path / "peft", ALL)
    changed(peft, target_parameters=["experts.down_proj"])
    with pytest.raises(ConversionError, match=r"experts.down_proj; .* has no such tensors"):
        convert(peft, tmp_path / "saved", "mcore", base=base)
    with pytest.raises(ConversionError, match="stacked experts"):
        convert(peft, tmp_path / "merged", "hf", base=base, merge=True)


@pytest.mark.parametrize("own", [True, False], ids=["head of the base", "new head"])
@pytest.mark.parametrize("kind", ["bradley_terry", "regression"])
def test_a_head_comes_back_with_the_adapters_and_is_part_of_what_is_merged(
    checkpoint, tmp_path, kind: str, own: bool
) -> None:
    base = checkpoint("qwen2", tied=False, **SMALL)
    if own:
        base = scalar_oracle.make(kind, base, tmp_path / "base")
    peft = peft_models.make_head_adapters(kind, base, tmp_path / "peft", ALL)
    assert_comes_back(peft, base, tmp_path)
    loaded = peft_models.LoadsWithHead(kind, tmp_path / "back")(base)
    theirs = tensors_of(peft)
    assert torch.equal(
        loaded.get_base_model().score.modules_to_save["default"].weight, theirs[HEAD + "weight"]
    )
    head = {"enabled": True, "reward_model_type": kind}
    assert_resumed(tmp_path / "saved", base, ALL, reward_model_cfg=head)
    own_weights = weights_of(base)
    for source in ("peft", "saved"):
        merged = tmp_path / f"{source} merged"
        convert(tmp_path / source, merged, "hf", base=base, merge=True)
        found = weights_of(merged)
        heads = {"lm_head.weight", "score.weight", "score.bias"}
        assert found.keys() - heads == own_weights.keys() - heads and "lm_head.weight" not in found
        for name, weight in found.items():
            if name.startswith("score."):
                assert torch.equal(weight, theirs[f"base_model.model.{name}"]), name
                continue
            pair = sides(peft, name)
            wanted = own_weights[name] if pair is None else plainly(own_weights[name], *pair)
            assert torch.equal(weight, wanted.to(weight.dtype)), name
        model = scalar_oracle.load(kind, merged)
        assert torch.equal(model.score.weight, theirs[HEAD + "weight"])


def test_a_head_that_is_missing_or_that_the_base_has_not_is_named(checkpoint, tmp_path) -> None:
    plain = checkpoint("qwen2", tied=False, **SMALL)
    base = scalar_oracle.make("bradley_terry", plain, tmp_path / "base")
    peft = peft_models.make_head_adapters("bradley_terry", base, tmp_path / "peft", ALL)
    with_tensors(peft, lambda tensors: tensors.pop(HEAD + "weight"))
    for task in ("SEQ_CLS", "CAUSAL_LM"):
        changed(peft, modules_to_save=None, task_type=task)
        with pytest.raises(ConversionError, match=r"no head \(modules_to_save\), .*start_from"):
            convert(peft, tmp_path / "saved", "mcore", base=base)
    changed(peft, task_type="SEQ_CLS", base_model_name_or_path=None)
    for merge, to in ((False, "mcore"), (True, "hf")):
        with pytest.raises(ConversionError, match=r"a scalar head \(task_type\), which"):
            convert(peft, tmp_path / "saved", to, base=plain, merge=merge)
    assert not (tmp_path / "saved").exists()
