"""Adapters alone between directories of PEFT and training checkpoints: bit-equal there and back;
what does not fit is refused by name.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from megatron_policy.adapters.base import base_digest, open_base
from megatron_policy.adapters.peft_files import (
    ADAPTER_CONFIG,
    ADAPTER_MODEL,
    BASE,
    read_peft,
)
from megatron_policy.adapters.targets import choose_adapters, make_spec
from megatron_policy.checkpoint import common_state, manifest, tracker, verifying
from megatron_policy.config import PolicyConfig
from megatron_policy.config.model_table import bind_model
from megatron_policy.convert import convert, plan_conversion, verify
from megatron_policy.converters.formats.hf_files import HfReader
from megatron_policy.errors import ConfigError, ConversionError
from tests import peft_models
from tests.exact import load_hf
from tests.pure.test_config import minimal
from tests.unit.command_line import run
from tests.unit.edited import Tensors, change_tensors, set_fields
from tests.unit.training_checkpoints import flip

SMALL = {"layers": 2, "vocab": 250, "hidden": 64, "heads": 4, "groups": 2, "ffn": 96}
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SOME, JOINED = ["q_proj", "v_proj", "up_proj"], ["qkv_proj", "gate_up_proj"]
LATENT = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
MIB = 2**20

CASES: dict[str, tuple[str, list[str], bool, list[str]]] = {
    "each module": ("qwen2", ALL, False, ALL),
    "fused": ("qwen2", ALL, True, ["linear_qkv", "o_proj", "linear_fc1", "down_proj"]),
    "some": ("qwen2", SOME, False, SOME),
    "one": ("llama", ["k_proj"], False, ["k_proj"]),
    "joined in the files": ("phi3", JOINED, False, JOINED),
    "latent attention": ("deepseek_v3", LATENT, False, LATENT),
    "some of the same A": ("qwen3", ["q_proj", "k_proj"], True, ["q_proj", "k_proj"]),
}
"""Family, modules, whether those of a fused layer share their A, and a policy's names for them."""


def made(checkpoint, target: Path, case: str = "each module") -> tuple[Path, Path]:
    """The model of a case, and adapters of it as PEFT saves them."""
    family, modules, shared, _ = CASES[case]
    base = checkpoint(family, tied=False, **SMALL)
    return base, peft_models.make_adapters(base, target, modules, shared=shared)


@dataclass(frozen=True)
class Stored:
    """Directories of the same adapters: PEFT's, the training checkpoint made of it, and what was
    made of that. Read only, but for a `copy`.
    """

    base: Path
    peft: Path
    saved: Path
    back: Path

    def copy(self, kind: str, folder: Path) -> Path:
        return Path(shutil.copytree(getattr(self, kind), folder / kind))


@pytest.fixture(scope="module")
def stored(checkpoint, tmp_path_factory) -> Stored:
    folder = tmp_path_factory.mktemp("stored")
    base, peft = made(checkpoint, folder / "peft")
    convert(peft, folder / "saved", "mcore", base=base)
    convert(folder / "saved", folder / "back", "hf")
    return Stored(base, peft, folder / "saved", folder / "back")


def changed(path: Path, **fields: Any) -> None:
    set_fields(path / ADAPTER_CONFIG, **fields)


def with_tensors(path: Path, change: Callable[[Tensors], object]) -> None:
    change_tensors(path / ADAPTER_MODEL, change)


def tensors_of(path: Path) -> Tensors:
    return load_file(path / ADAPTER_MODEL)


def assert_same_bits(one: Tensors, other: Tensors) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype and torch.equal(tensor, other[name]), name


def assert_comes_back(peft: Path, base: Path, folder: Path, **options: Any) -> Any:
    """Adapters have the same bits after a training checkpoint; the report of what made that."""
    report = convert(peft, folder / "saved", "mcore", base=base, **options)
    convert(folder / "saved", folder / "back", "hf", **options)
    assert_same_bits(tensors_of(peft), tensors_of(folder / "back"))
    assert verify(peft, folder / "saved").equal and verify(folder / "back", peft).equal
    return report


