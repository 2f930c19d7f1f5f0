"""Parsing a configuration: defaults that follow from other keys, and refusals with a fix."""

from __future__ import annotations

import copy
import json
import pickle
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from megatron_policy.config import CheckpointConfig, PolicyConfig, ignored_keys
from megatron_policy.errors import ConfigError
from tests.unit import host_policies


def minimal(**changes: Any) -> dict[str, Any]:
    """The least a policy needs; a key `a.b` sets b of section a."""
    raw: dict[str, Any] = {
        "model_name": "some/model",
        "train_global_batch_size": 8,
        "train_micro_batch_size": 2,
        "megatron_cfg": {"enabled": True},
    }
    for path, value in changes.items():
        *sections, name = path.split(".")
        at = raw
        for section in sections:
            at = at.setdefault(section, {})
        at[name] = value
    return raw


MEGATRON, OPTIMIZER = "megatron_cfg.", "megatron_cfg.optimizer."
SCHEDULER = "megatron_cfg.scheduler."
FSDP = {"enabled": True}


def test_a_minimal_configuration_is_complete() -> None:
    config = PolicyConfig.parse(minimal())
    assert config.precision == "bfloat16"
    assert config.tokenizer.name == "some/model"
    assert (config.logprob_batch_size, config.generation_batch_size) == (2, 2)
    assert config.megatron_cfg.optimizer.clip_grad == config.max_grad_norm == 1.0
    assert config.megatron_cfg.scheduler.end_weight_decay == 0.01
    assert config.generation is None


def test_keys_that_are_not_given_follow_from_those_that_are() -> None:
    config = PolicyConfig.parse(
        minimal(
            logprob_batch_size=4,
            max_grad_norm=0.5,
            learning_rate=3e-4,
            **{OPTIMIZER + "weight_decay": 0.2, MEGATRON + "train_iters": 70},
        )
    )
    assert config.generation_batch_size == 4
    megatron = config.megatron_cfg
    assert (megatron.optimizer.clip_grad, megatron.optimizer.lr) == (0.5, 3e-4)
    assert megatron.scheduler.start_weight_decay == megatron.scheduler.end_weight_decay == 0.2
    assert megatron.scheduler.lr_decay_iters == 70


def test_settings_of_fsdp1_at_the_top_count_where_its_section_has_none() -> None:
    top = {"fsdp_offload_enabled": True, "activation_checkpointing_enabled": True}
    own = PolicyConfig.parse(minimal(**top, **{"fsdp_cfg.fsdp_offload_enabled": False})).fsdp_cfg
    assert own.activation_checkpointing_enabled and not own.fsdp_offload_enabled
    none = PolicyConfig.parse(minimal()).fsdp_cfg
    assert not (none.activation_checkpointing_enabled or none.fsdp_offload_enabled)


@pytest.mark.parametrize("section", ["dtensor_cfg", "fsdp_cfg"])
def test_keyword_arguments_of_a_model_are_overrides_of_its_config(section: str) -> None:
    kwargs = {"rope_theta": 50.0, "rms_norm_eps": 0.1}
    changes = {
        MEGATRON + "enabled": False,
        section: {"enabled": True, "model_kwargs": kwargs},
        "hf_config_overrides": {"rms_norm_eps": 0.2},
    }
    config = PolicyConfig.parse(minimal(**changes))
    assert config.hf_config_overrides == {"rope_theta": 50.0, "rms_norm_eps": 0.2}
    unused = {"dtensor_cfg": {"enabled": False, "model_kwargs": kwargs}}
    assert PolicyConfig.parse(minimal(**unused)).hf_config_overrides is None


def test_keys_that_are_given_are_kept() -> None:
    config = PolicyConfig.parse(
        minimal(
            tokenizer={"name": "other"},
            max_grad_norm=0.5,
            learning_rate=1.0,
            **{OPTIMIZER + "clip_grad": 2.0, OPTIMIZER + "lr": 1e-5},
        )
    )
    assert config.tokenizer.name == "other"
    assert config.megatron_cfg.optimizer.clip_grad == 2.0
    assert config.megatron_cfg.optimizer.lr == 1e-5


