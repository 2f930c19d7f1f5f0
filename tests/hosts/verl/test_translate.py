"""verl's sections become a policy's configuration, or a refusal that names verl's key."""

from __future__ import annotations

import runpy
from dataclasses import make_dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_policy.config import PolicyConfig
from megatron_policy.config.parallel_sizes import parallel_sizes
from megatron_policy.config.section import Applied, Ignored, Rejected
from megatron_policy.errors import ConfigError
from megatron_policy.hosts.verl.keys import SAME_AS, SECTIONS, rule_of
from megatron_policy.hosts.verl.megatron_fields import ACCOUNTED
from megatron_policy.hosts.verl.translate import Translation, translate
from tests.hosts.verl.sections import checkpoint, engine, model, optim, sections_with


def told(**parts: Any) -> Translation:
    sections = {"m": model(), "e": engine(), "o": optim(), "c": checkpoint()} | parts
    return translate(*sections.values(), replicas=4)


def parsed(**parts: Any) -> PolicyConfig:
    return told(**parts).parse()


def test_what_verl_has_by_default_is_a_policy() -> None:
    found = told()
    config = found.parse()
    megatron = config.megatron_cfg
    assert config.model_name == "/models/tiny" and config.precision == "bfloat16"
    assert config.seed == 42 and config.train_global_batch_size == 4
    assert config.sequence_packing.enabled and not config.dynamic_batching.enabled
    assert not megatron.sequence_parallel and not megatron.activation_checkpointing
    assert megatron.optimizer.lr == 1e-3 and megatron.optimizer.clip_grad == 1.0
    assert megatron.distributed_data_parallel_config.grad_reduce_in_fp32
    assert not megatron.peft.enabled and not config.reward_model_cfg.enabled
    assert found.save_contents == found.load_contents == {"model", "optimizer", "extra"}
    assert not (found.warnings or found.param_offload or found.forward_only)


def test_sections_can_be_dataclasses() -> None:
    def typed(section: dict[str, Any]) -> Any:
        return make_dataclass("Section", section)(**section)

    sections = (model(lora={"rank": 4}), engine(), optim(), checkpoint())
    assert translate(*map(typed, sections)) == translate(*sections)


def test_a_layout_keeps_its_sizes() -> None:
    sizes = {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 4,
        "virtual_pipeline_model_parallel_size": 2,
        "context_parallel_size": 2,
        "expert_model_parallel_size": 8,
        "expert_tensor_parallel_size": 1,
    }
    found = parsed(e=engine(**sizes)).megatron_cfg
    assert {name: getattr(found, name) for name in sizes} == sizes
    assert found.sequence_parallel