def assert_resumed(saved: Path, base: Path, targets: list[str], **top: Any) -> None:
    """A policy with these keys has the parameters of a checkpoint, and takes it for its own."""
    section = {"enabled": True, "dim": 4, "alpha": 6.0, "target_modules": targets}
    config = PolicyConfig.parse(
        minimal(model_name=str(base), **{"megatron_cfg.peft": section}, **top)
    )
    model = bind_model(config)
    table = choose_adapters(config, model)
    assert table is not None
    found = manifest.read(tracker.find(saved))
    shapes = {e.megatron: e.row.local_shape(table.architecture, 1) for e in table.entries}
    assert {key: shape for key, (_, shape) in found.tensors.items()} == shapes
    ours = common_state.read_ours(saved)
    assert ours["source_dtypes"].keys() == table.hf_shapes().keys()
    with HfReader(base) as reader:
        digest = base_digest(reader, model.architecture, model.overrides)
    stated = {"model": str(base), "digest": digest}
    stated |= {"hf_config_overrides": model.overrides} if model.overrides else {}
    assert json.loads((saved / "hf" / BASE).read_text()) == stated
    assert ours["adapters_of"] == make_spec(config, digest, model.overrides).identity(table)
    assert found.overrides == model.overrides


@pytest.mark.parametrize("case", CASES)
def test_adapters_come_back_with_the_same_bits_and_a_policy_resumes_from_them(
    checkpoint, tmp_path, case: str
) -> None:
    base, peft = made(checkpoint, tmp_path / "peft", case)
    report = assert_comes_back(peft, base, tmp_path, max_memory=MIB)
    assert isinstance(PeftModel.from_pretrained(load_hf(base), str(tmp_path / "back")), PeftModel)
    targets = CASES[case][3]
    keys = f"{{enabled: true, dim: 4, alpha: 6.0, target_modules: [{', '.join(targets)}]}}"
    assert report.plan.resumed_with == keys
    assert_resumed(tmp_path / "saved", base, targets)


def test_adapters_of_experts_come_back_too(checkpoint, tmp_path) -> None:
    base = checkpoint("qwen3_moe", **SMALL)
    assert_comes_back(peft_models.make_expert_adapters(base, tmp_path / "peft"), base, tmp_path)


def test_what_is_written_says_everything_and_is_covered_by_digests(stored: Stored) -> None:
    saved, back = stored.saved, stored.back
    config = (saved / "hf" / "config.json").read_bytes()
    assert config == (stored.base / "config.json").read_bytes()
    assert (saved / "hf" / "tokenizer.json").exists()
    stated = verifying.verify(saved)
    assert stated.contains == ("weights",) and stated.step == 0 and stated.family == "qwen2"
    files = {path.relative_to(saved).as_posix() for path in saved.rglob("*")}
    assert files - {"hf", "checkpoint.json"} == stated.files.keys() | stated.records.keys()
    found = read_peft(back)
    assert found.stated is not None and found.stated.model == str(stored.base)
    assert found.settings.rank == 4 and found.settings.alpha == 6.0
    assert set(os.listdir(back)) == {ADAPTER_MODEL, ADAPTER_CONFIG, BASE, "megatron_policy.json"}


def test_scales_that_peft_says_otherwise_are_kept(checkpoint, tmp_path) -> None:
    base, peft = made(checkpoint, tmp_path / "peft")
    changed(peft, use_rslora=True, alpha_pattern={"proj": 1.0} | dict.fromkeys(ALL, 5.0))
    convert(peft, tmp_path / "saved", "mcore", base=base)
    convert(tmp_path / "saved", tmp_path / "back", "hf")
    settings = read_peft(tmp_path / "back").settings
    assert (settings.rank, settings.alpha, settings.rank_stabilised) == (4, 10.0, False)


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_dtypes_are_kept_or_cast(checkpoint, tmp_path, dtype: str | None) -> None:
    base, peft = made(checkpoint, tmp_path / "peft")
    tensors = tensors_of(peft)
    mixed = {n: t.to(torch.float16 if ".q_proj." in n else t.dtype) for n, t in tensors.items()}
    save_file(mixed, peft / ADAPTER_MODEL)
    convert(peft, tmp_path / "saved", "mcore", base=base, dtype=dtype)
    convert(tmp_path / "saved", tmp_path / "back", "hf")
    wanted = {n: t if dtype is None else t.bfloat16() for n, t in mixed.items()}
    assert_same_bits(wanted, tensors_of(tmp_path / "back"))


def test_the_base_that_they_name_is_taken_if_it_is_here(checkpoint, tmp_path) -> None:
    base, peft = made(checkpoint, tmp_path / "peft")
    convert(peft, tmp_path / "saved", "mcore")
    changed(peft, base_model_name_or_path="somebody/else")
    with pytest.raises(ConfigError, match="give it with base=; they name 'somebody/else'"):
        convert(peft, tmp_path / "other", "mcore")
    with pytest.raises(ConfigError, match="trained on 'somebody/else', not on"):
        convert(peft, tmp_path / "other", "mcore", base=base)
    assert not (tmp_path / "other").exists()