@pytest.mark.parametrize(
    "changes",
    [{"max_grad_norm": None}, {OPTIMIZER + "clip_grad": None}, {OPTIMIZER + "clip_grad": 0}],
)
def test_a_norm_of_null_or_zero_clips_nothing(changes: dict[str, Any]) -> None:
    assert PolicyConfig.parse(minimal(**changes)).megatron_cfg.optimizer.clip_grad == 0.0


BATCHING = ("dynamic_batching", "sequence_packing")


@pytest.mark.parametrize("section", BATCHING)
def test_a_number_of_tokens_counts_for_training_and_reading_where_only_one_is_given(
    section: str,
) -> None:
    both = {"train_mb_tokens": 64, "logprob_mb_tokens": 128}
    for tokens, expected in (
        ({"train_mb_tokens": 64}, (64, 64)),
        ({"logprob_mb_tokens": 128}, (128, 128)),
        (both, (64, 128)),
    ):
        config = PolicyConfig.parse(minimal(**{section: {"enabled": True, **tokens}}))
        found = getattr(config, section)
        assert (found.train_mb_tokens, found.logprob_mb_tokens) == expected
        assert PolicyConfig.parse(config) == PolicyConfig.parse(config.model_dump()) == config


@pytest.mark.parametrize("section", BATCHING)
def test_batching_without_a_number_of_tokens_is_refused_once_enabled(section: str) -> None:
    PolicyConfig.parse(minimal(**{section: {"enabled": False}}))
    with pytest.raises(ConfigError, match=rf"policy\.{section} is enabled.*train_mb_tokens or"):
        PolicyConfig.parse(minimal(**{section: {"enabled": True}}))


def test_dynamic_lengths_are_rounded_like_all_lengths_unless_told_otherwise() -> None:
    tokens = {"enabled": True, "train_mb_tokens": 64}
    config = PolicyConfig.parse(
        minimal(dynamic_batching=tokens, make_sequence_length_divisible_by=8)
    )
    assert config.dynamic_batching.sequence_length_round == 8


def test_two_ways_to_make_microbatches_are_refused() -> None:
    tokens = {"enabled": True, "train_mb_tokens": 64}
    with pytest.raises(ConfigError, match=r"are both true.*: set one to false"):
        PolicyConfig.parse(minimal(dynamic_batching=tokens, sequence_packing=tokens))


def test_an_algorithm_that_is_none_is_answered_with_those_that_are() -> None:
    packing = {"enabled": True, "train_mb_tokens": 64, "algorithm": "best_fit"}
    with pytest.raises(
        ConfigError, match="algorithm='best_fit' is unknown: use one of balanced, con"
    ):
        PolicyConfig.parse(minimal(sequence_packing=packing))
    PolicyConfig.parse(minimal(sequence_packing=packing | {"enabled": False}))
    host = packing | {"algorithm": "MODIFIED_FIRST_FIT_DECREASING"}
    PolicyConfig.parse(minimal(sequence_packing=host))


def test_logits_exist_for_a_thousand_tokens_at_a_time_unless_told_otherwise() -> None:
    assert PolicyConfig.parse(minimal(logprob_chunk_size=None)).logprob_chunk_size == 1024
    assert PolicyConfig.parse(minimal(logprob_chunk_size=64)).logprob_chunk_size == 64


