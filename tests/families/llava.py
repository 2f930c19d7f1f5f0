from functools import partial

from megatron_policy.converters.architecture.traits import Activation
from tests.families.qwen3_vl import draw
from tests.samples import Fields, Samples, enclose, parse_published

CLIP: Fields = {
    "model_type": "clip_vision_model",
    "hidden_size": 16,
    "image_size": 8,
    "initializer_range": 0.1,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "patch_size": 4,
    "num_channels": 3,
}
TOWER = CLIP | {
    "hidden_size": 1024,
    "image_size": 336,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "patch_size": 14,
    "num_channels": 3,
    "projection_dim": 768,
    "vocab_size": 32000,
}

SAMPLES = Samples(
    architecture="LlavaForConditionalGeneration",
    surround=partial(enclose, decoder="llama", vision=CLIP, image_token_index=0),
    head_dim=True,
    full={"attention_bias": True, "mlp_bias": True},
    draw=draw,
    variants={"llava with biases": {"attention_bias": True, "mlp_bias": True, "tied": True}},
    generating=None,
    without_heads=("regression", "bradley_terry"),
    read=(
        ({}, {"qkv_bias": False, "tied": False, "attachments": ("pixel_values",)}),
        ({"hidden_act": "gelu_new"}, {"activation": Activation.GELU_TANH}),
    ),
    refused=(
        ({"text_only": True}, "text_only = True: unknown field"),
        (
            {"text_config": {"model_type": "gemma2"}},
            "text_config.model_type = 'gemma2': the decoder can be llama or mistral or qwen2",
        ),
    ),
    published={
        "LLaVA-1.5-7B": {"vision_config": TOWER}
        | parse_published("""7_063_427_072 parameters
            "hidden_size": 4096, "intermediate_size": 11008, "max_position_embeddings": 4096,
            "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
            "rms_norm_eps": 1e-05, "tie_word_embeddings": false, "vocab_size": 32064
        """)
    },
)
