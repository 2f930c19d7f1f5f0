from functools import partial
from random import Random

from tests.samples import VISION, Fields, Samples, parse_published, set_later_windows, surround

WINDOWED = VISION | {"window_size": 8, "fullatt_block_indexes": [1], "tokens_per_second": 2}
TOWER: Fields = {
    "depth": 32,
    "fullatt_block_indexes": [7, 15, 23, 31],
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "patch_size": 14,
    "tokens_per_second": 2,
    "window_size": 112,
}


def draw(random: Random, sizes: Fields) -> Fields:
    return {}


SAMPLES = Samples(
    architecture="Qwen2_5_VLForConditionalGeneration",
    surround=partial(surround, vision=WINDOWED, interleaved=False),
    layer_types=True,
    windows=set_later_windows,
    ranges={"ln_q": (0.5, 1.5)},
    draw=draw,
    variants={"qwen2_5_vl with windows": {"window": 6, "full_layers": 1, "tied": True}},
    generating=None,
    without_heads=("regression", "bradley_terry"),
    read=(
        ({}, {"qkv_bias": True, "proj_bias": False, "window": None, "tied": False}),
        (
            {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
            {"windowed": (False, True, True)},
        ),
    ),
    refused=(({"text_only": True}, "text_only = True: unknown field"),),
    published={
        "Qwen2.5-VL-7B-Instruct": {"vision_config": TOWER}
        | parse_published("""8_292_166_656 parameters
            "hidden_size": 3584, "intermediate_size": 18944, "max_position_embeddings": 128000,
            "max_window_layers": 28, "num_attention_heads": 28, "num_hidden_layers": 28,
            "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
            "sliding_window": 32768, "tie_word_embeddings": false, "use_sliding_window": false,
            "vocab_size": 152064
        """)
    },
)
