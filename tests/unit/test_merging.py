"""Adapters added to their base: every element as plain torch computes it, the same bits whatever
the memory; what does not fit is refused by name.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from megatron_policy.adapters.peft_files import ADAPTER_MODEL
from megatron_policy.convert import convert, plan_conversion, verify
from megatron_policy.errors import ConfigError, ConversionError
from tests import peft_models
from tests.exact import load_hf
from tests.unit.test_convert_adapters import (
    ALL,
    CASES,
    MIB,
    Q0,
    SMALL,
    changed,
    head_adapter,
    made,
    with_tensors,
)

PREFIX = "base_model.model."
SCALE = peft_models.ALPHA / peft_models.RANK
Checkpoint = Callable[..., Path]


def weights_of(path: Path) -> dict[str, torch.Tensor]:
    return {
        n: t for file in sorted(path.glob("model*.safetensors")) for n, t in load_file(file).items()
    }


def sides(adapters: Path, weight: str) -> tuple[torch.Tensor, torch.Tensor] | None:
    """A and B of the adapter of a weight, in fp32."""
    module = PREFIX + weight.removesuffix(".weight").replace("backbone.", "model.", 1)
    tensors = load_file(adapters / ADAPTER_MODEL)
    stacked = re.fullmatch(r"(.*\.mixer\.experts)\.(\d+)\.(up|down)_proj", module)
    if stacked:  # without a gate
        path, expert = stacked[1] + ".base_layer" * (stacked[3] == "up"), int(stacked[2])
        a, b = (tensors[f"{path}.lora_{side}.weight"].float() for side in "AB")
        rank = peft_models.RANK
        return a[expert * rank : (expert + 1) * rank], b[:, expert :: len(a) // rank]
    if f"{module}.lora_A.weight" not in tensors:
        return None
    return tensors[f"{module}.lora_A.weight"].float(), tensors[f"{module}.lora_B.weight"].float()


def plainly(
    weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float = SCALE
) -> torch.Tensor:
    """The sum on the whole matrix, one rank after another, in fp32."""
    total = torch.zeros(weight.shape)
    for r in range(len(a)):
        total = total + (b[:, r : r + 1] * scale) * a[r]
    return total + weight.float()


def assert_alike(
    one: dict[str, torch.Tensor],
    other: dict[str, torch.Tensor],
    base: Path,
    adapters: Path,
    scales: dict[str, float] | None = None,
) -> None:
    """Two ways to merge in fp32 agree within the rounding of their sums, in whatever order."""
    own = weights_of(base)
    assert own.keys() <= one.keys() and own.keys() <= other.keys()
    for name, weight in own.items():
        pair, bound = sides(adapters, name), torch.zeros(())
        if pair is not None:
            a, b = (each.double().abs() for each in pair)
            terms = 3 * len(a) + 3  # a fused layer adds zeros for its other modules
            scale = (scales or {}).get(name.removesuffix(".weight"), SCALE)
            bound = 2 * terms * 2.0**-24 * (weight.double().abs() + scale * b @ a)
        assert (one[name].double() - other[name].double()).abs().le(bound).all(), name


def assert_merged(
    merged: Path, base: Path, adapters: Path, dtype: torch.dtype | None = None
) -> int:
    """Every weight is what it has to be; how many have adapters."""
    found, own, count = weights_of(merged), weights_of(base), 0
    assert found.keys() == own.keys()
    for name, weight in own.items():
        pair, wanted = sides(adapters, name), weight
        if pair is not None:
            count += 1
            wanted = plainly(weight, *pair).to(weight.dtype)
            if dtype is not None:
                wanted = plainly(weight, *pair)
            exact = weight.double() + SCALE * pair[1].double() @ pair[0].double()
            size = weight.double().abs() + SCALE * pair[1].double().abs() @ pair[0].double().abs()
            rounding = torch.finfo(found[name].dtype).eps / 2 * exact.abs()
            bound = (len(pair[0]) + 3) * 2.0**-24 * size + rounding
            assert (found[name].double() - exact).abs().le(bound).all(), name
            assert not torch.equal(found[name].double(), weight.double()), name
        wanted = wanted if dtype is None else wanted.to(dtype)
        assert found[name].dtype == wanted.dtype and torch.equal(found[name], wanted), name
    return count


@pytest.mark.dear
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_the_sums_and_all_else_is_the_base(
    checkpoint: Checkpoint, tmp_path: Path, case: str, dtype: str
) -> None:
    family, modules, shared, _ = CASES[case]
    base = checkpoint(family, tied=False, dtype=dtype, **SMALL)
    peft = peft_models.make_adapters(base, tmp_path / "peft", modules, shared=shared)
    convert(peft, tmp_path / "saved", "mcore", base=base)
    for source in ("peft", "saved"):
        report = convert(tmp_path / source, tmp_path / f"{source} merged", "hf", merge=True)
        assert report.plan.adapters == f"merged with the adapters in {tmp_path / source}"
        adapted = assert_merged(tmp_path / f"{source} merged", base, peft)
        assert adapted == len(load_file(peft / ADAPTER_MODEL)) // 2
    assert verify(tmp_path / "peft merged", tmp_path / "saved merged").equal
    for file in base.iterdir():
        if file.suffix != ".safetensors":
            assert (tmp_path / "saved merged" / file.name).read_bytes() == file.read_bytes()


def test_experts_are_merged_one_by_one(checkpoint: Checkpoint, tmp_path: Path) -> None:
    base = checkpoint("qwen3_moe", **SMALL)
    peft = peft_models.make_expert_adapters(base, tmp_path / "peft")
    convert(peft, tmp_path / "merged", "hf", base=base, merge=True)
    adapters = len(load_file(peft / ADAPTER_MODEL)) // 2
    assert assert_merged(tmp_path / "merged", base, peft) == adapters


def test_the_bits_are_the_same_with_any_memory(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Matrices of several MiB, with more columns than are computed at a time; parts of rows."""
    base = checkpoint("qwen2", hidden=512, ffn=4200, layers=1, vocab=300, dtype="bfloat16")
    peft = peft_models.make_adapters(base, tmp_path / "peft", ALL)
    tensors = load_file(peft / ADAPTER_MODEL)
    save_file({n: t.bfloat16() for n, t in tensors.items()}, peft / ADAPTER_MODEL)
    for name, memory in (("little", MIB), ("much", 2**30)):
        convert(peft, tmp_path / name, "hf", base=base, merge=True, max_memory=memory)
    one, other = (tmp_path / name / "model.safetensors" for name in ("little", "much"))
    assert one.read_bytes() == other.read_bytes()
    assert_merged(tmp_path / "little", base, peft)


