"""Directories that PEFT writes: what is applied, and what is refused by name."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from peft.tuners.lora import LoraModel
from peft.tuners.tuners_utils import check_target_module_exists
from safetensors.torch import load_file, save_file

from megatron_policy.adapters.base import base_digest, open_base
from megatron_policy.adapters.peft_config import read_settings
from megatron_policy.adapters.peft_files import (
    ADAPTER_CONFIG,
    ADAPTER_MODEL,
    BASE,
    peft_contents,
    read_peft,
)
from megatron_policy.adapters.stacks import name_modules
from megatron_policy.adapters.table import (
    AdapterSpec,
    bind_adapters,
    list_stacked_parameters,
    list_target_parameters,
)
from megatron_policy.converters.formats.hf_config import read_config
from megatron_policy.converters.formats.hf_files import HfReader
from megatron_policy.converters.table import Table, bind
from megatron_policy.errors import ConfigError, ConversionError

NAME = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"
TENSORS = {
    NAME.format(layer, side): torch.randn(shape)
    for layer in (0, 1)
    for side, shape in (("A", (4, 8)), ("B", (6, 4)))
}
SHAPES = {name: tuple(tensor.shape) for name, tensor in TENSORS.items()}
SPEC = AdapterSpec(4, 8.0, 0.1, "some/model", "5eed")
MODULE = "model.layers.{}.self_attn.q_proj"
MODULES = [MODULE.format(layer) for layer in (0, 1)]


@pytest.fixture(scope="module")
def table(checkpoint) -> Table:
    """Of the adapters of `TENSORS`, but for its sizes."""
    return bind_adapters(bind(read_config(checkpoint("qwen2"))), 4, MODULES, lambda _: False)


@pytest.fixture
def written(tmp_path: Path, table: Table) -> Path:
    return write_peft(tmp_path / "adapters", SPEC, table)


def write_peft(path: Path, spec: AdapterSpec, table: Table) -> Path:
    path.mkdir(exist_ok=True)
    save_file(TENSORS, path / ADAPTER_MODEL)
    for name, content in peft_contents(spec, spec.peft_config(table)).items():
        (path / name).write_bytes(content)
    return path


@pytest.fixture
def theirs(written: Path) -> Path:
    """A directory that does not say its base by digest."""
    (written / BASE).unlink()
    return written


def changed(path: Path, name: str, **values: Any) -> None:
    content = json.loads((path / name).read_text(encoding="utf-8"))
    (path / name).write_text(json.dumps(content | values), encoding="utf-8")


def test_what_is_written_is_read_again_and_says_what_it_is(written: Path) -> None:
    found = read_peft(written)
    assert found.find_common_scale(SHAPES) == (4, 8.0)
    found.check_base("anywhere", "5eed", {})
    with HfReader(written, ADAPTER_MODEL) as reader:
        assert reader.shapes.keys() == TENSORS.keys()
        assert all(torch.equal(reader.tensor(name), each) for name, each in TENSORS.items())
    config = json.loads((written / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    assert config["target_modules"] == MODULES
    assert (config["r"], config["lora_alpha"], config["lora_dropout"]) == (4, 8, 0.1)
    assert config["task_type"] == "CAUSAL_LM"
    assert config["target_parameters"] is None and config["modules_to_save"] is None


def test_another_base_or_other_overrides_are_refused_by_the_digest(
    tmp_path: Path, table: Table, written: Path
) -> None:
    other = AdapterSpec(4, 1.5, 0.0, "", "0ther", {"rope_theta": 2.0})
    found = read_peft(write_peft(tmp_path / "overridden", other, table))
    assert found.find_common_scale(SHAPES) == (4, 1.5)
    assert found.stated is not None and found.stated.overrides == {"rope_theta": 2.0}
    found.check_base("anywhere", "0ther", {"rope_theta": 2.0})
    found = read_peft(written)
    with pytest.raises(
        ConfigError, match="'some/model', which has other weights or config than 'mine'"
    ):
        found.check_base("mine", "0ther", {})
    with pytest.raises(ConfigError, match=r"hf_config_overrides {}, not {'a': 1}: set policy.hf_"):
        found.check_base("mine", "0ther", {"a": 1})


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"peft_type": "IA3"}, "peft_type='IA3': only 'LORA' is read"),
    ({"task_type": "QUESTION_ANS"}, "task_type='QUESTION_ANS': adapters of other models than 'CAU"),
    ({"use_dora": True}, "use_dora=True: DoRA is not supported: merge them"),
    ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa': it changes the base: save them"),
    ({"bias": "all"}, "bias='all': they also change biases: merge them"),
    ({"lora_bias": True}, "lora_bias=True: they also add biases"),
    ({"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\]: .* merge them"),
    ({"modules_to_save": ["score", "lm_head"]}, "modules_to_save=.* only a scalar head is read"),
    *(
        ({"modules_to_save": modules}, "modules_to_save=.*: .* merge them")
        for modules in ("score", [{"score": 1}], {"score": 1})
    ),
    *(
        ({"target_parameters": named}, "target_parameters=.* must be names of parameters")
        for named in (3, "experts.down_proj", [3])
    ),
    ({"fan_in_fan_out": True}, "fan_in_fan_out=True: it is for Conv1D .* set it to false"),
    ({"trainable_token_indices": [3]}, r"trainable_token_indices=\[3\]: not supported"),
    ({"layer_replication": [[0, 2]]}, r"layer_replication=\[\[0, 2\]\]: not supported"),
    ({"of_next_year": {"a": 1}}, "of_next_year={'a': 1}: not supported; remove it if"),
    ({"exclude_modules": ".*v_proj"}, "exclude_modules='.*': a pattern is not read here: list"),
    ({"rank_pattern": {".*q_proj": 4}}, "rank_pattern=.* patterns are not read here"),
    ({"rank_pattern": {r".*\.q_.*": 4}}, "rank_pattern=.* patterns are not read here"),
    ({"rank_pattern": {"q_proj": 0}}, "rank_pattern=.* must be a whole number"),
    ({"alpha_pattern": {"q_proj": "8"}}, "alpha_pattern=.* must be a number"),
    ({"alpha_pattern": [8]}, "alpha_pattern="),
    ({"layers_to_transform": "all"}, "layers_to_transform='all': must be numbers"),
    ({"target_modules": {"q_proj": 1}}, "target_modules=.* must be names of modules"),
    ({"target_modules": None}, "target_modules=None: PEFT adapts .*: write the modules out"),
    *(({"r": rank}, "r=.*: must be a whole number") for rank in ("4", 10**400)),
    *(({"lora_alpha": alpha}, "lora_alpha=.*: must be a number") for alpha in (None, 10**400)),
    ({"lora_dropout": 2}, "lora_dropout=2: must be in 0"),
    ({"base_model_name_or_path": 7}, "base_model_name_or_path=7: must be a name"),
]


def test_what_would_compute_something_else_is_refused_by_name(written: Path) -> None:
    own = (written / ADAPTER_CONFIG).read_text(encoding="utf-8")
    for values, said in REFUSED:
        changed(written, ADAPTER_CONFIG, **values)
        with pytest.raises(ConversionError, match=f"{written} cannot be read:\n  {said}"):
            read_peft(written)
        (written / ADAPTER_CONFIG).write_text(own, encoding="utf-8")


def test_what_has_to_be_there_is_named_and_what_peft_writes_by_itself_is_read(
    written: Path,
) -> None:
    LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"]).save_pretrained(str(written))
    assert read_peft(written).find_common_scale(SHAPES) == (4, 8.0)
    content = json.loads((written / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    for missing in ("r", "lora_alpha", "peft_type", "target_modules"):
        rest = {name: value for name, value in content.items() if name != missing}
        (written / ADAPTER_CONFIG).write_text(json.dumps(rest), encoding="utf-8")
        with pytest.raises(ConversionError, match=f"{missing}=None"):
            read_peft(written)


PATHS = [
    f"model.layers.{layer}.{module}"
    for layer in (0, 1, 12)
    for module in ("self_attn.q_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.experts.1.up_proj")
]
NAMED: list[dict[str, Any]] = [
    {"target_modules": ["q_proj", "mlp.gate_proj"]},
    {"target_modules": ["proj", "gate_proj"]},
    {"target_modules": ["model.layers.1.self_attn.v_proj", "up_proj"]},
    {"target_modules": ["q_proj", "v_proj"], "exclude_modules": ["layers.1.self_attn.v_proj"]},
    {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": 1},
    {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [0, 12]},
    {"target_modules": ["up_proj"], "layers_to_transform": [1], "layers_pattern": "experts"},
    {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": ["layers"]},
    {"target_modules": ["model.layers.1.self_attn.q_proj"], "layers_to_transform": [0]},
]


@pytest.mark.parametrize("named", NAMED, ids=str)
def test_modules_are_those_that_peft_adapts(named: dict[str, Any]) -> None:
    named = {"r": 4, "lora_alpha": 8, **named}
    config, settings = LoraConfig(**named), read_settings({"peft_type": "LORA", **named}, "here")
    for path in PATHS:
        assert settings.names(path) == (check_target_module_exists(config, path) is True), path


def test_a_mapping_names_no_lists_of_layers() -> None:
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    with pytest.raises(ConversionError, match=r"layers_pattern=.*must be names of lists"):
        read_settings(config | {"layers_pattern": {"q_proj": 4}}, "here")


def test_a_number_of_thousands_of_digits_is_not_the_number_of_a_layer() -> None:
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    settings = read_settings(config | {"layers_to_transform": [1]}, "here")
    assert not settings.names(f"model.layers.{'1' * 5000}.self_attn.q_proj")


def test_adapters_that_peft_leaves_out_are_refused(written: Path) -> None:
    changed(written, ADAPTER_CONFIG, target_modules=["q_proj"], layers_to_transform=[1])
    with pytest.raises(ConversionError, match=f"adapts {MODULE.format(0)}; .* add them to it"):
        read_peft(written).find_common_scale(SHAPES)
    changed(written, ADAPTER_CONFIG, target_modules=".*proj", layers_to_transform=None)
    assert read_peft(written).find_common_scale(SHAPES) == (4, 8.0)


@pytest.mark.parametrize(
    "patterns",
    [
        {},
        {"use_rslora": True},
        {"alpha_pattern": {"q_proj": 3.0}},
        {"alpha_pattern": {"layers.1.self_attn.q_proj": 3.0}, "use_rslora": True},
        {"rank_pattern": {"^model.layers.0.self_attn.q_proj": 2}},
        {"rank_pattern": {"roj": 2}, "alpha_pattern": {"^q_proj": 2.0}},
        {"rank_pattern": {r".*\.q_proj": 2}, "alpha_pattern": {r".*\.0.self_attn.q_proj": 3.0}},
    ],
    ids=str,
)
def test_scales_are_those_of_peft(patterns: dict[str, Any]) -> None:
    """Its own layers tell their ranks and scales."""
    patterns = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], **patterns}
    made: Any = LoraModel(tiny_model(), LoraConfig(**patterns), "default")
    settings = read_settings({"peft_type": "LORA", **patterns}, "here")
    adapted = {n: each for n, each in made.named_modules() if hasattr(each, "scaling")}
    assert len(adapted) == 2
    for name, module in adapted.items():
        path = name.removeprefix("model.")
        rank, alpha = settings.find_scale(path)
        assert rank == module.r["default"], path
        assert math.isclose(alpha / rank, module.scaling["default"], rel_tol=1e-12), path


def tiny_model() -> torch.nn.Module:
    """Modules with the paths of `TENSORS`."""
    attention = (torch.nn.ModuleDict({"q_proj": torch.nn.Linear(8, 6)}) for _ in range(2))
    layers = torch.nn.ModuleList(torch.nn.ModuleDict({"self_attn": each}) for each in attention)
    return torch.nn.ModuleDict({"model": torch.nn.ModuleDict({"layers": layers})})


def test_one_rank_and_scale_of_all_modules_is_taken_and_others_are_named(written: Path) -> None:
    for alpha in (0, -8):
        changed(written, ADAPTER_CONFIG, lora_alpha=alpha)
        assert {a for _, a in read_peft(written).find_modules(SHAPES).values()} == {alpha}
        with pytest.raises(ConversionError, match=f"alpha {alpha} for .*convert --merge"):
            read_peft(written).find_common_scale(SHAPES)
    changed(written, ADAPTER_CONFIG, lora_alpha=8, use_rslora=True)
    assert read_peft(written).find_common_scale(SHAPES) == (4, 16.0)
    same = dict.fromkeys(MODULES, 3.0)
    changed(written, ADAPTER_CONFIG, use_rslora=False, alpha_pattern=same)
    assert read_peft(written).find_common_scale(SHAPES) == (4, 3.0)
    changed(written, ADAPTER_CONFIG, alpha_pattern={MODULE.format(1): 3.0})
    with pytest.raises(ConversionError, match=rf"\(4, 8.0\) for {MODULE.format(0)} .* --merge"):
        read_peft(written).find_common_scale(SHAPES)
    assert read_peft(written).find_modules(SHAPES)[MODULE.format(1)] == (4, 3.0)
    changed(written, ADAPTER_CONFIG, rank_pattern={"q_proj": 2})
    with pytest.raises(ConversionError, match=r"A of \[4, 8\] for .* but rank 2 .* correct r or"):
        read_peft(written).find_modules(SHAPES)


def test_tensors_that_are_missing_or_unknown_are_named(written: Path) -> None:
    for missing in (NAME.format(1, "B"), NAME.format(0, "A")):
        shapes = {name: shape for name, shape in SHAPES.items() if name != missing}
        with pytest.raises(ConversionError, match=f"has no {missing}; write both"):
            read_peft(written).find_modules(shapes)
    for unknown in (
        "base_model.model.lm_head.weight",
        "base_model.model.model.embed_tokens.lora_embedding_A",
        "model.layers.0.mlp.up_proj.lora_A.weight",
    ):
        with pytest.raises(ConversionError, match=f"has {unknown}; only linear"):
            read_peft(written).find_modules(SHAPES | {unknown: (4, 8)})
    with pytest.raises(ConversionError, match="has no adapters"):
        read_peft(written).find_common_scale({})


@pytest.mark.parametrize("name", [ADAPTER_CONFIG, BASE])
def test_a_damaged_or_missing_file_is_named(written: Path, name: str) -> None:
    changed(written, BASE, digest=5)
    with pytest.raises(ConversionError, match="does not name a base and its digest"):
        read_peft(written)
    for text in ("", "[]", "{", '{"r": 4, "r": 4}'):
        (written / name).write_text(text, encoding="utf-8")
        with pytest.raises(ConversionError, match=name):
            read_peft(written)
    with pytest.raises(ConfigError, match="save_pretrained or export_peft wrote"):
        read_peft(written.parent)


def test_a_base_that_is_only_named_has_to_have_that_name_or_the_same_weights(
    checkpoint, theirs: Path, tmp_path: Path
) -> None:
    base = checkpoint("qwen2")

    def check(named: str | None) -> None:
        changed(theirs, ADAPTER_CONFIG, base_model_name_or_path=named)
        read_peft(theirs).check_base(base, "5eed", {})

    for named in (None, str(base), f"somebody/{base.name.upper()}", f"/other/place/{base.name}/"):
        check(named)
    with pytest.raises(ConfigError, match=r"'some/model', not on .*write that into base_model_na"):
        check("some/model")
    (tmp_path / "same").symlink_to(base)
    check(str(tmp_path / "same"))
    copied = shutil.copytree(base, tmp_path / "other name")
    check(str(copied))
    tensors = load_file(base / "model.safetensors")
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, copied / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match="other name"):
        check(str(copied))
    with HfReader(base) as one, HfReader(copied) as other:
        arch = open_base(base).architecture
        assert base_digest(one, arch, {}) != base_digest(other, arch, {})
        assert base_digest(one, arch, {}) != base_digest(one, arch, {"a": 1})


def test_models_that_differ_in_what_their_config_computes_or_in_late_rows_are_told_apart(
    checkpoint, theirs: Path, tmp_path: Path
) -> None:
    base = checkpoint("qwen2")
    own = json.loads((base / "config.json").read_text())
    found = {}
    changes = {"same": {}, "idle": {"pad_token_id": 3}, "eps": {"rms_norm_eps": 0.05}, "late": {}}
    for name, change in changes.items():
        root = Path(shutil.copytree(base, tmp_path / name))
        (root / "config.json").write_text(json.dumps(own | change))
        if name == "late":
            tensors = load_file(root / "model.safetensors")
            for tensor in tensors.values():
                if tensor.dim() > 1:
                    tensor[4:] += 0.5
            save_file(tensors, root / "model.safetensors", metadata={"format": "pt"})
        with HfReader(root) as reader:
            found[name] = base_digest(reader, open_base(root).architecture, {})
    assert found["same"] == found["idle"]
    assert len(set(found.values())) == 3
    changed(theirs, ADAPTER_CONFIG, base_model_name_or_path=str(tmp_path / "same"))
    settings = read_peft(theirs)
    settings.check_base(tmp_path / "idle", "", {})
    changed(theirs, ADAPTER_CONFIG, base_model_name_or_path=str(tmp_path / "eps"))
    settings = read_peft(theirs)
    settings.check_base(base, "", {"rms_norm_eps": 0.05})
    for other, overrides in (("same", {}), ("same", {"rms_norm_eps": 0.5}), ("late", {})):
        with pytest.raises(ConfigError, match="were trained on"):
            settings.check_base(tmp_path / other, "", overrides)


def test_a_digest_of_an_earlier_release_is_compared_as_far_as_it_goes(written: Path) -> None:
    changed(written, BASE, digest="01" * 16)
    found = read_peft(written)
    found.check_base("mine", f"{'01' * 16}.{'23' * 16}", {})
    changed(written, BASE, digest=f"{'01' * 16}.{'45' * 16}")
    for other in (found, read_peft(written)):
        with pytest.raises(ConfigError, match="other weights or config"):
            other.check_base("mine", f"{'67' * 16}.{'23' * 16}", {})
    with pytest.raises(ConfigError, match="other weights or config"):
        read_peft(written).check_base("mine", f"{'01' * 16}.{'23' * 16}", {})


def test_the_revision_of_a_snapshot_has_to_be_the_stated_one(
    checkpoint, theirs: Path, tmp_path: Path
) -> None:
    commit = "0123456789abcdef" * 2 + "01234567"
    snapshot = tmp_path / "models--some--model" / "snapshots" / commit
    shutil.copytree(checkpoint("qwen2"), snapshot)
    for revision in (None, commit, "main"):
        changed(theirs, ADAPTER_CONFIG, revision=revision)
        read_peft(theirs).check_base(snapshot, "5eed", {})
    changed(theirs, ADAPTER_CONFIG, revision=commit[::-1])
    with pytest.raises(ConfigError, match=f"revision {commit[::-1]} of 'some/model'.*{commit}"):
        read_peft(theirs).check_base(snapshot, "5eed", {})


@pytest.fixture(scope="module")
def stacked(checkpoint) -> tuple[list[str], Table]:
    """The parameters with stacked experts, and the table of adapters of these and of `MODULES`."""
    model = bind(read_config(checkpoint("gpt_oss")))
    parameters = list_stacked_parameters(model)
    return parameters, bind_adapters(model, 4, MODULES, lambda _: False, parameters)


def test_parameters_of_experts_are_named_whole_or_by_their_ends_and_have_the_modules_scale(
    tmp_path: Path, stacked: tuple[list[str], Table]
) -> None:
    parameters, adapters = stacked
    path, shapes = write_peft(tmp_path / "adapters", SPEC, adapters), adapters.hf_shapes()
    config = json.loads((path / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    assert config["target_modules"] == MODULES
    assert config["target_parameters"] == sorted(parameters) == list_target_parameters(adapters)
    assert config["lora_dropout"] == 0.0
    ends = ["experts.down_proj", "gate_up_proj"]
    for named in (parameters, ends):
        changed(path, ADAPTER_CONFIG, target_parameters=named)
        found = read_peft(path)
        assert found.find_parameters(parameters, "here") == parameters
        assert found.find_common_scale(shapes, parameters) == (4, 8.0)
        assert list(found.find_modules(shapes, parameters)) == config["target_modules"]
    changed(path, ADAPTER_CONFIG, target_parameters=["experts.down_proj"])
    assert all(
        name.endswith("down_proj") for name in read_peft(path).find_parameters(parameters, "")
    )
    for other in (["experts.gate_proj"], ["xperts.down_proj"], [*ends, "w"]):
        changed(path, ADAPTER_CONFIG, target_parameters=other)
        with pytest.raises(ConversionError, match=f"{other[-1]}; here has no such tensors"):
            read_peft(path).find_parameters(parameters, "here")
    with pytest.raises(ConversionError, match="does not name them"):
        read_peft(path).find_common_scale(shapes)
    changed(path, ADAPTER_CONFIG, target_parameters=parameters)
    for patterns in ({"alpha_pattern": {"down_proj": 3.0}}, {"rank_pattern": {"down_proj": 2}}):
        changed(path, ADAPTER_CONFIG, **{"alpha_pattern": {}, "rank_pattern": {}} | patterns)
        with pytest.raises(ConversionError, match=r"for .*down_proj, but a policy's are all alike"):
            read_peft(path).find_common_scale(shapes, parameters)


def test_what_peft_adapts_as_parameters_is_read_as_modules_or_stacks() -> None:
    """By what a file has: of each expert, or of all."""
    layer, prefix = "model.layers.1.mlp", "base_model.model."
    experts = [f"{layer}.experts.{n}.{each}_proj" for n in (0, 1) for each in ("gate", "up")]
    apart = [f"{prefix}{each}.lora_A.weight" for each in experts]
    stacked = [f"{prefix}{layer}.experts.base_layer.lora_A.weight"]
    into, down = (f"{layer}.experts.{each}_proj" for each in ("gate_up", "down"))
    weights = [f"{layer}.gate_proj.weight"]
    assert name_modules([into, down, *weights], apart) == ({*experts, f"{layer}.gate_proj"}, [])
    assert name_modules(["gate_up_proj", "experts.down_proj"], apart) == (set(experts), [])
    assert name_modules([into, down], stacked) == (set(), [into, down])
    assert name_modules([into.replace("1", "2")], apart) == (set(), [into.replace("1", "2")])
    assert name_modules(["mixer.experts.up_proj"], []) == (set(), ["mixer.experts.up_proj"])


def test_a_head_that_is_trained_in_full_comes_with_the_adapters(written: Path) -> None:
    head = {"base_model.model.score.weight": (1, 8)}
    with pytest.raises(ConversionError, match=r"has base_model.model.score.weight; only linear"):
        read_peft(written).find_common_scale(SHAPES | head)
    assert not read_peft(written).settings.of_head
    changed(written, ADAPTER_CONFIG, modules_to_save=["classifier", "score"])
    found = read_peft(written)
    assert found.find_common_scale(SHAPES | head) == (4, 8.0) and found.settings.has_head
    changed(written, ADAPTER_CONFIG, modules_to_save=None, task_type="SEQ_CLS")
    found = read_peft(written)
    assert found.settings.of_head and not found.settings.has_head


def test_a_directory_that_is_not_there_or_lacks_a_file_is_named_with_what_it_lacks(
    written: Path,
) -> None:
    def refused(path: Path) -> str:
        with pytest.raises(ConfigError) as error:
            read_peft(path)
        return str(error.value)

    give = "give a directory that PEFT's save_pretrained or export_peft wrote"
    slip = written.with_name("adapter")
    assert refused(slip) == f"{slip} does not exist (did you mean {written}?): {give}"
    file = written / ADAPTER_CONFIG
    assert refused(file) == f"{file} is a file: {give}"
    (written / ADAPTER_MODEL).unlink()
    assert refused(written) == f"{written} has no {ADAPTER_MODEL}: {give}"
    (written / "iter_0000001").mkdir()
    (written / "iter_0000001" / "__0_0.distcp").touch()
    file.unlink()
    assert refused(written) == (
        f"{written} has no {ADAPTER_CONFIG} and no {ADAPTER_MODEL}: {give}; `megatron-policy "
        f"convert {written / 'iter_0000001'} OUT --to hf --config MODEL` makes one of a training "
        "checkpoint"
    )
