from functools import partial
from random import Random

from megatron_policy.converters.architecture.traits import QkNorm
from tests.samples import VISION, Fields, Samples, parse_published, surround

DEEP = VISION | {"num_position_embeddings": 64, "deepstack_visual_indexes": [1]}
DECODER: Fields = {
    "attention_bias": False,
    "head_dim": 128,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-06,
    "rope_theta": 5000000,
    "tie_word_embeddings": False,
    "vocab_size": 151936,
}
TOWER: Fields = {
    "deepstack_visual_indexes": [8, 16, 24],
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "num_position_embeddings": 2304,
    "patch_size": 16,
}


def draw(random: Random, sizes: Fields) -> Fields:
    return {}


SAMPLES = Samples(
    architecture="Qwen3VLForConditionalGeneration",
    surround=partial(surround, vision=DEEP, interleaved=True),
    head_dim=True,
    full={"attention_bias": True},
    draw=draw,
    variants={"qwen3_vl with biases": {"attention_bias": True}, "qwen3_vl, tied": {"tied": True}},
    generating=None,
    without_heads=("regression", "bradley_terry"),
    read=(
        (
            {"attention_bias": True, "head_dim": 8},
            {
                "qk_norm": QkNorm.PER_HEAD,
                "qkv_bias": True,
                "proj_bias": True,
                "tied": False,
            },
        ),
    ),
    refused=(({"text_only": True}, "text_only = True: unknown field"),),
    published={
        "Qwen3-VL-8B-Instruct": DECODER
        | {"vision_config": TOWER}
        | parse_published("""8_767_123_696 parameters
            "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32,
            "num_hidden_layers": 36, "num_key_value_heads": 8
        """)
    },
)