def test_saves_are_synchronous_and_need_an_optimizer_unless_told_otherwise() -> None:
    config = PolicyConfig.parse(minimal())
    assert config.megatron_cfg.checkpoint == CheckpointConfig()
    assert not CheckpointConfig().async_save and not CheckpointConfig().fresh_optimizer
    assert config.checkpoint_timeout_s == 120.0
    section = {"async_save": True, "ckpt_assume_constant_structure": True}
    raw = minimal(**{MEGATRON + "checkpoint": section, "checkpoint_timeout_s": 5})
    config = PolicyConfig.parse(raw)
    assert config.megatron_cfg.checkpoint == CheckpointConfig(async_save=True)
    assert config.checkpoint_timeout_s == 5.0
    assert config.collective_timeout_s == 600.0 and config.worker_timeout_s == 20.0
    assert "megatron_cfg.checkpoint.ckpt_assume_constant_structure" in ignored_keys(raw)


def test_null_means_not_given() -> None:
    nulls = {MEGATRON + "env_vars": None, SCHEDULER + "lr_decay_iters": None}
    nulls |= {MEGATRON + "optimizer": None, MEGATRON + "virtual_pipeline_model_parallel_size": None}
    assert PolicyConfig.parse(minimal(generation=None, **nulls)) == PolicyConfig.parse(minimal())


@pytest.mark.parametrize(
    ("name", "full"), [("fp32", "float32"), ("bf16", "bfloat16"), ("fp16", "float16")]
)
def test_short_names_of_precisions_are_understood(name: str, full: str) -> None:
    assert PolicyConfig.parse(minimal(precision=name)).precision == full


def test_recompute_keys_mean_something_only_with_activation_checkpointing() -> None:
    off = PolicyConfig.parse(minimal(**{MEGATRON + "recompute_granularity": "full"})).megatron_cfg
    assert off.recompute_granularity is None
    on = PolicyConfig.parse(minimal(**{MEGATRON + "activation_checkpointing": True})).megatron_cfg
    assert (on.recompute_granularity, on.recompute_method, on.recompute_num_layers) == (
        "full",
        "uniform",
        1,
    )


def test_parameters_are_gathered_in_the_background_only_where_they_are_spread() -> None:
    overlap = {MEGATRON + "distributed_data_parallel_config.overlap_param_gather": True}
    for spread in (True, False):
        raw = minimal(**overlap, **{OPTIMIZER + "use_distributed_optimizer": spread})
        ddp = PolicyConfig.parse(raw).megatron_cfg.distributed_data_parallel_config
        assert ddp.overlap_param_gather is spread


def test_sgd_has_no_distributed_optimizer_by_default() -> None:
    for name, spread in (("adam", True), ("sgd", False)):
        config = PolicyConfig.parse(minimal(**{OPTIMIZER + "optimizer": name}))
        assert config.megatron_cfg.optimizer.use_distributed_optimizer is spread
        assert PolicyConfig.parse(config.model_dump()) == config


def test_a_configuration_survives_parsing_pickling_dicts_and_json() -> None:
    config = PolicyConfig.parse(host_policies.GRPO)
    assert PolicyConfig.parse(config) == config
    assert pickle.loads(pickle.dumps(config)) == config
    assert PolicyConfig.parse(config.model_dump()) == config
    assert PolicyConfig.parse(json.loads(config.model_dump_json())) == config


def test_a_configuration_cannot_be_changed() -> None:
    config = PolicyConfig.parse(minimal())
    with pytest.raises(ValueError, match="frozen"):
        config.megatron_cfg.tensor_model_parallel_size = 2


def test_parsing_leaves_the_mapping_as_it_was() -> None:
    raw = minimal(**{MEGATRON + "env_vars": {"N": 1}})
    before = copy.deepcopy(raw)
    config = PolicyConfig.parse(raw)
    assert raw == before
    assert config.megatron_cfg.env_vars == {"N": "1"}


