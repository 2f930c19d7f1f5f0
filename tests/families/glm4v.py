from functools import partial

from tests.families.qwen3_vl import draw
from tests.samples import VISION, Fields, Samples, parse_published, surround

MARKS = ("image_start", "image_end")
SQUARE = VISION | {"image_size": 16}
TOWER: Fields = {
    "depth": 24,
    "hidden_size": 1536,
    "image_size": 336,
    "intermediate_size": 13696,
    "num_heads": 12,
    "out_hidden_size": 4096,
    "patch_size": 14,
}

SAMPLES = Samples(
    architecture="Glm4vForConditionalGeneration",
    surround=partial(surround, vision=SQUARE, interleaved=False, marks=MARKS),
    tiny={"partial_rotary_factor": 0.5},
    draw=draw,
    variants={"glm4v": {}},
    generating=None,
    without_heads=("regression", "bradley_terry"),
    read=(
        (
            {},
            {
                "qkv_bias": True,
                "proj_bias": False,
                "pre_norm": True,
                "post_norm": True,
                "attachments": (
                    *("pixel_values", "image_grid_thw"),
                    *("pixel_values_videos", "video_grid_thw"),
                ),
            },
        ),
    ),
    refused=(({"text_only": True}, "text_only = True: unknown field"),),
    published={
        "GLM-4.1V-9B-Thinking": {"vision_config": TOWER}
        | parse_published("""10_292_777_472 parameters
            "hidden_size": 4096, "intermediate_size": 13696, "max_position_embeddings": 65536,
            "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 2,
            "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
            "tie_word_embeddings": false, "vocab_size": 151552
        """)
    },
)
