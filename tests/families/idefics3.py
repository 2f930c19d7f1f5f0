from functools import partial

from megatron_policy.converters.architecture.traits import Activation
from tests.families.qwen3_vl import draw
from tests.samples import Fields, Samples, enclose, parse_published

TILED: Fields = {
    "hidden_size": 16,
    "image_size": 8,
    "initializer_range": 0.1,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "patch_size": 2,
    "num_channels": 3,
}
TOWER: Fields = {
    "hidden_size": 1152,
    "image_size": 364,
    "intermediate_size": 4304,
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
    "patch_size": 14,
    "num_channels": 3,
}
FULL = {"attention_bias": True, "mlp_bias": True}
REFUSED: tuple[tuple[Fields, str], ...] = (
    ({"text_only": True}, "text_only = True: unknown field"),
    ({"scale_factor": 3}, "pictures of (8, 8) pixels have no whole number of tokens of 9 patches"),
    (
        {"text_config": {"model_type": "gemma2"}},
        "text_config.model_type = 'gemma2': the decoder can be llama",
    ),
)

SAMPLES = Samples(
    architecture="Idefics3ForConditionalGeneration",
    surround=partial(enclose, decoder="llama", vision=TILED, image_token_id=0, scale_factor=2),
    head_dim=True,
    full=FULL,
    draw=draw,
    variants={"idefics3 with biases": FULL | {"tied": True}},
    generating=None,
    without_heads=("regression", "bradley_terry"),
    read=(
        ({}, {"qkv_bias": False, "tied": False, "attachments": ("pixel_values",)}),
        ({"hidden_act": "gelu_new"}, {"activation": Activation.GELU_TANH}),
    ),
    refused=REFUSED,
    published={
        "Idefics3-8B-Llama3": {"vision_config": TOWER}
        | parse_published("""8_462_086_384 parameters
            "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 131072,
            "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05, "rope_theta": 500000.0,
            "rope_scaling": {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192, "rope_type": "llama3"},
            "tie_word_embeddings": false, "vocab_size": 128259
        """)
    },
)
