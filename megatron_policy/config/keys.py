"""What becomes of every key of a configuration: applied, ignored or rejected. Only data."""

from __future__ import annotations

from megatron_policy.config.fsdp import DTensorConfig, Fsdp1Config
from megatron_policy.config.megatron_keys import MEGATRON_SECTIONS, TEXT
from megatron_policy.config.rules import (
    Applied,
    Ignored,
    Nested,
    Rejected,
    Rule,
    Rules,
    each,
    switched_off,
)
from megatron_policy.config.sections import (
    DynamicBatchingConfig,
    GenerationConfig,
    MegatronConfig,
    MetricsConfig,
    RewardModelConfig,
    RouterReplayConfig,
    SequencePackingConfig,
    TokenizerConfig,
    WandbConfig,
)

_ENGINE = "belongs to the host's inference engines, not to the policy's own generate"
_HOST = "read by the host's driver, not by the worker"
_AUTOMODEL = "affects modules and sharding of the host's own DTensor worker only"
_QUANT = "affects quantised training only, and quant_cfg is rejected"

_POLICY: Rules = {
    **each(
        Applied(),
        """model_name train_global_batch_size train_micro_batch_size max_total_sequence_length
        make_sequence_length_divisible_by seed logprob_chunk_size""",
    ),
    "reference_model_name": Applied(
        "of this project: the reference policy, if it is not what training starts from. A Hugging "
        "Face checkpoint of the same architecture or, with megatron_cfg.peft, a directory of PEFT"
    ),
    "precision": Applied("float32, bfloat16, or float16 with a factor on losses"),
    "logprob_batch_size": Applied("train_micro_batch_size where it is not given"),
    "generation_batch_size": Applied("logprob_batch_size where it is not given"),
    "max_grad_norm": Applied("where megatron_cfg.optimizer.clip_grad is not given"),
    "learning_rate": Applied("where megatron_cfg.optimizer.lr is not given"),
    "refit_buffer_size_gb": Applied(),
    **each(
        Applied("of this project"),
        """rope_length refit_bucket_bytes refit_dtype refit_timeout_s checkpoint_timeout_s
        collective_timeout_s skip_empty_steps""",
    ),
    "worker_timeout_s": Applied("of this project, in its own driver"),
    "ignore_unknown_keys": Applied("of this project: see above"),
    "tokenizer": Nested(TokenizerConfig),
    "generation": Nested(GenerationConfig),
    "megatron_cfg": Nested(MegatronConfig),
    "dtensor_cfg": Nested(DTensorConfig),
    "fsdp_cfg": Nested(Fsdp1Config),
    "dynamic_batching": Nested(DynamicBatchingConfig),
    "sequence_packing": Nested(SequencePackingConfig),
    "hf_config_overrides": Applied(
        "fields of config.json, also in exports and checkpoints; those that change weights are "
        "refused. `router_aux_loss_coef` where megatron_cfg.moe_aux_loss_coeff is not given"
    ),
    "draft": Nested(),
    "router_replay": Nested(RouterReplayConfig),
    "reward_model_cfg": Nested(RewardModelConfig),
    "metrics": Nested(MetricsConfig),
    "pretrained_checkpoint": Nested(),
    "optimizer": Applied(
        "with dtensor_cfg or fsdp_cfg: an import path and its kwargs; AdamW if not given"
    ),
    "scheduler": Applied(
        "with dtensor_cfg or fsdp_cfg: schedules with milestones; constant if not given"
    ),
    **each(
        Applied("with fsdp_cfg, where it is not given there"),
        "fsdp_offload_enabled activation_checkpointing_enabled",
    ),
    **each(
        Ignored("the optimizer's state always leaves the device for log-probabilities and refits"),
        "offload_optimizer_for_logprob offload_optimizer_for_refit",
    ),
    **each(
        Ignored(_QUANT),
        """quant_calib_data quant_calib_size quant_batch_size quant_sequence_length
        disable_modelopt_layer_spec""",
    ),
    "quant_cfg": Rejected("quantised training is not supported"),
    "env_vars": Rejected("workers get the variables of megatron_cfg.env_vars; put them there"),
    "dequantize_base_checkpoint": Ignored("quantised weights are always read as bfloat16"),
    "is_vlm": Rejected("vision-language models are not supported"),
}

_TOKENIZER: Rules = {
    **each(
        Ignored("the caller makes the tokenizer and the prompts"),
        "name chat_template chat_template_kwargs use_fastokens use_processor",
    ),
    **each(Ignored(TEXT), "audio video"),
}

_GENERATION: Rules = {
    "temperature": Applied("log-probabilities are at this temperature, too"),
    **each(Applied("log-probabilities are of what they keep, too"), "top_p top_k min_p"),
    "filter_logprobs": Applied("false: log-probabilities are of whole distributions"),
    **each(Applied("of the policy's own generate"), "max_new_tokens stop_token_ids"),
    "backend": Ignored("the caller chooses which engine generates"),
    "stop_strings": Rejected("generate stops at tokens; put their ids into stop_token_ids"),
    "bad_words": Rejected("the policy's own generate cannot ban words"),
    "ignore_eos": Rejected("generate ends a row at the tokenizer's end of sequence"),
    "val_temperature": Rejected("generate has one temperature", same_as="generation.temperature"),
    "val_top_p": Rejected("generate has one top_p", same_as="generation.top_p"),
    "val_top_k": Rejected("generate has one top_k", same_as="generation.top_k"),
    **each(
        Ignored(_ENGINE),
        """vllm_cfg vllm_kwargs sglang_cfg sglang_kwargs trtllm_cfg trtllm_kwargs dynamo_cfg
        mcore_generation_config model_path quant_cfg real_quant real_quant_export_cpu_offload
        real_quant_ignore refit_cfg refit_transport""",
    ),
    "colocated": Nested(),
    **each(
        Ignored(_HOST),
        """port_range_low port_range_high model_name use_async_rollouts num_prompts_per_step
        pad_token_id _pad_token_id _mtp_weights_from_refit _debug_payload_metrics""",
    ),
}

