"""The files in configs/ fit their models, and a file that cannot be read says what is wrong."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

from megatron_policy.config import PolicyConfig
from megatron_policy.config.composed import compose
from megatron_policy.config.layout import check_layout, topology_of
from megatron_policy.converters.architecture import Moe, Scoring
from megatron_policy.errors import ConfigError
from tests.pure.test_layout import shape

CONFIGS = Path(__file__).parents[2] / "configs"

SHAPES = {
    "grpo_qwen2_cpu.yaml": (2, (24, 14, 2, 4864)),
    "grpo_qwen2_1b_1gpu.yaml": (1, (28, 12, 2, 8960)),
    "sft_llama_8b_tp4_pp2.yaml": (16, (32, 32, 8, 14336)),
    "sft_qwen2_fsdp2.yaml": (4, (24, 14, 2, 4864)),
    "dpo_mistral_7b_tp2_pp2_vpp2.yaml": (8, (32, 32, 8, 14336)),
    "grpo_qwen3_30b_a3b_tp2_ep8.yaml": (16, (48, 32, 4, 6144)),
    "grpo_qwen2_7b_8h100.yaml": (8, (28, 28, 4, 18944)),
    "grpo_qwen3_8b_tp2_pp4_uneven.yaml": (8, (36, 32, 8, 12288)),
}
"""Ranks, and the model's layers, attention heads, key-value heads and feed-forward channels."""
EXPERTS = {
    "grpo_qwen3_30b_a3b_tp2_ep8.yaml": Moe(
        experts=128, chosen=8, ffn_hidden_size=768, scoring=Scoring.SOFTMAX
    ),
}


@pytest.mark.parametrize("file", sorted(path.name for path in CONFIGS.glob("*.yaml")))
def test_every_shipped_configuration_fits_its_model_and_ranks(file: str) -> None:
    world, (layers, heads, groups, ffn) = SHAPES[file]
    config = PolicyConfig.from_yaml(CONFIGS / file)
    model = shape(
        num_layers=layers,
        num_attention_heads=heads,
        num_query_groups=groups,
        ffn_hidden_size=ffn,
        moe=EXPERTS.get(file),
    )
    topology = topology_of(config, world)
    assert topology.world_size == world
    check_layout(config, model, topology)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("grpo: {}", "no section `policy`, .* nor a `model_name` at its top, .*: it has grpo"),
        ("", "it has nothing"),
        ("model_type: qwen2", "is a model's config, .* `model_name`, .* after --model"),
        ("[1]", "has no section `policy`: it is a list"),
        ("policy: [1]", "has no section `policy`"),
        ("policy: {a: [", "is not valid YAML"),
        ("defaults: base.yaml\npolicy: {model_name: m}", r"`defaults` name .*base\.yaml, which is"),
        ("defaults: policy.yaml\npolicy: {model_name: m}", r"`defaults` lead back to .*policy"),
        ("policy: {model_nam: m}", "did you mean 'model_name'"),
    ],
)
def test_a_file_that_cannot_be_read_says_what_is_wrong(
    tmp_path: Path, text: str, message: str
) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        PolicyConfig.from_yaml(file)


def test_a_missing_file_is_named_with_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "grpo.yaml").write_text("")
    with pytest.raises(ConfigError, match=r"no configuration file .*grop\.yaml: .*grpo\.yaml\?"):
        PolicyConfig.from_yaml(tmp_path / "grop.yaml")
    with pytest.raises(ConfigError, match=r"no configuration file x/Qwen2\.5-7B; .* after --model"):
        PolicyConfig.from_yaml("x/Qwen2.5-7B")
    with pytest.raises(ConfigError, match=r"no configuration file .*missing\.yaml$"):
        PolicyConfig.from_yaml(tmp_path / "missing.yaml")
    with pytest.raises(ConfigError, match=r"is a directory, .*: it has grpo\.yaml"):
        PolicyConfig.from_yaml(tmp_path)
    (tmp_path / "config.json").write_text("")
    with pytest.raises(ConfigError, match=r"is a model's directory, .* `model_name`"):
        PolicyConfig.from_yaml(tmp_path)


BASE = """
grpo: {seed: 7, steps: 5}
policy:
  model_name: base
  train_global_batch_size: 8
  train_micro_batch_size: 2
  max_grad_norm: 3.0
  sequence_packing: {train_mb_tokens: "${mul:${policy.train_micro_batch_size}, 4096}"}
  megatron_cfg:
    enabled: true
    optimizer: {lr: 1e-5, clip_grad: "${policy.max_grad_norm}"}
  generation: {max_new_tokens: "${mul:${policy.train_micro_batch_size}, 16}", top_k: 5}
"""
CHILD = """
defaults: ${oc.env:BASE_FOLDER}/base.yaml
policy:
  model_name: child
  seed: ${grpo.seed}
  generation: {max_new_tokens: 4}
grpo: {_override_: true, seed: 8}
"""


def test_a_file_is_the_policys_section_alone_or_one_section_of_several(tmp_path: Path) -> None:
    keys = {"model_name": "m", "train_global_batch_size": 8, "train_micro_batch_size": 2}
    keys |= {"megatron_cfg": {"enabled": True}}
    alone, whole = tmp_path / "alone.yaml", tmp_path / "whole.yaml"
    alone.write_text(yaml.safe_dump(keys))
    whole.write_text(yaml.safe_dump({"policy": keys, "grpo": {"steps": 1}, "data": {}}))
    assert PolicyConfig.from_yaml(alone) == PolicyConfig.from_yaml(whole)
    assert compose(whole).others == ("data", "grpo") and not compose(alone).others


