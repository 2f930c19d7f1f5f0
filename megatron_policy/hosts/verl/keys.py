"""What becomes of every key of verl's sections of a Megatron engine: accepted, with the keys of a
policy that it sets, or ignored or rejected, by reason.

Overrides of Megatron-Core's own configurations have the names that `megatron_cfg` has for them, and
so its rules; those that NeMo RL does not know have theirs in `megatron_fields.py`. verl 0.9.1 and
its main branch of August 2026 were read.
"""

from __future__ import annotations

from megatron_policy.config.keys import KEYS
from megatron_policy.config.section import Ignored, Nested, Rejected, Rule, Rules, by_name
from megatron_policy.hosts.verl.megatron_fields import DCP, DDP, MODEL, TRANSFORMER, Accepted

_CONFIG = "the model is built from the config.json of model.path; model.override_config changes it"
_FSDP = Ignored("read by verl's FSDP engines only")
_ROLLOUT = Ignored("read by verl's rollout only")
_TABLES = Ignored("weights are converted by the tables of this package")
_WHOLE = Ignored("log-probabilities and entropies never need whole logits here")

_ENGINE: Rules = {
    """tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size
    expert_model_parallel_size expert_tensor_parallel_size""": Accepted(sets="megatron_cfg.*"),
    "use_distributed_optimizer": Accepted(sets="megatron_cfg.optimizer.*"),
    "seed": Accepted(sets="seed"),
    "forward_only override_ddp_config override_transformer_config": Accepted(),
    "virtual_pipeline_model_parallel_size": Accepted(
        "model chunks of each pipeline stage", "megatron_cfg.*"
    ),
    "sequence_parallel": Accepted("with tensor_model_parallel_size above 1", "megatron_cfg.*"),
    "strategy": Accepted("chooses this engine"),
    "dtype": Accepted(
        "bfloat16, float16 with a factor on losses, or float32 by this engine's name",
        "precision",
    ),
    "param_offload": Accepted(
        "parameters and gradients leave the device between calls; where actor and reference "
        "share a policy, if both ask for it"
    ),
    "optimizer_offload": Accepted("the optimizer's state leaves the device between calls"),
    "grad_offload": Accepted(
        'of this engine\'s section alone, not of "megatron" in verl 0.9.1 (add it with `+`): '
        "gradients leave the device between calls, as with param_offload"
    ),
    "use_remove_padding": Accepted(
        "microbatches are packed; false: padded to their longest row",
        "sequence_packing.enabled dynamic_batching.enabled",
    ),
    """use_dynamic_bsz max_token_len_per_gpu micro_batch_size_per_gpu infer_max_token_len_per_gpu
    infer_micro_batch_size_per_gpu""": Accepted("verl cuts microbatches by them"),
    "override_mcore_model_config": Accepted("each of its keys has to be in no effect: see below"),
    "policy": Accepted("of this engine: keys of a policy's configuration, which come last"),
    "router_replay qat": Accepted("see below"),
    "use_fused_kernels entropy_from_logits_with_chunking entropy_from_logits_chunk_size": _WHOLE,
    "use_mbridge vanilla_mbridge": _TABLES,
    "pad_bshd_to_minibatch_max pad_to_length pad_to_length_bucket": Ignored(
        "microbatches have the fewest positions that the layout can split"
    ),
    "use_dist_checkpointing": Rejected(
        "weights come from the Hugging Face files of model.path: convert others with "
        "`megatron-policy convert`"
    ),
    "dist_checkpointing_path dist_checkpointing_prefix": Ignored(
        "affects use_dist_checkpointing only, which is rejected"
    ),
    "dist_ckpt_optim_fully_reshardable distrib_optim_fully_reshardable_mem_efficient": Ignored(
        "every checkpoint can be loaded in another layout"
    ),
    "dynamic_context_parallel": Rejected("all microbatches have context_parallel_size ranks"),
    "max_seqlen_per_dp_cp_rank": Ignored(DCP),
    "use_megatron_fsdp": Ignored(
        "parameters are whole on each data-parallel rank, which takes more memory; "
        "use_distributed_optimizer spreads main parameters and moments",
        warned=True,
    ),
    "full_determinism": Ignored("verl's own Megatron engine does not read it either"),
}

_REPLAYS: Rules = {
    "mode": Accepted(
        "'R2': experts that log-probabilities were computed with are taken again in training; "
        "'R3': those that the rollout has taken",
        "router_replay.enabled",
    ),
    "record_file replay_file": Ignored("affects router_replay.mode only"),
}