def test_a_row_that_does_not_fit_into_memory_is_merged_in_parts(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, peft = made(checkpoint, tmp_path / "peft")
    convert(peft, tmp_path / "whole", "hf", base=base, merge=True)
    monkeypatch.setattr("megatron_policy.convert.blockwise.MOST_BYTES", 1000)
    monkeypatch.setattr("megatron_policy.convert.merging._COLUMNS", 7)
    monkeypatch.setattr("megatron_policy.convert.merging._ROWS", 3)
    report = convert(peft, tmp_path / "parts", "hf", base=base, merge=True)
    assert report.plan.buffer_bytes <= 1000
    assert verify(tmp_path / "whole", tmp_path / "parts").equal


@pytest.mark.parametrize(("own", "dtype"), [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_a_cast_rounds_the_sum_once(
    checkpoint: Checkpoint, tmp_path: Path, own: str, dtype: str
) -> None:
    base = checkpoint("qwen2", tied=False, dtype=own, **SMALL)
    peft = peft_models.make_adapters(base, tmp_path / "peft", ALL)
    convert(peft, tmp_path / "merged", "hf", base=base, merge=True, dtype=dtype)
    assert_merged(tmp_path / "merged", base, peft, getattr(torch, dtype))
    written = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert dtype in (written.get("dtype"), written.get("torch_dtype"))


def test_a_tied_model_and_one_in_several_files_are_merged(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    base = checkpoint("qwen2", tied=True, max_shard_size="40KB", **SMALL)
    peft = peft_models.make_adapters(base, tmp_path / "peft", ["q_proj"])
    convert(peft, tmp_path / "merged", "hf", base=base, merge=True, max_shard_size=30_000)
    assert len(list((tmp_path / "merged").glob("*.safetensors"))) > 2
    assert assert_merged(tmp_path / "merged", base, peft) == 2


def test_a_whole_checkpoint_of_megatron_core_can_be_merged_to_also_with_a_head_of_its_own(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    base, peft = made(checkpoint, tmp_path / "peft")
    with_tensors(peft, head_adapter)
    changed(peft, target_modules=[*ALL, "lm_head"])
    convert(peft, tmp_path / "hf", "hf", base=base, merge=True)
    convert(peft, tmp_path / "mcore", "mcore", base=base, merge=True)
    assert verify(tmp_path / "hf", tmp_path / "mcore").equal
    convert(tmp_path / "mcore", tmp_path / "back", "hf")
    assert assert_merged(tmp_path / "back", base, peft) == 2 * len(ALL) + 1


@pytest.mark.parametrize("alike", [True, False])
def test_peft_itself_merges_to_the_same_within_rounding_also_other_ranks_and_scales(
    checkpoint: Checkpoint, tmp_path: Path, alike: bool
) -> None:
    base, peft = made(checkpoint, tmp_path / "peft")
    scales: dict[str, float] = {}
    if not alike:

        def narrower(tensors: dict[str, torch.Tensor]) -> None:
            tensors[f"{Q0}.lora_A.weight"] = tensors[f"{Q0}.lora_A.weight"][:2].clone()
            tensors[f"{Q0}.lora_B.weight"] = tensors[f"{Q0}.lora_B.weight"][:, :2].clone()

        with_tensors(peft, narrower)
        path = Q0.removeprefix(PREFIX)
        changed(peft, rank_pattern={path: 2}, alpha_pattern={path: 5.0, "k_proj": 1.0})
        scales = {path: 5.0 / 2}
        scales |= {f"model.layers.{layer}.self_attn.k_proj": 1.0 / 4 for layer in (0, 1)}
    convert(peft, tmp_path / "merged", "hf", base=base, merge=True)
    found, own = weights_of(tmp_path / "merged"), weights_of(base)
    for module, scale in scales.items():
        pair = sides(peft, f"{module}.weight")
        assert pair is not None
        wanted = plainly(own[f"{module}.weight"], *pair, scale=scale)
        assert torch.equal(found[f"{module}.weight"], wanted)
    theirs = PeftModel.from_pretrained(load_hf(base), str(peft)).merge_and_unload()
    assert_alike(found, theirs.state_dict(), base, peft, scales)


BAD: dict[str, dict[str, torch.Tensor]] = {
    r"q_proj\.weight is \[64, 64\], but its adapter's A and B are": {
        f"{Q0}.lora_B.weight": torch.ones(8, 4)
    },
    r"has no model\.layers\.0\.self_attn\.q_proj_of_mine\.weight": {
        f"{Q0}_of_mine.lora_A.weight": torch.ones(4, 64),
        f"{Q0}_of_mine.lora_B.weight": torch.ones(64, 4),
    },
    r"model\.norm\.weight is \[64\], but its adapter's A and B are": {
        f"{PREFIX}model.norm.lora_A.weight": torch.ones(4, 1),
        f"{PREFIX}model.norm.lora_B.weight": torch.ones(64, 4),
    },
}


@pytest.mark.parametrize("said", BAD)
def test_what_does_not_fit_is_named_and_nothing_is_left(
    checkpoint: Checkpoint, tmp_path: Path, said: str
) -> None:
    base, peft = made(checkpoint, tmp_path / "peft")
    with_tensors(peft, lambda tensors: tensors.update(BAD[said]))
    changed(peft, target_modules=".*")
    for call in (plan_conversion, convert):
        with pytest.raises(ConversionError, match=f"do not fit the base:\n.*{said}"):
            call(peft, tmp_path / "out", "hf", base=base, merge=True)
    with pytest.raises(ConfigError, match="give base= instead"):
        convert(peft, tmp_path / "out", "hf", base=base, merge=True, config=base)
    assert os.listdir(tmp_path) == ["peft"]


def test_a_damaged_base_is_found(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """A bit of a weight that has an adapter, which is only seen while it is merged."""
    original, peft = made(checkpoint, tmp_path / "peft")
    convert(original, tmp_path / "mcore", "mcore")
    convert(tmp_path / "mcore", tmp_path / "base", "hf")
    changed(peft, base_model_name_or_path=None)
    convert(peft, tmp_path / "merged", "hf", base=tmp_path / "base", merge=True)
    assert_merged(tmp_path / "merged", original, peft)
    file = tmp_path / "base" / "model.safetensors"
    content = file.read_bytes()
    own = load_file(file)["model.layers.1.mlp.down_proj.weight"]
    at = content.index(own.numpy().tobytes()) + 77
    file.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    with pytest.raises(ConversionError, match=r"layers\.1\.mlp\.down_proj\.weight is damaged"):
        convert(peft, tmp_path / "out", "hf", base=tmp_path / "base", merge=True)
    assert not (tmp_path / "out").exists()


def test_sums_beyond_float16_are_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    base = checkpoint("qwen2", tied=False, dtype="float16", **SMALL)
    peft = peft_models.make_adapters(base, tmp_path / "peft", ["q_proj"])
    with_tensors(peft, lambda tensors: tensors.update({n: t * 1e4 for n, t in tensors.items()}))
    with pytest.raises(ConversionError, match="beyond the range of float16"):
        convert(peft, tmp_path / "out", "hf", base=base, merge=True)
    convert(peft, tmp_path / "out", "hf", base=base, merge=True, dtype="bfloat16")
