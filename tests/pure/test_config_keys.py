"""The table of keys and the typed sections say the same, and the host's sections parse."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from megatron_policy.config import PolicyConfig, ignored_keys
from megatron_policy.config.keys import KEYS, SECTIONS
from megatron_policy.config.parallel_sizes import MEGATRON_SIZES, parallel_sizes
from megatron_policy.config.section import Applied, Ignored, Nested, Rejected, Section
from megatron_policy.errors import ConfigError
from tests.pure.test_config import minimal
from tests.unit import host_policies

PACKAGE = Path(__file__).parents[2] / "megatron_policy"

PUBLIC = {
    "": """model_name tokenizer train_global_batch_size train_micro_batch_size learning_rate
        logprob_batch_size logprob_chunk_size generation generation_batch_size precision
        dtensor_cfg fsdp_cfg megatron_cfg
        dynamic_batching sequence_packing make_sequence_length_divisible_by
        max_total_sequence_length max_grad_norm fsdp_offload_enabled
        activation_checkpointing_enabled refit_buffer_size_gb refit_bucket_bytes
        refit_dtype refit_timeout_s checkpoint_timeout_s collective_timeout_s worker_timeout_s
        optimizer scheduler""",
    "tokenizer.": "name chat_template",
    "megatron_cfg.": """enabled empty_unused_memory_level activation_checkpointing converter_type
        tensor_model_parallel_size pipeline_model_parallel_size num_layers_in_first_pipeline_stage
        num_layers_in_last_pipeline_stage context_parallel_size pipeline_dtype sequence_parallel
        optimizer scheduler distributed_data_parallel_config expert_model_parallel_size
        expert_tensor_parallel_size freeze_moe_router moe_router_dtype
        moe_router_load_balancing_type moe_router_bias_update_rate apply_rope_fusion
        bias_activation_fusion attention_backend recompute_granularity recompute_method
        recompute_num_layers recompute_modules defer_fp32_logits env_vars peft
        virtual_pipeline_model_parallel_size transformer_impl checkpoint""",
    "megatron_cfg.optimizer.": """optimizer lr min_lr weight_decay bf16 fp16 params_dtype adam_beta1
        adam_beta2 adam_eps sgd_momentum use_distributed_optimizer use_precision_aware_optimizer
        clip_grad optimizer_cpu_offload optimizer_offload_fraction""",
    "megatron_cfg.scheduler.": """start_weight_decay end_weight_decay weight_decay_incr_style
        lr_decay_style lr_decay_iters lr_warmup_iters lr_warmup_init""",
    "megatron_cfg.distributed_data_parallel_config.": """grad_reduce_in_fp32 overlap_grad_reduce
        overlap_param_gather average_in_collective use_custom_fsdp
        data_parallel_sharding_strategy""",
    "megatron_cfg.checkpoint.": "async_save fresh_optimizer",
    "dtensor_cfg.": """enabled cpu_offload sequence_parallel activation_checkpointing
        tensor_parallel_size context_parallel_size custom_parallel_plan""",
    "fsdp_cfg.": """enabled sharding_strategy fsdp_offload_enabled
        activation_checkpointing_enabled""",
    "dynamic_batching.": "enabled train_mb_tokens logprob_mb_tokens sequence_length_round",
    "sequence_packing.": "enabled train_mb_tokens logprob_mb_tokens algorithm",
}
"""The keys that are public API, whether or not they have an effect here."""


def _fields(section: type[Section], prefix: str = "") -> Iterator[str]:
    for name in section.model_fields:
        yield prefix + name
        rule = KEYS.get(prefix + name)
        if isinstance(rule, Nested) and rule.section:
            yield from _fields(rule.section, f"{prefix}{name}.")


FIELDS = set(_fields(PolicyConfig))


def test_every_field_of_every_section_has_a_rule() -> None:
    without = {p for p in FIELDS if p not in KEYS and f"{p.rsplit('.', 1)[0]}.*" not in KEYS}
    assert without == set()


def test_every_applied_key_and_every_section_is_a_typed_field() -> None:
    sections = {path for path, rule in KEYS.items() if isinstance(rule, Nested) and rule.section}
    applied = {path for path, rule in KEYS.items() if isinstance(rule, Applied)}
    assert (sections | applied) - FIELDS == set()


def test_sections_have_rules_and_those_without_a_type_no_applied_key() -> None:
    nested = {f"{path}.": rule for path, rule in KEYS.items() if isinstance(rule, Nested)}
    assert nested.keys() == SECTIONS.keys() - {""}
    for path, rule in nested.items():
        if rule.section is None:
            kinds = {type(each) for each in SECTIONS[path].values()}
            assert kinds <= {Ignored, Rejected}, path


def test_every_public_key_is_a_typed_field() -> None:
    public = {prefix + name for prefix, names in PUBLIC.items() for name in names.split()}
    assert public - FIELDS == set()


def test_every_key_without_effect_states_why() -> None:
    assert all(rule.why for rule in KEYS.values() if isinstance(rule, Ignored | Rejected))


def test_every_applied_key_is_read_by_some_module() -> None:
    read = set(MEGATRON_SIZES.values())
    for file in PACKAGE.rglob("*.py"):
        if file.parent.name == "config" and file.stem.endswith(("keys", "sections")):
            continue
        if "converters" in file.parts:
            continue
        tree = ast.parse(file.read_text(encoding="utf-8"))
        read |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    applied = {path for path, rule in KEYS.items() if isinstance(rule, Applied)}
    assert {path for path in applied if path.rsplit(".", 1)[-1] not in read} == set()


@pytest.mark.parametrize("name", host_policies.ALL)
def test_a_section_of_the_host_parses_and_its_idle_keys_are_listed(name: str) -> None:
    raw = copy.deepcopy(host_policies.ALL[name])
    config = PolicyConfig.parse(raw)
    assert raw == host_policies.ALL[name]
    assert PolicyConfig.parse(config.model_dump()) == config
    assert config.megatron_cfg.optimizer.adam_eps == 1e-8
    listed = ignored_keys(raw)
    assert "megatron_cfg.optimizer.params_dtype" in listed
    assert listed.keys() & {"model_name", "megatron_cfg.optimizer.lr"} == set()


def _leaves(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in section.items():
        path = prefix + name
        if isinstance(KEYS.get(path), Nested) and isinstance(value, Mapping):
            yield from _leaves(value, f"{path}.")
        else:
            yield path, value


@pytest.mark.parametrize("name", host_policies.ALL)
def test_one_letter_more_in_any_key_of_the_host_is_found(name: str) -> None:
    for path, value in _leaves(host_policies.ALL[name]):
        if f"{path.rpartition('.')[0]}.*" in KEYS or path.startswith("dtensor_cfg."):
            continue  # the section is another engine's, or off, as a whole
        raw = copy.deepcopy(host_policies.ALL[name])
        *sections, key = path.split(".")
        at = raw
        for section in sections:
            at = at[section]
        at[key + "x"] = value
        with pytest.raises(ConfigError, match=f"{key}x is unknown"):
            PolicyConfig.parse(raw)


REJECTED = sorted(
    path for path, rule in KEYS.items() if isinstance(rule, Rejected) and not path.endswith("*")
)


def _where_it_counts(path: str) -> dict[str, Any]:
    """A policy of the host whose engine reads this key."""
    raw = copy.deepcopy(host_policies.EARLY)
    if path.startswith("dtensor_cfg."):
        raw["dtensor_cfg"], raw["megatron_cfg"]["enabled"] = {"enabled": True}, False
    return raw


@pytest.mark.parametrize("path", REJECTED)
def test_a_rejected_key_passes_only_when_it_asks_for_nothing(path: str) -> None:
    *sections, key = path.split(".")
    raw = _where_it_counts(path)
    at = raw
    for section in sections:
        at = at.setdefault(section, {})
    rule = KEYS[path]
    assert isinstance(rule, Rejected)
    for harmless in (None, *rule.only):
        at[key] = harmless
        PolicyConfig.parse(raw)
    at[key] = "something else"
    with pytest.raises(
        ConfigError, match=rf"policy\.{path}.*would change {rule.changes} .*leave it out"
    ):
        PolicyConfig.parse(raw)
    if path not in FIELDS and not rule.same_as and not rule.only:
        at[key] = False
        PolicyConfig.parse(raw)


SWITCHES = [path for path in REJECTED if path.endswith(".enabled")]


@pytest.mark.parametrize("path", SWITCHES)
def test_a_section_that_is_off_may_say_what_it_likes(path: str) -> None:
    *outer, section, _ = path.split(".")
    others = dict.fromkeys(SECTIONS[path.removesuffix("enabled")], 1)
    for keys in (others | {"enabled": False, "of_a_newer_host": 1}, {}, None, False):
        raw = _where_it_counts(path)
        at = raw[outer[0]] if outer else raw
        at[section] = keys
        PolicyConfig.parse(raw)
    at[section] = others | {"enabled": True}
    with pytest.raises(ConfigError, match=rf"policy\.{path}=True would .*or set it to false"):
        PolicyConfig.parse(raw)
    at[section] = "on"
    with pytest.raises(ConfigError, match=rf"{section} must be a section of keys, not 'on'"):
        PolicyConfig.parse(raw)


def test_switches_are_those_of_what_is_not_supported() -> None:
    expected = {"draft", "megatron_cfg.fp8_cfg", "dtensor_cfg.lora_cfg"}
    assert {path.removesuffix(".enabled") for path in SWITCHES} == expected


def test_what_other_engines_read_is_listed_with_megatron_core_and_not_with_them() -> None:
    raw = copy.deepcopy(host_policies.EARLY)
    raw |= {"optimizer": {"name": "torch.optim.AdamW"}, "scheduler": None}
    raw["dtensor_cfg"] = {"enabled": False, "tensor_parallel_size": 4}
    listed = ignored_keys(raw)
    assert {"optimizer", "dtensor_cfg"} <= listed.keys() and "scheduler" not in listed
    assert listed["optimizer"].endswith("set megatron_cfg.optimizer")
    raw["dtensor_cfg"]["enabled"], raw["megatron_cfg"]["enabled"] = True, False
    assert {"optimizer", "dtensor_cfg"}.isdisjoint(ignored_keys(raw))
    assert "dtensor_cfg" not in ignored_keys(host_policies.EARLY | {"dtensor_cfg": {"enabled": 0}})


def test_what_would_change_most_is_listed_first() -> None:
    raw = copy.deepcopy(host_policies.EARLY)
    raw["megatron_cfg"].setdefault("optimizer", {})
    raw["megatron_cfg"]["optimizer"]["use_precision_aware_optimizer"] = True
    first, *others = ignored_keys(raw)
    assert first == "megatron_cfg.optimizer.use_precision_aware_optimizer"

    def asks(path: str) -> bool:
        value: Any = raw
        for part in path.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return bool(value) and not (isinstance(value, dict) and value.get("enabled") is False)

    asking = [asks(path) for path in others]
    assert asking == sorted(asking, reverse=True) and len(set(asking)) == 2


def test_what_has_no_effect_beside_other_keys_is_listed() -> None:
    raw = copy.deepcopy(host_policies.EARLY)
    raw["megatron_cfg"] |= {"activation_checkpointing": False, "recompute_num_layers": 100}
    assert "nothing is recomputed" in ignored_keys(raw)["megatron_cfg.recompute_num_layers"]
    raw["megatron_cfg"]["activation_checkpointing"] = True
    assert "megatron_cfg.recompute_num_layers" not in ignored_keys(raw)
    raw["megatron_cfg"] = {"enabled": False}
    raw["dtensor_cfg"] = {"enabled": True, "sequence_parallel": True}
    assert "dtensor_cfg.sequence_parallel" in ignored_keys(raw)
    assert not parallel_sizes(PolicyConfig.parse(raw)).sequence_parallel
    raw["dtensor_cfg"]["tensor_parallel_size"] = 2
    assert "dtensor_cfg.sequence_parallel" not in ignored_keys(raw)
    assert parallel_sizes(PolicyConfig.parse(raw)).sequence_parallel


def test_a_key_of_the_engine_that_is_off_passes_and_counts_where_it_is_on() -> None:
    keys = {"lora_cfg": {"enabled": True, "dim": 8}, "moe_parallelizer": {"mp_policy": 1}, "new": 1}
    raw = copy.deepcopy(host_policies.EARLY)
    raw["dtensor_cfg"] |= keys
    listed = ignored_keys(raw)
    assert {"dtensor_cfg.new", "dtensor_cfg.moe_parallelizer.mp_policy"} <= listed.keys()
    raw["dtensor_cfg"]["enabled"], raw["megatron_cfg"]["enabled"] = True, False
    with pytest.raises(ConfigError) as raised:
        PolicyConfig.parse(raw)
    lines = str(raised.value).splitlines()
    assert len(lines) == 3
    for said in ("lora_cfg.enabled=True", "parallelizer.mp_policy is unknown", "new is unknown"):
        assert any(said in line for line in lines), lines


def test_keys_that_freeze_parts_of_a_model_are_applied_or_refused() -> None:
    raw = copy.deepcopy(host_policies.EARLY)
    raw["megatron_cfg"] |= {"freeze_vision_model": False, "freeze_sound_encoder": True}
    raw["megatron_cfg"]["freeze_config"] = {"freeze_vision_model": True}
    read = PolicyConfig.parse(raw).megatron_cfg
    assert read.freeze_config.freeze_vision_model and read.freeze_sound_encoder
    for key in ("freeze_sound_encoder", "freeze_everything"):
        wrong = copy.deepcopy(raw)
        wrong["megatron_cfg"]["freeze_config"][key] = True
        with pytest.raises(ConfigError, match=rf"freeze_config.{key}=True would .*param_groups"):
            PolicyConfig.parse(wrong)


def test_the_balancing_coefficient_that_is_overridden_counts_unless_ours_is_given() -> None:
    raw = copy.deepcopy(host_policies.EARLY) | {"hf_config_overrides": {"router_aux_loss_coef": 0}}
    assert PolicyConfig.parse(raw).megatron_cfg.moe_aux_loss_coeff == 0.0
    raw["hf_config_overrides"] = {"router_aux_loss_coef": 0.01}
    once = PolicyConfig.parse(raw)
    assert once.megatron_cfg.moe_aux_loss_coeff == 0.01
    assert PolicyConfig.parse(once.model_dump()) == once
    raw["megatron_cfg"]["moe_aux_loss_coeff"] = 0.02
    assert PolicyConfig.parse(raw).megatron_cfg.moe_aux_loss_coeff == 0.02
    raw["hf_config_overrides"] = {"router_aux_loss_coef": "much"}
    with pytest.raises(ConfigError, match="router_aux_loss_coef is 'much': give a number"):
        PolicyConfig.parse(raw)
    raw["hf_config_overrides"] = None
    PolicyConfig.parse(raw)


def test_a_key_of_a_newer_host_passes_once_it_is_named() -> None:
    raw = copy.deepcopy(host_policies.EARLY)
    raw["megatron_cfg"] |= {"of_a_newer_host": 1, "and_a_section": {"with": "keys"}}
    with pytest.raises(ConfigError) as raised:
        PolicyConfig.parse(raw)
    named = ["megatron_cfg.of_a_newer_host", "megatron_cfg.and_a_section"]
    for path, line in zip(named, str(raised.value).splitlines(), strict=True):
        assert f"add '{path}' to policy.ignore_unknown_keys" in line
    raw["ignore_unknown_keys"] = named
    assert set(named) <= ignored_keys(raw).keys()
    config = PolicyConfig.parse(raw)
    assert PolicyConfig.parse(config.model_dump()) == config
    raw["ignore_unknown_keys"] = [*named, "megatron_cfg.fp8_cfg.enabled"]
    with pytest.raises(ConfigError, match=r"names 'megatron_cfg.fp8_cfg.enabled', which is known"):
        PolicyConfig.parse(raw)
    raw["ignore_unknown_keys"] = named[0]
    with pytest.raises(ConfigError, match="of_a_newer_host is unknown"):
        PolicyConfig.parse(raw)


SAME = [
    {"megatron_cfg.pipeline_dtype": "bfloat16"},
    {"megatron_cfg.pipeline_dtype": "bf16", "precision": None},
    {"megatron_cfg.pipeline_dtype": "bfloat16", "precision": "bf16"},
    {"megatron_cfg.pipeline_dtype": "fp32", "precision": "float32"},
    {"generation.val_temperature": 1.0, "generation.temperature": None},
    {"generation.val_temperature": 1, "generation.temperature": 1.0},
    {"generation.val_top_k": -1, "generation.top_k": None},
]
OTHER = [
    {"megatron_cfg.pipeline_dtype": "float32"},
    {"megatron_cfg.pipeline_dtype": "bf16", "precision": "fp32"},
    {"megatron_cfg.pipeline_dtype": "float16"},
    {"generation.val_temperature": 0.6, "generation.temperature": None},
    {"generation.val_temperature": 1.0, "generation.temperature": 0.6},
    {"generation.val_top_k": 5, "generation.top_k": None},
]


def _policy(keys: Mapping[str, Any]) -> dict[str, Any]:
    return minimal(**{"generation.max_new_tokens": 4} | keys)


def test_a_key_passes_only_if_it_means_the_same_as_its_twin_or_its_default() -> None:
    for keys in SAME:
        PolicyConfig.parse(_policy(keys))
    for keys in OTHER:
        said = rf"policy\.{next(iter(keys))}=.*would change results"
        with pytest.raises(ConfigError, match=said):
            PolicyConfig.parse(_policy(keys))


def test_a_level_of_giving_memory_back_that_does_not_exist_is_refused() -> None:
    for level in (0, 1, 2):
        raw = _policy({"megatron_cfg.empty_unused_memory_level": level})
        assert PolicyConfig.parse(raw).megatron_cfg.empty_unused_memory_level == level
    with pytest.raises(ConfigError, match="empty_unused_memory_level"):
        PolicyConfig.parse(_policy({"megatron_cfg.empty_unused_memory_level": 3}))
