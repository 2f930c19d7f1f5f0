"""Fields of a config's sections for towers that nothing reads: transformers' class of a section
computes with those it declares, and keeps others unread.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from megatron_policy.converters.config_fields.fields import IGNORED

from .hf_overrides import ROPE

_TEXT = ("text_config", "llm_config")
"""Sections of decoders, whose fields a family takes one by one."""
_OF_ALL = """add_cross_attention bad_words_ids begin_suppress_tokens chunk_size_feed_forward
    cross_attention_hidden_size decoder_start_token_id diversity_penalty early_stopping
    encoder_no_repeat_ngram_size exponential_decay_length_penalty finetuning_task
    forced_bos_token_id forced_eos_token_id is_composition is_decoder is_encoder_decoder
    length_penalty no_repeat_ngram_size num_beam_groups num_return_sequences output_scores prefix
    problem_type pruned_heads remove_invalid_values return_dict_in_generate sep_token_id
    suppress_tokens task_specific_params tf_legacy_loss tie_encoder_decoder tie_word_embeddings
    typical_p use_bfloat16"""
"""What releases of transformers write into every config."""
_OF_MAKERS = """adaptor_configs adaptor_names args feature_normalizer_config image_size
    inter_feature_normalizer_config max_image_size max_num_patches max_resolution min_num_patches
    mm_hidden_size num_image_tokens preferred_resolution projection_bias projection_hidden_size
    projector_ln_eps sampling_rate separate_video_embedder size text_hidden_size tokens_per_second
    use_base_siglip version vitdet_window_size vocab_size"""
"""What published checkpoints have for processors, for their makers' own code, or for parts that the
whole model's class makes.
"""
_UNDECLARED = ("vision_use_head",)
"""What classes of some releases of transformers compute with and do not declare."""
_FIXED: Mapping[str, Any] = {
    "apply_vit_abs_pos_embed": True,
    "deepstack_visual_indexes": [],
    "merge_type": "sd2_tpool",
    "mm_projector_type": "patchmerger",
    "pos_emb_type": "divided_fixed",
    "projector_hidden_act": "gelu",
    "video_attn_type": "spatial_temporal",
}
"""What published checkpoints say that transformers' class always does."""
_TWINS: Mapping[str, str] = {
    "in_chans": "in_channels",
    "spatial_patch_size": "patch_size",
    **{f"vt_{name}": name for name in ("hidden_size", "intermediate_size")},
    **{f"vt_{name}": name for name in ("num_attention_heads", "num_hidden_layers")},
    **{f"init_pos_emb_{name}": f"pos_emb_{name}" for name in ("height", "width", "time")},
}
"""Fields under the names of makers, and those of transformers' class."""
_KNOWN = {*IGNORED, *_OF_ALL.split(), *_OF_MAKERS.split(), *_UNDECLARED, *ROPE[0], *ROPE[1]}


def find_unread(config: Mapping[str, Any], read: Any) -> dict[str, tuple[Any, str]]:
    """Fields of sections of `config` that what transformers has `read` of it does not honour, by
    their dotted names: their values, and why.
    """
    renamed: Mapping[str, str] = getattr(type(read), "_legacy_field_names", {})
    return {
        f"{name}.{field}": (value, why)
        for name, section in config.items()
        if name not in _TEXT and isinstance(section, Mapping)
        if hasattr(own := getattr(read, renamed.get(name, name), None), "to_dict")
        for field, value, why in _list_unread(section, own)
    }


def _list_unread(section: Mapping[str, Any], read: Any) -> Iterator[tuple[str, Any, str]]:
    kind = type(read)
    declared = {*inspect.signature(kind).parameters, *kind().to_dict(), *kind.attribute_map}
    for name, value in section.items():
        if name in declared or name in _KNOWN or value is None:
            continue
        if twin := _TWINS.get(name):
            own = getattr(read, twin, None)
            if value != own:
                yield name, value, f"transformers reads {twin}, which is {own}"
        elif name in _FIXED:
            if value != _FIXED[name]:
                yield name, value, f"its class computes with {_FIXED[name]!r} whatever this says"
        else:
            what = f"unknown field, which {kind.__name__} does not declare"
            yield name, value, f"{what}; if it does not affect the model, leave it out"