REFUSED = {
    "": r"""
        megatron_cfg.tensor_model_paralel_size: 2 => did you mean 'tensor_model_parallel_size'
        tensor_model_parallel_size: 2 => did you mean policy.megatron_cfg.tensor_model_par
        megatron_cfg.tensor_parallel_size: 2 => did you mean 'tensor_model_parallel_size'
        megatron_cfg.fsdp_cfg: {} => did you mean policy.fsdp_cfg
        megatron_cfg.optimizer.start_weight_decay: 0.1 => did you mean policy.megatron_cfg.sched
        colour: 1 => policy.colour is unknown: its keys are model_name
        precision: float64 => policy.precision: .*'bfloat16' or 'float16', not 'float64'
        refit_dtype: float16 => policy.refit_dtype: .*'float32' or 'bfloat16', not 'float16'
        megatron_cfg.transformer_impl: apex => 'auto', 'local' or 'transformer_engine'
        megatron_cfg.tensor_model_parallel_size: 0 => greater than 0, not 0
        train_global_batch_size: null
            => policy.train_global_batch_size is missing and has no default
        train_micro_batch_size: two => valid integer
        megatron_cfg: 3 => policy.megatron_cfg must be a section of keys, not 3
        megatron_cfg.optimizer.optimizer: lion => 'adam' or 'sgd'
        megatron_cfg.checkpoint: {async: true} => checkpoint.async is unknown: did you mean
        checkpoint_timeout_s: 0 => checkpoint_timeout_s: .*greater than 0, not 0
        collective_timeout_s: 0 => collective_timeout_s: .*greater than 0, not 0
        worker_timeout_s: 0.5 => worker_timeout_s: .*greater than or equal to 1, not 0.5
        megatron_cfg.optimizer.min_lr: 1.0 => min_lr must be at most lr
        megatron_cfg.optimizer.fp16: true
            => fp16=true contradicts policy.precision=bfloat16: leave it out
        precision: float16, megatron_cfg.optimizer.fp16: false
            => fp16=false contradicts policy.precision=float16: leave it out, set it to true
        precision: float16, megatron_cfg.optimizer.bf16: true
            => bf16=true contradicts .*: leave it out
        precision: float16, megatron_cfg.optimizer.min_loss_scale: 131072.0
            => min_loss_scale=131072.0 is above initial_loss_scale=65536.0: lower it
        megatron_cfg.optimizer.loss_scale: 0.0 => loss_scale: .*lie between
        megatron_cfg.optimizer.hysteresis: 0 => hysteresis: .*greater than 0
        megatron_cfg.optimizer.optimizer_cpu_offload: true
            => optimizer_cpu_offload=True would change memory .*or set it to false
        megatron_cfg.optimizer.exp_avg_dtype: torch.bfloat16
            => exp_avg_dtype='torch.bfloat16' would change results .*kept in fp32
        megatron_cfg.distributed_data_parallel_config.use_megatron_fsdp: true
            => use_megatron_fsdp=True would change memory
        megatron_cfg.fine_grained_activation_offloading: true
            => would change memory .*use activation_checkpointing
        precision: float16, megatron_cfg.pipeline_dtype: bfloat16
            => pipeline_dtype='bfloat16' would change results .*value of policy.precision
        megatron_cfg.scheduler.lr_decay_style: WSD => 'constant', 'linear', 'cosine' or 'inverse-
        megatron_cfg.scheduler.lr_decay_style: cosine => lr_decay_iters is missing: give it
        megatron_cfg.scheduler.end_weight_decay: 0.5 => make them equal, or weight_decay_incr_style
        megatron_cfg.pipeline_dtype: float32 => value of policy.precision
        megatron_cfg.peft: {enabled: true} => peft is enabled without dim: give it a number
        param_groups: [] => did you mean policy.megatron_cfg.optimizer.param_groups
        optimizer: {name: torch.optim.AdamW, param_groups: [{roles: [norm], lr: 1.0}]}
            => call it policy.megatron_cfg.optimizer.param_groups
        megatron_cfg.optimizer.param_groups: x => param_groups: Input should be a list, not 'x'
        megatron_cfg.optimizer.param_groups: [{roles: norm, freeze: true}]
            => roles: Input should be a list of names, as in .norm.
        dtensor_cfg.enabled: true => are both true: exactly one
        megatron_cfg.enabled: false => fsdp_cfg.enabled are all false: exactly one
        fsdp_cfg.enabled: true => fsdp_cfg.enabled are both true: exactly one
        fsdp_cfg.enabled: true, dtensor_cfg.enabled: true
            => are all true: exactly one chooses .* set one to true and the others to false
        dynamic_batching: {enabled: true, train_mb_tokens: 1}
            => dynamic_batching.train_mb_tokens=1 leaves no room for a row
        sequence_packing: {enabled: true, train_mb_tokens: 8, logprob_mb_tokens: 1}
            => sequence_packing.logprob_mb_tokens=1 leaves no room for a row
        megatron_cfg.scheduler: {lr_warmup_iters: 13, lr_decay_iters: 10}
            => lr_decay_iters=10 ends within the warm-up: it must be more than lr_warmup_iters=13
        refit_buffer_size_gb: 9.313225746154785e-10
            => refit_buffer_size_gb: .*lie between 9.53674e-07
        megatron_cfg.optimizer.optimizer: sgd,
        megatron_cfg.optimizer.use_distributed_optimizer: true
            => use_distributed_optimizer=true needs optimizer 'adam'.*leave it out or set it to fal
        megatron_cfg.optimizer.bf16: false, megatron_cfg.optimizer.use_distributed_optimizer: false
            => leave bf16 out, or set policy.precision to float32
        megatron_cfg.optimizer.decoupled_weight_decay: false
            => does not fit optimizer 'adam', which always decouples .*: leave it out or set it to t
        megatron_cfg.optimizer.decoupled_weight_decay: true, megatron_cfg.optimizer.optimizer: sgd
            => does not fit optimizer 'sgd', which adds weight decay to the gradient.* to false
        generation: {temperature: 1.0}
            => policy.generation.max_new_tokens is missing and has no default
        generation: {max_new_tokens: 4, top_p: 0} => top_p: .*greater than 0, not 0
        generation: {max_new_tokens: 4, stop_strings: [</s>]} => put their ids into stop_token_ids
        megatron_cfg.activation_checkpointing: true, megatron_cfg.recompute_granularity: selective,
        megatron_cfg.recompute_num_layers: 2
            => recompute_num_layers needs .*recompute_granularity 'full'
    """,
    "megatron_cfg.peft: {enabled: true, dim: 4, alpha: 8}": r"""
        megatron_cfg.peft.dim: 0 => peft.dim: .*greater than 0, not 0
        megatron_cfg.peft.alpha: 0 => peft.alpha: .*not 0
        megatron_cfg.peft.dropout: 1.0 => peft.dropout: .*less than 1, not 1.0
        megatron_cfg.peft.dropout_position: in => dropout_position: .*'post'
        megatron_cfg.peft.target_modules: q_proj => list of names, as in .q_proj.
        megatron_cfg.peft.target_modules: all-linear
            => target_modules: .* a list of names; leave it out for all linear layers
        megatron_cfg.peft.start_from: "" => start_from: .* or leave the key out
        megatron_cfg.peft.lora_dtype: float16
            => lora_dtype=float16 contradicts policy.precision=.*leave it out
        megatron_cfg.peft.lora_A_init_method: zero
            => neither has a gradient: give lora_A_init_method
        megatron_cfg.mtp_num_layers: 1 => set policy.megatron_cfg.mtp_num_layers to 0
    """,
    "megatron_cfg.enabled: false, fsdp_cfg.enabled: true": r"""
        fsdp_cfg.sharding_strategy: hybrid
            => sharding_strategy: .*'full_shard', 'shard_grad_op' or 'no_shard'
        precision: float16
            => precision=float16 needs a factor on losses, which FSDP1 lacks: use bfloat16
        sequence_packing: {enabled: true, train_mb_tokens: 32}, fsdp_cfg.attn_implementation: sdpa
            => policy.fsdp_cfg.attn_implementation='sdpa' computes padded rows only: use 'auto'
        fsdp_cfg.tensor_parallel_size: 2 => fsdp_cfg.tensor_parallel_size
    """,
    "megatron_cfg.enabled: false, dtensor_cfg.enabled: true": r"""
        dtensor_cfg.expert_parallel_size: 2
            => dtensor_cfg.expert_parallel_size=2 is not supported: set it to 1
        dtensor_cfg.custom_parallel_plan: a.b
            => custom_parallel_plan='a.b' is for tensor-parallel ranks: leave it out
        dtensor_cfg.tensor_parallel_size: 2, dtensor_cfg.sequence_parallel: true,
        dtensor_cfg.attn_implementation: sdpa
            => attn_implementation='sdpa' makes masks of whole sequences: use 'auto', or leave
        rope_length: row
            => rope_length='row' needs Megatron-Core's modules.*: use 'maximum' or 'batch'
        precision: float16
            => precision=float16 needs a factor on losses, which FSDP2 lacks: use bfloat16
        dtensor_cfg.model_kwargs: {torch_dtype: float16}
            => model_kwargs.torch_dtype is not a field of a model: set policy.precision
        dtensor_cfg.lora_cfg: {enabled: true, dim: 4, alpha: 8}
            => lora_cfg.enabled=True .* no adapters, use megatron_cfg with peft
        megatron_cfg.optimizer.param_groups: [{roles: [embedding], freeze: true}]
            => param_groups belongs to Megatron-Core's optimizer: call it policy.optimizer.param_g
        optimizer: {name: torch.optim.AdamW, param_groups: [{roles: [norm], lr: 1.0, min_lr: 0.1}]}
            => optimizer.param_groups has min_lr, .*: leave it out, or use megatron_cfg.enabled
        param_groups: [] => param_groups is unknown: did you mean policy.optimizer.param_groups
        megatron_cfg.param_groups: [] => did you mean policy.optimizer.param_groups
        dtensor_cfg.env_var: {} => did you mean 'env_vars'
    """,
}
"""By what else is configured: keys, and what is said of them."""