def test_overrides_name_keys_of_the_policy_or_of_another_section(tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    keys = "model_name: m, train_global_batch_size: 8, megatron_cfg: {enabled: true}"
    file.write_text(f"policy: {{{keys}}}")
    given = ["train_micro_batch_size=2", "++policy.megatron_cfg.optimizer.lr=1e-5", "seed=3"]
    config = PolicyConfig.from_yaml(file, given)
    assert (config.train_micro_batch_size, config.seed) == (2, 3)
    assert config.megatron_cfg.optimizer.lr == 1e-5
    for wrong, said in (
        ("seed", "is not KEY=VALUE"),
        ("megatron_cfg..x=1", "is not KEY=VALUE"),
        ("model_name.x=1", "policy.model_name is 'm', not a section"),
        ("seed=[", "is not valid YAML"),
        ("seeds=1", "did you mean 'seed'"),
    ):
        with pytest.raises(ConfigError, match=said):
            PolicyConfig.from_yaml(file, [*given, wrong])


def test_an_override_takes_a_key_out_as_hydra_does(tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text(
        "policy: {model_name: m, seed: 1, metrics: {jsonl: a, tensorboard: b}}\ngrpo: {x: 1}"
    )
    taken = compose(file, ["~policy.metrics.jsonl", "~seed", "~grpo.x"])
    assert taken.policy == {"model_name": "m", "metrics": {"tensorboard": "b"}}
    assert compose(file, ["~policy.metrics"]).policy == {"model_name": "m", "seed": 1}
    for wrong, said in (
        ("~metric", "there is no policy.metric to take out"),
        ("~seed=1", "nor ~KEY"),
        ("~", "nor ~KEY"),
        ("~model_name.x", "policy.model_name is 'm', not a section"),
    ):
        with pytest.raises(ConfigError, match=said):
            compose(file, [wrong])


def test_an_override_of_one_place_of_an_alias_leaves_the_other(tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text("policy: {a: &one {x: 1}, b: *one}")
    assert compose(file, ["policy.a.x=2"]).policy == {"a": {"x": 2}, "b": {"x": 1}}


def test_files_inherit_and_interpolate_as_in_nemo_rl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("omegaconf")
    (tmp_path / "base.yaml").write_text(BASE)
    child = tmp_path / "below" / "child.yaml"
    child.parent.mkdir()
    child.write_text(CHILD)
    monkeypatch.delenv("BASE_FOLDER", raising=False)
    with pytest.raises(
        ConfigError,
        match=r"child\.yaml: defaults: .*BASE_FOLDER.*Set it first: export BASE_FOLDER=",
    ):
        PolicyConfig.from_yaml(child)
    monkeypatch.setenv("BASE_FOLDER", str(tmp_path))
    assert PolicyConfig.from_yaml(child).seed == 8
    config = PolicyConfig.from_yaml(child, ["max_grad_norm=2.0", "grpo.seed=9"])
    assert (config.model_name, config.seed) == ("child", 9)
    assert config.megatron_cfg.optimizer.clip_grad == 2.0
    assert config.generation is not None and config.generation.top_k == 5
    assert config.generation.max_new_tokens == 4
    base = PolicyConfig.from_yaml(tmp_path / "base.yaml", ["seed=${grpo.steps}"])
    assert base.generation is not None and base.generation.max_new_tokens == 32
    assert base.seed == 5
    with pytest.raises(ConfigError, match=r"policy\.seed: .*grpo\.steps"):
        PolicyConfig.from_yaml(child, ["seed=${grpo.steps}"])  # `_override_` has dropped it


@pytest.mark.parametrize("value", ["${nowhere.at.all}", "${policy.model_name}", "${nope:1}"])
def test_an_interpolation_that_cannot_be_resolved_is_named(tmp_path: Path, value: str) -> None:
    pytest.importorskip("omegaconf")
    file = tmp_path / "policy.yaml"
    file.write_text(f"policy: {{model_name: '{value}'}}")
    with pytest.raises(ConfigError, match=r"policy\.yaml: policy\.model_name: "):
        PolicyConfig.from_yaml(file)


@pytest.mark.parametrize("name", ["grpo", "sft", "dpo", "rm", "ppo"])
def test_our_configurations_for_nemo_rl_are_read_over_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    pytest.importorskip("omegaconf")
    ours = CONFIGS.parent / "examples" / "nemo_rl" / f"{name}.yaml"
    base = yaml.safe_load(ours.read_text())["defaults"].replace("${oc.env:NEMO_RL}", str(tmp_path))
    Path(base).parent.mkdir(parents=True)
    Path(base).write_text(BASE)
    monkeypatch.setenv("NEMO_RL", str(tmp_path))
    config = PolicyConfig.from_yaml(ours, ["megatron_cfg.tensor_model_parallel_size=2"])
    assert config.model_name == "base" and config.megatron_cfg.enabled
    assert config.megatron_cfg.tensor_model_parallel_size == 2
    assert config.make_sequence_length_divisible_by == (1 if name == "ppo" else 2)


def test_without_omegaconf_what_needs_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "omegaconf", None)
    file = tmp_path / "policy.yaml"
    for text, said in (
        ("policy: {model_name: '${x.y}'}", "policy.model_name is an interpolation"),
        ("defaults: base.yaml\npolicy: {model_name: m}", "it has `defaults`"),
    ):
        (tmp_path / "base.yaml").write_text("policy: {}")
        file.write_text(text)
        with pytest.raises(ConfigError, match=f"{said}.* pip install omegaconf"):
            PolicyConfig.from_yaml(file)