_QAT: Rules = {
    "enable": Rejected("quantisation-aware training is not supported"),
    "mode group_size ignore_patterns activation_observer quantization_config_path": Ignored(
        "affects enable only, which is rejected"
    ),
}

_ADAM = "megatron_cfg.optimizer."
_SCHEDULE = "megatron_cfg.scheduler."
_OPTIMIZER: Rules = {
    "lr min_lr clip_grad": Accepted(sets=f"{_ADAM}*"),
    "weight_decay": Accepted(
        sets=f"{_ADAM}* {_SCHEDULE}start_weight_decay {_SCHEDULE}end_weight_decay",
    ),
    "lr_warmup_init": Accepted(sets=f"{_SCHEDULE}*"),
    "lr_warmup_steps": Accepted(sets=f"{_SCHEDULE}lr_warmup_iters"),
    "lr_decay_steps": Accepted(sets=f"{_SCHEDULE}lr_decay_iters"),
    "betas": Accepted(
        "verl's own Megatron engine keeps 0.9 and 0.999, whatever they are",
        f"{_ADAM}adam_beta1 {_ADAM}adam_beta2",
    ),
    "grad_clip": Accepted("the older name of clip_grad"),
    "total_training_steps": Accepted(
        "the length of the schedule where lr_decay_steps is not given"
    ),
    "lr_warmup_steps_ratio": Accepted("where lr_warmup_steps is not positive"),
    "weight_decay_incr_style": Accepted(
        "without effect: the weight decay is constant", f"{_SCHEDULE}*"
    ),
    "override_optimizer_config": Accepted("see below"),
    "optimizer": Rejected("'adam' and 'sgd' are built", only=("adam", "sgd")),
    "lr_decay_style": Rejected(
        "'constant', 'linear', 'cosine' and 'inverse_square_root' are built",
        only=("constant", "linear", "cosine", "inverse_square_root", "inverse-square-root"),
    ),
    "lr_wsd_decay_style lr_wsd_decay_steps": Ignored(
        "affects lr_decay_style 'WSD' only, which is not among its values"
    ),
    "use_checkpoint_opt_param_scheduler": Rejected("the schedule of the configuration is used"),
    "use_precision_aware_optimizer": KEYS["megatron_cfg.optimizer.use_precision_aware_optimizer"],
    "main_grads_dtype exp_avg_dtype exp_avg_sq_dtype": Rejected(
        "kept in fp32", only=("fp32", "float32", "32")
    ),
    """use_layer_wise_distributed_optimizer use_layer_wise_param_layout muon_momentum
    muon_nesterov muon_split_qkv muon_scale_mode muon_coefficient_type muon_num_ns_steps
    muon_tp_mode muon_fp32_matmul_prec muon_extra_scale_factor muon_scalar_optimizer
    muon_match_adamw_update_rms""": Ignored("affects optimizer 'muon' only, which is rejected"),
}

_MODELS: Rules = {
    "path": Accepted("a Hugging Face checkpoint", "model_name"),
    "local_path": Accepted("where verl has copied path to"),
    "model_type": Accepted(
        "language_model, or value_model: a head of one number for each token",
        "reward_model_cfg.enabled",
    ),
    "override_config": Accepted(
        "fields of config.json; those that change weights are refused", "hf_config_overrides"
    ),
    "lora mtp": Accepted("see below"),
    "use_remove_padding": Accepted("verl hands it to the engine"),
    "hf_config_path": Rejected(_CONFIG, same_as="model.path"),
    "local_hf_config_path": Rejected(_CONFIG, same_as="model.local_path"),
    """tokenizer_path local_tokenizer_path load_tokenizer hf_config generation_config tokenizer
    processor use_shm external_lib architectures custom_chat_template
    share_embeddings_and_output_weights""": Ignored("read by verl itself"),
    "trust_remote_code": Ignored("no code of a checkpoint is run; verl itself reads it"),
    "enable_gradient_checkpointing": Ignored(
        "read by verl's FSDP engines only: recompute_granularity of "
        "override_transformer_config says what is recomputed"
    ),
    "enable_activation_offload": Rejected(
        "activations stay on the device; use recompute_granularity", changes="memory"
    ),
    "use_fused_kernels fused_kernel_options": _WHOLE,
    "use_liger tiled_mlp": _FSDP,
    "lora_rank": Rejected("set model.lora.rank, as for verl's own Megatron engine"),
    "lora_alpha target_modules target_parameters exclude_modules": Ignored(
        "affects lora_rank only: the keys of model.lora count"
    ),
    "lora_adapter_path": Rejected("set model.lora.adapter_path"),
}

