from tests.families import gemma3_text
from tests.families.qwen3_vl import draw
from tests.samples import Fields, Samples, enclose, parse_published, set_all_windows_but_the_last

SIGLIP: Fields = {
    "model_type": "siglip_vision_model",
    "hidden_size": 16,
    "image_size": 16,
    "initializer_range": 0.1,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "patch_size": 4,
    "num_channels": 3,
    "vision_use_head": False,
}
TOWER = SIGLIP | {
    "hidden_size": 1152,
    "image_size": 896,
    "intermediate_size": 4304,
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
    "patch_size": 14,
    "num_channels": 3,
}


def surround(text: Fields) -> Fields:
    """The fields of the whole model from those of its decoder."""
    tokens = {"mm_tokens_per_image": text.pop("mm_tokens_per_image", 4)}
    return enclose(text, "gemma3_text", SIGLIP, image_token_index=0, **tokens)


SAMPLES = Samples(
    architecture="Gemma3ForConditionalGeneration",
    surround=surround,
    tiny=gemma3_text.SAMPLES.tiny,
    head_dim=True,
    layer_types=True,
    windows=set_all_windows_but_the_last,
    ranges={
        "mm_input_projection_weight": (-0.2, 0.2),
        "norm": (-0.5, 0.5),
        "layer_norm": (0.5, 1.5),
        "layernorm": (-0.5, 0.5),
    },
    full={"attention_bias": True, "hidden_activation": "gelu"},
    draw=draw,
    variants={"gemma3": {"head_dim": 32, "tied": True}},
    generating=None,
    without_heads=("regression",),
    read=(({}, {"tied": False, "attachments": ("pixel_values",)}),),
    refused=(
        ({"text_only": True}, "text_only = True: unknown field"),
        ({"mm_tokens_per_image": 15}, "mm_tokens_per_image = 15: a picture has 4 x 4 patches"),
        ({"mm_tokens_per_image": 8}, "2 patches of pixel_values make a token: it must be a square"),
        (
            {"text_config": {"model_type": "gemma3_text", "final_logit_softcapping": 3.0}},
            "text_config.final_logit_softcapping = 3.0: transformers does not apply it beside",
        ),
        (
            {"text_config": {"model_type": "gemma3_text", "use_bidirectional_attention": True}},
            "text_config.use_bidirectional_attention = True: attention is causal",
        ),
        (
            {"vision_config": SIGLIP | {"model_type": "clip_vision_model"}},
            "vision_config.model_type = 'clip_vision_model': it can be siglip_vision_model",
        ),
    ),
    published={
        "gemma-3-4b-it": {"vision_config": TOWER, "mm_tokens_per_image": 256}
        | parse_published("""4_300_079_472 parameters
            "attention_bias": false, "attn_logit_softcapping": null,
            "final_logit_softcapping": null, "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2560,
            "intermediate_size": 10240, "max_position_embeddings": 131072, "num_attention_heads": 8,
            "num_hidden_layers": 34, "num_key_value_heads": 4, "query_pre_attn_scalar": 256,
            "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "rope_theta": 1000000,
            "sliding_window": 1024, "tie_word_embeddings": true, "vocab_size": 262208
        """)
    },
)