def refused() -> Iterator[tuple[str, str]]:
    """The keys of each line of `REFUSED`, with those that go before, and the message."""
    for others, text in REFUSED.items():
        for line in re.sub(r",\n\s+", ", ", re.sub(r"\n\s+=>", " =>", text)).strip().splitlines():
            keys, _, message = line.strip().partition(" => ")
            yield ", ".join(filter(None, (others, keys))), message


@pytest.mark.parametrize(("keys", "message"), refused())
def test_what_cannot_be_run_is_refused_with_its_path_and_a_fix(keys: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PolicyConfig.parse(minimal(**yaml.safe_load(f"{{{keys}}}")))


@pytest.mark.parametrize("given", [{}, {"bf16": False, "fp16": True}, {"fp16": True}])
def test_float16_needs_no_more_than_its_precision(given: dict[str, bool]) -> None:
    keys = {OPTIMIZER + name: value for name, value in given.items()}
    keys |= {MEGATRON + "pipeline_dtype": "fp16"}
    config = PolicyConfig.parse(minimal(precision="float16", **keys))
    assert config.precision == "float16"
    assert config.megatron_cfg.optimizer.initial_loss_scale == 65536.0
    assert PolicyConfig.parse(config.model_dump()) == config


@pytest.mark.parametrize(("asked", "warned"), [(True, True), (False, False), (None, False)])
def test_who_asks_for_what_would_save_memory_is_told_that_it_does_not(
    caplog: pytest.LogCaptureFixture, asked: bool | None, warned: bool
) -> None:
    key = OPTIMIZER + "use_precision_aware_optimizer"
    PolicyConfig.parse(minimal(**{key: asked}))
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert bool(said) == warned
    assert all(f"policy.{key} has no effect: results are the same" in each for each in said)


TORCH, MCORE = "optimizer.kwargs.lr", "Megatron-Core takes"
BOTH = {OPTIMIZER + "lr": 3e-7, "learning_rate": 5e-6}
OFF = {MEGATRON + "enabled": False, "dtensor_cfg": FSDP}


@pytest.mark.parametrize(
    ("changes", "other", "said"),
    [
        ({OPTIMIZER + "lr": 5e-6}, TORCH, f"it is 3e-07; {MCORE} {OPTIMIZER}lr, 5e-06"),
        ({"learning_rate": 5e-6}, TORCH, f"it is 3e-07; {MCORE} learning_rate, 5e-06"),
        ({}, TORCH, f"it is 3e-07; {MCORE} {OPTIMIZER}lr, not given"),
        ({OPTIMIZER + "lr": "3e-7"}, TORCH, None),
        (BOTH, "learning_rate", f"it is 5e-06; {MCORE} {OPTIMIZER}lr, 3e-07"),
        (BOTH | {"learning_rate": "3e-7"}, TORCH, None),
        ({OPTIMIZER + "lr": 5e-6, "optimizer": None}, TORCH, None),
        ({OPTIMIZER + "lr": 5e-6, **OFF}, TORCH, None),
        ({"learning_rate": 3e-7, **OFF}, TORCH, None),
        ({"learning_rate": 5e-6, **OFF, "optimizer": None}, TORCH, None),
        (
            {"learning_rate": 5e-6, **OFF},
            "learning_rate",
            f"it is 5e-06; torch's optimizer takes {TORCH}, 3e-07",
        ),
    ],
)
def test_a_learning_rate_without_effect_is_told_where_the_engine_trains_with_another(
    caplog: pytest.LogCaptureFixture, changes: dict[str, Any], other: str, said: str | None
) -> None:
    given = {"optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": 3e-7}}}
    raw = minimal(**given | changes)
    PolicyConfig.parse(raw)
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warned == ([f"policy.{other} has no effect: {said}"] if said else [])
    listed = {path: why for path, why in ignored_keys(raw).items() if path in (other, TORCH)}
    assert listed == ({other: said} if said else {})