_PEFT = "megatron_cfg.peft."
_LORA: Rules = {
    """alpha dropout target_modules exclude_modules dropout_position lora_A_init_method
    lora_B_init_method""": Accepted(sets=f"{_PEFT}*"),
    "rank": Accepted("0: no adapters", f"{_PEFT}enabled {_PEFT}dim"),
    "merge": Accepted("rollouts get merged weights; false: adapters, by PEFT's names"),
    "adapter_path": Accepted(
        "a PEFT directory whose adapters are gone on with", f"{_PEFT}start_from"
    ),
    "dtype": Accepted("has to agree with the engine's", f"{_PEFT}lora_dtype"),
    "type": Rejected("adapters are LoRA", only=("lora",)),
    "a2a_experimental": Ignored("ranks exchange vectors of the adapters' rank alone"),
    "freeze_vision_model freeze_vision_projection freeze_language_model": Ignored(
        "with adapters nothing else is trained"
    ),
    "fully_sharded_loras": _ROLLOUT,
}

_MTP: Rules = {
    "enable": Accepted("with enable_train"),
    "enable_train": Accepted(
        "layers for multi-token prediction are trained along", "megatron_cfg.mtp_num_layers"
    ),
    "mtp_loss_scaling_factor": Accepted(sets="megatron_cfg.*"),
    "detach_encoder": Accepted("their losses train nothing else", "megatron_cfg.mtp_detach_heads"),
    """enable_rollout speculative_algorithm speculative_num_steps speculative_eagle_topk
    speculative_num_draft_tokens method num_speculative_tokens""": _ROLLOUT,
}

_CHECKPOINT: Rules = {
    "save_contents": Accepted(
        "model, optimizer (with schedule and random states, also without extra) and hf_model"
    ),
    "load_contents": Accepted(),
    "async_save": Accepted(
        "a save is whole when it returns; the engine then names it the latest, which verl "
        "leaves to it"
    ),
    "strict": Ignored("a missing or unexpected weight is always refused"),
    "save_lora_only": Ignored("checkpoints of adapters never have the base's weights"),
    "mbridge_config": _TABLES,
}

_TABLES_OF: dict[str, Rules] = {
    "engine.": _ENGINE,
    "engine.router_replay.": _REPLAYS,
    "engine.qat.": _QAT,
    "engine.override_transformer_config.": TRANSFORMER,
    "engine.override_ddp_config.": DDP,
    "engine.override_mcore_model_config.": {
        "*": Rejected(MODEL),
    },
    "optim.": _OPTIMIZER,
    "optim.override_optimizer_config.": {
        "optimizer_cpu_offload": Ignored(
            "the state is on the device within a step, which takes more memory, and leaves it "
            "between steps with engine.optimizer_offload; use_distributed_optimizer spreads it "
            "over data-parallel ranks",
            warned=True,
        ),
        "offload_fraction": Ignored("affects optimizer_cpu_offload only, which is ignored"),
    },
    "model.": _MODELS,
    "model.lora.": _LORA,
    "model.mtp.": _MTP,
    "checkpoint.": _CHECKPOINT,
}
SECTIONS = {prefix: by_name(table) for prefix, table in _TABLES_OF.items()}
"""Rules by the path of a section, with its trailing dot; `*` stands for any other key of it."""

SAME_AS = {
    "engine.override_transformer_config.": "megatron_cfg.",
    "engine.override_ddp_config.": "megatron_cfg.distributed_data_parallel_config.",
    "optim.override_optimizer_config.": "megatron_cfg.optimizer.",
}
"""Sections whose other keys have the rules of one of a policy's."""


def rule_of(prefix: str, name: str) -> Rule | None:
    """The rule for a key of a section; None if it is unknown."""
    own = SECTIONS[prefix]
    shared = KEYS.get(SAME_AS[prefix] + name) if prefix in SAME_AS else None
    if isinstance(shared, Nested):  # a section of megatron_cfg, no field of Megatron-Core's
        shared = None
    return own.get(name) or shared or own.get("*")