SHARE = {"total_training_steps": 50, "lr_warmup_steps_ratio": 0.1}
SCHEDULES: dict[str, tuple[dict[str, Any], tuple[int, int, float]]] = {
    "constant, before the steps are known": ({}, (1, 0, 0.0)),
    "the trainer's steps": ({"total_training_steps": 50}, (50, 0, 0.0)),
    "its own steps": ({"total_training_steps": 50, "lr_decay_steps": 40}, (40, 0, 0.0)),
    "a share warms up": (SHARE, (50, 5, 0.0)),
    "steps warm up, whatever the share": (
        {**SHARE, "lr_warmup_steps": 7, "lr_warmup_init": 1e-5},
        (50, 7, 1e-5),
    ),
    "warming up, before the steps are known": ({"lr_warmup_steps": 7}, (8, 7, 0.0)),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_is_that_of_verls_megatron_engine(name: str) -> None:
    given, (decay, warmup, start) = SCHEDULES[name]
    found = parsed(o=optim(lr_decay_style="inverse_square_root", **given)).megatron_cfg.scheduler
    assert (found.lr_decay_iters, found.lr_warmup_iters) == (decay, warmup)
    assert found.lr_warmup_init == start
    assert found.lr_decay_style == "inverse-square-root"
    assert found.start_weight_decay == found.end_weight_decay == 0.01


def test_rows_are_packed_or_padded_and_texts_as_long_as_the_model_takes() -> None:
    config = SimpleNamespace(max_position_embeddings=512)
    padded = parsed(m=model(hf_config=config), e=engine(use_remove_padding=False))
    assert padded.dynamic_batching.enabled and not padded.sequence_packing.enabled
    assert padded.max_total_sequence_length == 512 == padded.dynamic_batching.train_mb_tokens


def test_recomputation_is_that_of_the_override() -> None:
    for further in ({"recompute_method": "uniform", "recompute_num_layers": 1}, {}):
        kind = "full" if further else "selective"
        overrides = {"recompute_granularity": kind, **further}
        found = parsed(e=engine(override_transformer_config=overrides)).megatron_cfg
        assert found.activation_checkpointing and found.recompute_granularity == kind
    assert found.recompute_modules == ("core_attn",)


def test_overrides_have_the_rules_of_a_policys_keys() -> None:
    found = parsed(
        e=engine(
            override_transformer_config={
                "moe_enable_deepep": True,
                "moe_router_dtype": "fp32",
                "use_flash_attn": True,
                "moe_grouped_gemm": True,
            },
            override_ddp_config={"overlap_grad_reduce": True},
        ),
        o=optim(override_optimizer_config={"adam_eps": 1e-5, "optimizer_offload_fraction": 1.0}),
    ).megatron_cfg
    assert found.moe_token_dispatcher_type == "flex" and found.moe_router_dtype == "fp32"
    assert found.distributed_data_parallel_config.overlap_grad_reduce
    assert found.optimizer.adam_eps == 1e-5


def test_a_coefficient_without_a_loss_has_no_effect_as_in_verls_own_engine() -> None:
    alone = {"moe_aux_loss_coeff": 0.01}
    for given in (alone, alone | {"moe_router_load_balancing_type": "none"}):
        found = told(e=engine(override_transformer_config=given))
        assert found.parse().megatron_cfg.moe_aux_loss_coeff is None
        assert "moe_aux_loss_coeff is ignored, as by verl's own engine" in found.warnings[0]
    both = alone | {"moe_router_load_balancing_type": "aux_loss"}
    own = {"megatron_cfg": {"moe_router_load_balancing_type": "aux_loss"}}
    for given in ({"override_transformer_config": both}, {"policy": own}):
        found = told(e=engine(**{"override_transformer_config": alone} | given))
        assert found.parse().megatron_cfg.moe_aux_loss_coeff == 0.01 and not found.warnings


@pytest.mark.parametrize(
    ("accounted", "sizes", "layers", "layout"),
    [
        ((True, True), {}, 10, "Ettt|tttt|tttL"),
        ((True, False), {}, 11, "Ettt|tttt|ttttL"),
        ((False, True), {"virtual_pipeline_model_parallel_size": 2}, 11, "Ett|tt|tt|tt|tt|tL"),
    ],
)
def test_embedding_and_head_take_the_place_of_layers(
    accounted: tuple[bool, bool], sizes: dict[str, int], layers: int, layout: str
) -> None:
    asked = dict(zip(ACCOUNTED, accounted, strict=True))
    seeing = SimpleNamespace(text_config=SimpleNamespace(num_hidden_layers=layers))
    split = engine(pipeline_model_parallel_size=3, override_transformer_config=asked, **sizes)
    found = parsed(m=model(hf_config=seeing), e=split)
    assert found.megatron_cfg.pipeline_model_parallel_layout == layout
    assert parallel_sizes(found).vpp == sizes.get("virtual_pipeline_model_parallel_size", 1)
    one_more = SimpleNamespace(num_hidden_layers=layers + 1)
    with pytest.raises(ConfigError, match=r"are no multiple of . model chunks: leave these keys"):
        told(m=model(hf_config=one_more), e=split)


def test_adapters_critics_and_half_precision() -> None:
    lora = {"rank": 8, "alpha": 16, "target_modules": "all-linear", "adapter_path": None}
    peft = parsed(m=model(lora=lora)).megatron_cfg.peft
    assert (peft.enabled, peft.dim, peft.alpha, peft.target_modules) == (True, 8, 16, ())
    assert told(m=model(lora={"rank": 8, "merge": True})).merge_adapters
    critic = parsed(m=model(model_type="value_model")).reward_model_cfg
    assert critic.enabled and critic.reward_model_type == "regression"
    half = parsed(e=engine(dtype="fp16"))
    assert half.precision == "float16"
    assert half.megatron_cfg.optimizer.initial_loss_scale == 32768.0


def test_further_layers_are_trained_where_the_model_has_them() -> None:
    mtp = {"enable": True, "enable_train": True, "detach_encoder": True}
    config = SimpleNamespace(num_nextn_predict_layers=1, max_position_embeddings=64)
    found = parsed(m=model(mtp=mtp, hf_config=config)).megatron_cfg
    assert (found.mtp_num_layers, found.mtp_detach_heads) == (1, True)
    beside_tower = SimpleNamespace(mtp_num_hidden_layers=1, max_position_embeddings=64)
    config = SimpleNamespace(text_config=beside_tower, max_position_embeddings=64)
    assert parsed(m=model(mtp=mtp, hf_config=config)).megatron_cfg.mtp_num_layers == 1
    with pytest.raises(ConfigError, match="no num_nextn_predict_layers"):
        told(m=model(mtp=mtp))


@pytest.mark.parametrize("betas", [(0.8, 0.9), [0.8, 0.9], "[0.8,0.9]", "(0.8, 0.9)"])
def test_coefficients_of_adam_are_numbers_or_the_text_of_them(betas: Any) -> None:
    found = parsed(o=optim(betas=betas)).megatron_cfg.optimizer
    assert (found.adam_beta1, found.adam_beta2) == (0.8, 0.9)


@pytest.mark.parametrize("betas", ["0.8", "0.8, 0.9, 0.9", "0.8 and 0.9", [0.8], 0.8])
def test_other_coefficients_are_refused_by_verls_name(betas: Any) -> None:
    with pytest.raises(ConfigError, match="optim\\.betas must be two numbers"):
        parsed(o=optim(betas=betas))


def test_mistakes_in_kind_are_refused_with_what_to_write() -> None:
    with pytest.raises(ConfigError, match=r"save_contents must be a list, as in \[model\], not"):
        told(c=checkpoint(save_contents="model"))
    with pytest.raises(ConfigError, match=r"tensor_model_parallel_size: .*, not 'many'"):
        parsed(e=engine(tensor_model_parallel_size="many"))


def test_an_optimizer_of_verls_fsdp_engines_is_answered_with_the_one_to_choose() -> None:
    fsdp = {"optimizer": "AdamW", "optimizer_impl": "torch.optim", "lr": 1e-3}
    with pytest.raises(ConfigError) as caught:
        told(o=fsdp)
    assert "optim=megatron" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("mode", ["R2", "R3"])
def test_experts_are_replayed(mode: str) -> None:
    found = told(e=engine(router_replay={"mode": mode}))
    assert found.replay == mode and found.parse().router_replay.enabled
    assert told().replay == "disabled" and not parsed().router_replay.enabled
    # A critic's experts are others.
    critic = told(m=model(model_type="value_model"), e=engine(router_replay={"mode": mode}))
    assert critic.replay == "disabled" and not critic.parse().router_replay.enabled


def test_a_policys_own_keys_come_last() -> None:
    own = {"logprob_chunk_size": 64, "megatron_cfg": {"transformer_impl": "local"}}
    found = parsed(e=engine(policy=own))
    assert found.logprob_chunk_size == 64
    assert found.megatron_cfg.transformer_impl == "local" and found.megatron_cfg.enabled
    overrides = parsed(m=model(override_config={"attn_implementation": "sdpa", "rope_theta": 2.0}))
    assert overrides.hf_config_overrides == {"rope_theta": 2.0}


REFUSED = {
    "engine.dynamic_context_parallel": True,
    "engine.use_dist_checkpointing": True,
    "engine.qat.enable": True,
    "engine.dtype": "int8",
    "engine.override_transformer_config.fp8": "e4m3",
    "engine.override_transformer_config.num_layers": 2,
    "engine.override_transformer_config.tensor_model_parallel_size": 2,
    "engine.override_mcore_model_config.anything": 1,
    "engine.unknown_key": 1,
    "optim.optimizer": "muon",
    "optim.lr_decay_style": "WSD",
    "optim.main_grads_dtype": "bf16",
    "model.lora_rank": 8,
    "model.lora.type": "canonical_lora",
    "model.enable_activation_offload": True,
    "checkpoint.save_contents": ["everything"],
}


@pytest.mark.parametrize("key", REFUSED)
def test_what_is_not_supported_is_refused_by_verls_key(key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        translate(*sections_with(key, REFUSED[key]).values(), replicas=4)
    assert str(caught.value).startswith(key)


def test_all_refusals_come_at_once_and_unknown_keys_are_guessed() -> None:
    wrong = engine(
        dynamic_context_parallel=True,
        override_transformer_config={"moe_rooter_dtype": "fp32"},
    )
    with pytest.raises(ConfigError) as caught:
        told(e=wrong, m=model(lora_rank=2))
    first, *others = str(caught.value).splitlines()
    assert first.startswith("model.lora_rank") and len(others) == 2
    assert "did you mean 'moe_router_dtype'?" in str(caught.value)


def test_what_is_only_said_is_a_warning() -> None:
    (said,) = told(e=engine(use_megatron_fsdp=True)).warnings
    assert said.startswith("engine.use_megatron_fsdp is ignored: parameters are whole")
    offloaded = optim(override_optimizer_config={"optimizer_cpu_offload": True})
    (said,) = told(o=offloaded).warnings
    assert said.startswith("optim.override_optimizer_config.optimizer_cpu_offload is ignored")
    (said,) = told(o=optim(use_precision_aware_optimizer=True)).warnings
    assert said.startswith("optim.use_precision_aware_optimizer is ignored")


def test_an_asynchronous_save_leaves_it_to_the_engine_to_name_the_latest() -> None:
    assert told(c=checkpoint(async_save=True)).names_latest
    assert not told(c=checkpoint()).names_latest


def test_every_key_has_one_rule_and_refusals_say_why() -> None:
    for prefix, rules in SECTIONS.items():
        for name in rules:
            rule = rule_of(prefix, name)
            assert isinstance(rule, Applied | Ignored | Rejected)
            assert isinstance(rule, Applied) or rule.why
    assert set(SAME_AS) < set(SECTIONS)


@pytest.mark.parametrize(
    "key, own, other",
    [
        ("context_parallel_size", 2, 1),
        ("sequence_parallel", True, False),
        ("use_distributed_optimizer", True, False),
    ],
)
def test_an_override_may_repeat_the_engines_own_key_but_not_change_it(
    key: str, own: Any, other: Any
) -> None:
    same = engine(**{key: own}, override_transformer_config={key: own})
    told(e=same)
    with pytest.raises(ConfigError, match="set the engine's own key of this name"):
        told(e=engine(**{key: own}, override_transformer_config={key: other}))


def test_a_switch_that_is_misspelt_ends_the_process_that_would_train_with_another_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MEGATRON_POLICY_VERL", "Megatron")
    with pytest.raises(SystemExit, match="MEGATRON_POLICY_VERL is 'Megatron'; legal: 'megatron'"):
        runpy.run_module("megatron_policy.hosts.verl.plugin")


def test_what_verl_has_beside_fields_of_the_config_is_refused() -> None:
    beside = {"model_config": {}, "moe_config": {"freeze_moe_router": True}}
    with pytest.raises(ConfigError, match=r"override_config\.moe_config is not supported"):
        told(m=model() | {"override_config": beside})
    told(m=model() | {"override_config": {"model_config": {}, "moe_config": {}}})


@pytest.mark.parametrize("key", ["hf_config_path", "local_hf_config_path"])
def test_a_config_from_elsewhere_is_refused_and_that_of_the_model_is_taken(key: str) -> None:
    given = model() | {"path": "/models/a", "local_path": "/models/a"}
    told(m=given | {key: "/models/a"})
    with pytest.raises(ConfigError, match=f"model.{key}.*config.json of model.path"):
        told(m=given | {key: "/models/b"})