def test_another_base_is_refused_by_its_digest(checkpoint, stored: Stored, tmp_path) -> None:
    other = checkpoint("qwen2", tied=False, seed=3, **SMALL)
    convert(stored.saved, tmp_path / "same", "hf", base=stored.base)
    for source, to, merge in (
        (stored.saved, "hf", False),
        (stored.saved, "hf", True),
        (stored.back, "mcore", False),
        (stored.back, "hf", True),
    ):
        with pytest.raises(ConfigError, match="which has other weights or config than"):
            convert(source, tmp_path / "out", to, base=other, merge=merge)
    assert os.listdir(tmp_path) == ["same"]


Q0 = "base_model.model.model.layers.0.self_attn.q_proj"
HEAD = "base_model.model.lm_head"


def head_adapter(tensors: Tensors) -> None:
    tensors |= {
        f"{HEAD}.lora_A.weight": torch.ones(4, 64),
        f"{HEAD}.lora_B.weight": torch.ones(250, 4),
    }


def put(path: Path, name: str, tensor: torch.Tensor) -> None:
    with_tensors(path, lambda tensors: tensors.update({f"{Q0}.{name}": tensor}))


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "DoRA": (lambda p: changed(p, use_dora=True), "use_dora=True: DoRA is not supported"),
    "a lost A": (
        lambda p: with_tensors(p, lambda t: t.pop(f"{Q0}.lora_A.weight")),
        rf"has no {Q0}\.lora_A\.weight; write both",
    ),
    "a bias": (
        lambda p: put(p, "lora_B.bias", torch.ones(64)),
        rf"has {Q0}\.lora_B\.bias; only linear",
    ),
    "the head": (
        lambda p: (with_tensors(p, head_adapter), changed(p, target_modules=[*ALL, "lm_head"])),
        "no linear layer of this qwen2 model that can be adapted is called lm_head",
    ),
    "another shape": (
        lambda p: put(p, "lora_B.weight", torch.ones(8, 4)),
        rf"do not fit .*\n  {Q0}\.lora_B\.weight is float32 \[8, 4\], must be \[64, 4\] of",
    ),
    "another dtype": (
        lambda p: put(p, "lora_B.weight", torch.ones(64, 4, dtype=torch.float64)),
        rf"{Q0}\.lora_B\.weight is float64 \[64, 4\], must be \[64, 4\] of float32 or bfloat16",
    ),
    "another rank": (lambda p: changed(p, r=8), r"A of \[4, \d+\] .* but rank 8"),
    "two scales": (
        lambda p: changed(p, alpha_pattern={"q_proj": 1.0}),
        r"alpha \(4, .*\) for .* a policy's are all alike: merge them",
    ),
    "an unnamed module": (
        lambda p: changed(p, target_modules=["q_proj"]),
        "does not name them, so PEFT leaves them out",
    ),
    "a lost head": (
        lambda p: changed(p, modules_to_save=["score"]),
        rf"lack base_model\.model\.score\.weight: restore {ADAPTER_MODEL}",
    ),
    "no tensors": (lambda p: with_tensors(p, lambda t: t.clear()), "has no adapters"),
    "no file": (lambda p: (p / ADAPTER_MODEL).unlink(), "save_pretrained or export_peft wrote"),
    "a cut file": (
        lambda p: (p / ADAPTER_MODEL).write_bytes((p / ADAPTER_MODEL).read_bytes()[:-9]),
        "truncated or not a safetensors file",
    ),
}


@pytest.mark.parametrize("bad", BAD)
def test_what_is_wrong_with_a_directory_is_named_and_nothing_is_left(stored, tmp_path, bad) -> None:
    peft = stored.copy("peft", tmp_path)
    act, said = BAD[bad]
    act(peft)
    for call in (plan_conversion, convert):
        with pytest.raises((ConversionError, ConfigError), match=said):
            call(peft, tmp_path / "out", "mcore", base=stored.base)
    assert os.listdir(tmp_path) == ["peft"]


