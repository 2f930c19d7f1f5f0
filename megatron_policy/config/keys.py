"""What becomes of every key of a configuration.

A field of a section is applied, unless a table here or in `megatron_keys.py` says that it is
ignored or rejected. The tables also name keys without a field.
"""

from __future__ import annotations

from collections.abc import Iterator
from inspect import isclass
from typing import get_args

from megatron_policy.config import megatron_keys
from megatron_policy.config.section import (
    Applied,
    Ignored,
    Nested,
    Rejected,
    Rule,
    Rules,
    Section,
    ValueSection,
    by_name,
    switched_off,
)
from megatron_policy.config.sections import PolicySection

_AUTOMODEL = Ignored("affects modules and sharding of the host's own DTensor worker only")
_HOST = Ignored("read by the host's driver, not by the worker")

_POLICY: Rules = {
    "offload_optimizer_for_logprob offload_optimizer_for_refit": Ignored(
        "the optimizer's state always leaves the device for log-probabilities and refits"
    ),
    """quant_calib_data quant_calib_size quant_batch_size quant_sequence_length
    disable_modelopt_layer_spec""": Ignored(
        "affects quantised training only, and quant_cfg is rejected"
    ),
    "quant_cfg": Rejected("quantised training is not supported"),
    "env_vars": Rejected("workers get the variables of megatron_cfg.env_vars; put them there"),
    "dequantize_base_checkpoint": Ignored("quantised weights are always read as bfloat16"),
    "is_vlm": Ignored("a model's config.json says what it sees"),
}

_GENERATION: Rules = {
    "backend": Ignored("the caller chooses which engine generates"),
    "stop_strings": Rejected("generate stops at tokens; put their ids into stop_token_ids"),
    "bad_words": Rejected("the policy's own generate cannot ban words"),
    "ignore_eos": Rejected("generate ends a row at the tokenizer's end of sequence"),
    "val_temperature": Rejected("generate has one temperature", same_as="generation.temperature"),
    "val_top_p": Rejected("generate has one top_p", same_as="generation.top_p"),
    "val_top_k": Rejected("generate has one top_k", same_as="generation.top_k"),
    """vllm_cfg vllm_kwargs sglang_cfg sglang_kwargs trtllm_cfg trtllm_kwargs dynamo_cfg
    mcore_generation_config model_path quant_cfg real_quant real_quant_export_cpu_offload
    real_quant_ignore refit_cfg refit_transport""": Ignored(
        "belongs to the host's inference engines, not to the policy's own generate"
    ),
    """port_range_low port_range_high model_name use_async_rollouts num_prompts_per_step
    pad_token_id _pad_token_id _mtp_weights_from_refit _debug_payload_metrics""": _HOST,
}

_BATCHING: Rules = {
    "microbatch_order": Ignored("each rank computes its costliest microbatch first"),
    "fuse_loss": Ignored("all rows of a microbatch are scored at once, in tiles"),
}

_NOT_APPLIED: dict[str, Rules] = {
    "": _POLICY,
    **megatron_keys.NOT_APPLIED,
    "dynamic_batching.": {
        **_BATCHING,
        "algorithm": Ignored("affects sequence_packing only"),
    },
    "sequence_packing.": {
        **_BATCHING,
        "sequence_length_round": Ignored("packed sequences are padded only as the layout needs it"),
    },
    "generation.": _GENERATION,
    "generation.colocated.": {
        "enabled": Ignored("says where engines run: read when the worker connects to them"),
        "resources *": _HOST,
    },
    "tokenizer.": {
        "name chat_template chat_template_kwargs use_fastokens use_processor audio video": Ignored(
            "the caller makes the tokenizer and the prompts"
        ),
    },
    "dtensor_cfg.": {
        "defer_fsdp_grad_sync": Ignored("gradients are reduced in each microbatch"),
        "_v2": Ignored("both of the host's DTensor workers are replaced by the same engine"),
    },
    "dtensor_cfg.moe_parallelizer.": {
        "ignore_router_for_ac reshard_after_forward wrap_outer_model": _AUTOMODEL,
        "lm_head_precision": Rejected("the head computes in the policy's precision, then in fp32"),
    },
    "dtensor_cfg.lora_cfg.": switched_off(
        "this engine has no adapters, use megatron_cfg with peft",
        "adapters",
        """target_modules exclude_modules match_all_linear dim alpha dropout dropout_position
        lora_A_init use_triton""",
    ),
    "dtensor_cfg.automodel_kwargs.": {
        "use_liger_kernel force_hf backend": _AUTOMODEL,
    },
    "dtensor_cfg.automodel_kwargs.freeze_config.": {
        "freeze_embeddings freeze_video_embedder freeze_modules unfreeze_modules": Rejected(
            "policy.optimizer.param_groups freezes parameters, by names and roles"
        ),
    },
    "draft.": switched_off(
        "training a draft model with the policy is not supported",
        "a draft model",
        "model_name loss_weight num_layers aux_layer_indices",
    ),
    "pretrained_checkpoint.": {
        "path": Rejected("weights come from the Hugging Face files of model_name"),
        "format *": Ignored("affects path only"),
    },
}


def _sections(prefix: str, section: type[Section] | None) -> Iterator[tuple[str, Rules]]:
    """The rules of a section and of those in it: of its fields in order, then of other keys."""
    rules: Rules = {}
    for name, info in section.model_fields.items() if section else ():
        # The section of keys that the field has, or can have.
        kinds = filter(isclass, get_args(info.annotation) or (info.annotation,))
        sections = (k for k in kinds if issubclass(k, Section) and not issubclass(k, ValueSection))
        inner = next(sections, None)
        rules[name] = Applied() if inner is None else Nested(inner)
    for path, others in _NOT_APPLIED.items():
        outer, _, name = path.removesuffix(".").rpartition(".")
        if path == prefix:
            rules |= by_name(others)
        elif outer == prefix.removesuffix("."):
            rules.setdefault(name, Nested())
    yield prefix, rules
    for name, rule in rules.items():
        if isinstance(rule, Nested):
            yield from _sections(f"{prefix}{name}.", rule.section)


SECTIONS: dict[str, Rules] = dict(_sections("", PolicySection))
"""Rules by the path of a section, with its trailing dot; `*` stands for any other key of it."""
assert _NOT_APPLIED.keys() <= SECTIONS.keys(), "a table is of no section"

KEYS: dict[str, Rule] = {
    prefix + name: rule for prefix, rules in SECTIONS.items() for name, rule in rules.items()
}
"""Every key by its path below `policy`."""
