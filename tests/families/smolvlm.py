from functools import partial

from megatron_policy.converters.architecture.traits import Activation
from tests.families.idefics3 import FULL, REFUSED, TILED, TOWER
from tests.families.qwen3_vl import draw
from tests.samples import Samples, enclose, parse_published

BASE = TOWER | {
    "hidden_size": 768,
    "image_size": 512,
    "intermediate_size": 3072,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "patch_size": 16,
}

SAMPLES = Samples(
    architecture="SmolVLMForConditionalGeneration",
    surround=partial(enclose, decoder="llama", vision=TILED, image_token_id=0, scale_factor=2),
    head_dim=True,
    full=FULL,
    draw=draw,
    variants={"smolvlm with biases": FULL | {"tied": True}},
    generating=None,
    without_heads=("regression", "bradley_terry"),
    read=(
        ({}, {"qkv_bias": False, "tied": False, "attachments": ("pixel_values",)}),
        ({"hidden_act": "gelu_new"}, {"activation": Activation.GELU_TANH}),
    ),
    refused=REFUSED,
    published={
        "SmolVLM2-500M-Video-Instruct": {"vision_config": BASE, "scale_factor": 4}
        | parse_published("""507_482_304 parameters
            "head_dim": 64, "hidden_size": 960, "intermediate_size": 2560,
            "max_position_embeddings": 8192, "num_attention_heads": 15, "num_hidden_layers": 32,
            "num_key_value_heads": 5, "rms_norm_eps": 1e-05, "rope_theta": 100000,
            "tie_word_embeddings": false, "vocab_size": 49280
        """)
    },
    larger={
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
    },
)