WISHES: list[tuple[str, str, dict[str, Any], str]] = [
    ("peft", "hf", {}, "already; to='mcore' converts it to the other; merge=True adds it"),
    ("saved", "mcore", {}, "already; to='hf' converts it to the other; merge=True adds it"),
    ("base", "mcore", {"merge": True}, "has a whole model: leave out base= and merge=True"),
    ("base", "mcore", {"base": "x"}, "has a whole model: leave out base= and merge=True"),
    ("peft", "mcore", {"config": "x"}, "has adapters: give base= instead"),
    ("saved", "hf", {"base": "/nowhere"}, "'/nowhere' is not a directory"),
]


@pytest.mark.parametrize(("source", "to", "wish", "said"), WISHES, ids=str)
def test_a_wish_that_cannot_be_met_is_refused(stored, tmp_path, source, to, wish, said) -> None:
    with pytest.raises(ConfigError, match=said):
        convert(getattr(stored, source), tmp_path / "out", to, **wish)


def test_a_destination_inside_of_the_adapters_or_their_base_is_refused(stored: Stored) -> None:
    for destination in (stored.peft / "in", stored.base / "in"):
        with pytest.raises(ConfigError, match="choose another"):
            convert(stored.peft, destination, "hf", base=stored.base, merge=True)