def test_everything_wrong_is_said_at_once() -> None:
    with pytest.raises(ConfigError) as raised:
        PolicyConfig.parse(minimal(foo=1, **{MEGATRON + "bar": 1, MEGATRON + "is_vlm": True}))
    assert len(str(raised.value).splitlines()) == 3


def test_a_configuration_that_is_no_mapping_is_refused() -> None:
    with pytest.raises(ConfigError, match="must be a mapping, not a list"):
        PolicyConfig.parse([1])  # type: ignore[arg-type]


def test_settings_of_another_engine_are_left_to_it() -> None:
    section = {"backend": "vllm", "max_new_tokens": 4, "stop_strings": ["x"], "val_top_p": 0.5}
    assert PolicyConfig.parse(minimal(generation=section)).generation is not None
    with pytest.raises(ConfigError, match="stop_strings"):
        PolicyConfig.parse(minimal(generation=section | {"backend": "megatron"}))


def test_a_configuration_shows_what_differs_from_the_defaults_and_no_secrets() -> None:
    raw = {
        "model_name": "m",
        "train_global_batch_size": 8,
        "train_micro_batch_size": 2,
        "max_grad_norm": 2.0,
        "megatron_cfg": {"enabled": True, "env_vars": {"HF_TOKEN": "secret"}},
    }
    config = PolicyConfig.parse(raw)
    shown = (
        "model_name='m', train_global_batch_size=8, train_micro_batch_size=2, max_grad_norm=2.0, "
        "megatron_cfg=MegatronConfig(enabled=True, env_vars={'HF_TOKEN': '...'}, "
        "optimizer=MegatronOptimizerConfig(clip_grad=2.0))"
    )
    assert repr(config) == f"PolicyConfig({shown})"
    assert "secret" not in f"{config} {config.megatron_cfg!r} {config.megatron_cfg}"
    assert config.megatron_cfg.env_vars == {"HF_TOKEN": "secret"}
