from functools import partial

from tests.families.qwen2_5_vl import draw
from tests.samples import VISION, Fields, Samples, parse_published, set_later_windows, surround

NAMED = {name: value for name, value in VISION.items() if "size" not in name}
MEDIA = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw")
SIZES: Fields = {"patch_size": 2, "temporal_patch_size": 2, "spatial_merge_size": 2}
TOWER: Fields = {"depth": 32, "embed_dim": 1280, "num_heads": 16, "patch_size": 14}

SAMPLES = Samples(
    architecture="Qwen2VLForConditionalGeneration",
    surround=partial(
        surround, vision=NAMED | SIZES | {"embed_dim": 16}, interleaved=False, width="hidden_size"
    ),
    layer_types=True,
    windows=set_later_windows,
    ranges={"ln_q": (0.5, 1.5)},
    draw=draw,
    variants={"qwen2_vl with windows": {"window": 6, "full_layers": 1, "tied": True}},
    generating=None,
    without_heads=("regression", "bradley_terry"),
    read=(({}, {"qkv_bias": True, "window": None, "attachments": MEDIA}),),
    refused=(({"text_only": True}, "text_only = True: unknown field"),),
    published={
        "Qwen2-VL-7B-Instruct": {"vision_config": TOWER}
        | parse_published("""8_291_375_616 parameters
            "hidden_size": 3584, "intermediate_size": 18944, "max_position_embeddings": 32768,
            "max_window_layers": 28, "num_attention_heads": 28, "num_hidden_layers": 28,
            "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
            "sliding_window": 32768, "tie_word_embeddings": false, "use_sliding_window": false,
            "vocab_size": 152064
        """)
    },
)