@pytest.mark.parametrize(
    ("kind", "file", "to"), [("saved", "__0_0.distcp", "hf"), ("back", ADAPTER_MODEL, "mcore")]
)
def test_a_flipped_byte_of_adapters_is_found(stored, tmp_path, kind, file, to) -> None:
    path = stored.copy(kind, tmp_path)
    flip(path / file, (path / file).stat().st_size * 2 // 3)
    for merge, into in ((False, to), (True, "hf")):
        with pytest.raises(ConversionError, match="damaged"):
            convert(path, tmp_path / "out", into, base=stored.base, merge=merge)
    assert not (tmp_path / "out").exists()
    assert not verify(path, stored.peft).equal
    assert run("verify", path)[0] == 1


def test_the_commands_say_what_they_did(checkpoint, tmp_path) -> None:
    base, peft = made(checkpoint, tmp_path / "peft", "fused")
    saved, back = tmp_path / "saved", tmp_path / "back"
    code, said, _ = run("convert", peft, saved, "--to", "mcore", "--base", base)
    assert code == 0 and f"adapters of rank 4 and alpha 6 on {base}" in said
    assert "resume with fresh_optimizer=True and megatron_cfg.peft: {enabled: true, dim: 4" in said
    assert "6 tensors are kept once: modules of fused layers share an A" in said
    assert run("convert", saved, back, "--to", "hf")[0] == 0
    assert run("verify", saved)[1].endswith("complete: every digest matches\n")
    assert f"{back}: qwen2, peft, step 0" in run("verify", back)[1]
    assert "equal: 28 tensors" in run("verify", saved, back)[1]
    code, said, error = run("convert", peft, tmp_path / "out", "--to", "hf")
    assert code == 2 and "--to mcore converts it to the other; --merge adds it" in error
    code, said, error = run("convert", base, tmp_path / "out", "--to", "mcore", "--merge")
    assert code == 2 and "leave out --base and --merge" in error.replace("\n", " ")
    code, said, _ = run("convert", saved, tmp_path / "out", "--to", "hf", "--merge", "--dry-run")
    assert code == 0 and f"merged with the adapters in {saved}" in said
    assert not (tmp_path / "out").exists()


def test_inspect_shows_adapters_of_both_kinds(checkpoint, tmp_path) -> None:
    base, peft = made(checkpoint, tmp_path / "peft", "fused")
    convert(peft, tmp_path / "saved", "mcore", base=base)
    code, said, _ = run("inspect", tmp_path / "saved")
    assert code == 0 and said.startswith("family qwen2 (adapters)\n")
    layer = "decoder.layers.{layer}.self_attention.linear_qkv.adapter"
    assert f"{layer}.a  [4, 64]  Whole, held whole by every rank  layers 0-1" in said
    assert f"{layer}.b  [128, 4]  Qkv, split along dimension 0  layers 0-1" in said
    code, said, _ = run("inspect", peft)
    assert code == 0 and "\nadapter_config.json\n" in said
    # Values, which tell that A is one, are not read.
    assert f"{layer}.a  [12, 64]  Concatenated" in said
    assert "translated  lora_alpha = 6.0" in said and "0 unmatched" in said
    found = json.loads(run("inspect", peft, "--json")[1])
    assert found["fields_of"] == ADAPTER_CONFIG and found["problems"] == []


def test_inspect_marks_what_is_wrong_with_adapters(checkpoint, tmp_path) -> None:
    base, peft = made(checkpoint, tmp_path / "peft")
    changed(peft, use_dora=True, base_model_name_or_path="else/where")
    with_tensors(peft, lambda t: (t.pop(f"{Q0}.lora_A.weight"), head_adapter(t)))
    code, _, error = run("inspect", peft)
    assert code == 2 and "its directory or its name on the hub, with --config" in error
    code, said, error = run("inspect", peft, "--config", base)
    assert code == 1 and "refused     use_dora = True: DoRA is not supported" in said
    assert "<< missing" in said and f"{HEAD}.lora_B.weight  [250, 4]  float32: no linear" in said
    assert "use_dora = True" in error and f"{Q0}.lora_A.weight" in error


def test_a_training_checkpoint_that_lacks_what_was_said_of_it_is_refused(stored, tmp_path) -> None:
    """As an older version saved it, or damaged."""
    saved = stored.copy("saved", tmp_path)
    for file, said in (
        (ADAPTER_CONFIG, "not the files that say of which modules: load it"),
        (BASE, f"restore its {ADAPTER_CONFIG} and {BASE}"),
    ):
        content = (saved / "hf" / file).read_bytes()
        (saved / "hf" / file).unlink()
        with pytest.raises(ConversionError, match=said):
            convert(saved, tmp_path / "out", "hf")
        (saved / "hf" / file).write_bytes(content)
    state = torch.load(saved / "common.pt", weights_only=True)
    dtypes = state[common_state.OURS]["source_dtypes"]
    del dtypes[name := min(dtypes)]
    torch.save(state, saved / "common.pt")
    with pytest.raises(ConversionError, match=f"in which dtype {re.escape(name)} was"):
        convert(saved, tmp_path / "out", "hf")
    assert os.listdir(tmp_path) == ["saved"]


def test_a_whole_model_beside_a_config_of_adapters_is_refused_by_every_command(
    stored: Stored, tmp_path
) -> None:
    base, peft = stored.base, stored.peft
    both = Path(shutil.copytree(base, tmp_path / "both"))
    shutil.copy(peft / ADAPTER_CONFIG, both)
    for command in (
        ("inspect", both),
        ("convert", both, tmp_path / "mcore", "--to", "mcore"),
        ("convert", peft, tmp_path / "merged", "--to", "hf", "--merge", "--base", both),
        ("verify", both, base),
        ("parity", both),
        ("plan", "--refit", both),
    ):
        assert "both has adapter_config.json beside whole weights" in run(*command)[2], command
    assert os.listdir(tmp_path) == ["both"]


def test_overrides_go_with_adapters(checkpoint, tmp_path) -> None:
    """A directory of ours says with which its adapters were trained."""
    base, peft = made(checkpoint, tmp_path / "peft")
    convert(peft, tmp_path / "plain", "mcore", base=base)
    overrides = {"rms_norm_eps": 0.5}
    with HfReader(base) as reader:
        digest = base_digest(reader, open_base(base, overrides).architecture, overrides)
    stated = {"model": str(base), "digest": digest}
    (peft / BASE).write_text(json.dumps(stated | {"hf_config_overrides": overrides}))
    convert(peft, tmp_path / "saved", "mcore", base=base)
    own = json.loads((base / "config.json").read_text())
    assert json.loads((tmp_path / "saved/hf/config.json").read_text()) == own | overrides
    found = manifest.read(tmp_path / "saved")
    assert found.overrides == overrides and found.config != manifest.read(tmp_path / "plain").config
    convert(tmp_path / "saved", tmp_path / "merged", "hf", base=base, merge=True)
    assert json.loads((tmp_path / "merged/config.json").read_text()) == own | overrides
    convert(tmp_path / "saved", tmp_path / "back", "hf")
    again = read_peft(tmp_path / "back")
    assert again.stated is not None and again.stated.overrides == overrides


def test_adapters_are_not_written_over_their_base(stored: Stored, tmp_path: Path) -> None:
    base = stored.copy("base", tmp_path)
    said = "{} is inside .*, or contains it: choose another"
    for merge in (False, True):
        with pytest.raises(ConfigError, match=said.format(base)):
            convert(stored.peft, base, "mcore", base=base, merge=merge, overwrite=True)
    assert {p.name for p in base.iterdir()} == {p.name for p in stored.base.iterdir()}
    with pytest.raises(ConfigError, match=said.format(stored.base)):  # which they name
        plan_conversion(stored.saved, stored.base, "hf")