_DTENSOR: Rules = {
    "enabled": Applied("transformers' own modules under FSDP2; see fsdp.md"),
    **each(
        Applied(),
        """activation_checkpointing context_parallel_size dp_replicate_size attn_implementation
        clear_cache_every_n_steps cpu_offload env_vars weight_decay_of sequence_parallel
        model_kwargs
        tensor_parallel_size""",
    ),
    "custom_parallel_plan": Applied("styles or torch's objects by names of modules; see fsdp.md"),
    "expert_parallel_size": Applied("refused beside `enabled`: see fsdp.md"),
    "defer_fsdp_grad_sync": Ignored("gradients are reduced in each microbatch"),
    "_v2": Ignored("both of the host's DTensor workers are replaced by the same engine"),
    **each(Nested(), "moe_parallelizer lora_cfg automodel_kwargs"),
}

_AUTOMODEL_SECTIONS: dict[str, Rules] = {
    "dtensor_cfg.moe_parallelizer.": {
        **each(Ignored(_AUTOMODEL), "ignore_router_for_ac reshard_after_forward wrap_outer_model"),
        "lm_head_precision": Rejected("the head computes in the policy's precision, then in fp32"),
    },
    "dtensor_cfg.lora_cfg.": switched_off(
        "this engine has no adapters, use megatron_cfg with peft",
        "adapters",
        """target_modules exclude_modules match_all_linear dim alpha dropout dropout_position
        lora_A_init use_triton""",
    ),
    "dtensor_cfg.automodel_kwargs.": {
        **each(Ignored(_AUTOMODEL), "use_liger_kernel force_hf backend"),
        "freeze_config": Rejected("all parameters are trained"),
    },
}

_FSDP1: Rules = {
    "enabled": Applied("of this project: transformers' own modules under FSDP1; see fsdp.md"),
    "sharding_strategy": Applied("full_shard, shard_grad_op or no_shard"),
    "fsdp_offload_enabled": Applied("refused on GPUs: see fsdp.md"),
    **each(
        Applied(),
        """activation_checkpointing_enabled attn_implementation clear_cache_every_n_steps env_vars
        model_kwargs weight_decay_of""",
    ),
}

_BATCHING: Rules = {
    **each(Applied(), "enabled train_mb_tokens logprob_mb_tokens"),
    "microbatch_order": Ignored("each rank computes its costliest microbatch first"),
    "fuse_loss": Ignored("all rows of a microbatch are scored at once, in tiles"),
}

_DYNAMIC: Rules = _BATCHING | {
    "sequence_length_round": Applied(),
    "algorithm": Ignored("affects sequence_packing only"),
}

_PACKING: Rules = _BATCHING | {
    "algorithm": Applied(),
    "sequence_length_round": Ignored("packed sequences are padded only as the layout needs it"),
}

SECTIONS: dict[str, Rules] = {
    "": _POLICY,
    **MEGATRON_SECTIONS,
    "dynamic_batching.": _DYNAMIC,
    "sequence_packing.": _PACKING,
    "generation.": _GENERATION,
    "generation.colocated.": {
        "enabled": Ignored("says where engines run: read when the worker connects to them"),
        **each(Ignored(_HOST), "resources *"),
    },
    "tokenizer.": _TOKENIZER,
    "dtensor_cfg.": _DTENSOR,
    **_AUTOMODEL_SECTIONS,
    "fsdp_cfg.": _FSDP1,
    "draft.": switched_off(
        "training a draft model with the policy is not supported",
        "a draft model",
        "model_name loss_weight num_layers aux_layer_indices",
    ),
    "router_replay.": {
        "enabled": Applied("`routed_experts` of the data replace the routers' own choice"),
        "transport": Applied("inline: within the data"),
    },
    "reward_model_cfg.": {
        "enabled": Applied("a head that gives one number for each token: see values.md"),
        "reward_model_type": Applied("bradley_terry: scores of sequences; regression: values"),
    },
    "metrics.": {
        "jsonl": Applied("of this project: a file to which rank 0 adds lines; see monitoring.md"),
        "tensorboard": Applied("of this project: a directory for rank 0's event files"),
        "wandb": Nested(WandbConfig),
    },
    "metrics.wandb.": each(
        Applied("of this project: rank 0's run of Weights & Biases"),
        "project name id mode directory",
    ),
    "pretrained_checkpoint.": {
        "path": Rejected("weights come from the Hugging Face files of model_name"),
        **each(Ignored("affects path only"), "format *"),
    },
}
"""Rules by the path of a section, with its trailing dot; `*` stands for any other key of it."""

KEYS: dict[str, Rule] = {
    prefix + name: rule for prefix, rules in SECTIONS.items() for name, rule in rules.items()
}
"""Every key by its path below `policy`."""

IGNORED: dict[str, str] = {
    path: rule.why for path, rule in KEYS.items() if isinstance(rule, Ignored)
}
"""Keys without effect here, and why."""
