from functools import partial

from tests.families.qwen3_vl import draw
from tests.samples import Fields, Samples, enclose, parse_published, set_later_windows

INTERN_VIT: Fields = {
    "model_type": "internvl_vision",
    "attention_bias": True,
    "hidden_size": 16,
    "image_size": [8, 8],
    "initializer_range": 0.1,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "patch_size": [2, 2],
    "num_channels": 3,
}
TOWER = INTERN_VIT | {
    "hidden_size": 1024,
    "image_size": [448, 448],
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "patch_size": [14, 14],
    "num_channels": 3,
}

SAMPLES = Samples(
    architecture="InternVLForConditionalGeneration",
    surround=partial(
        enclose, decoder="qwen2", vision=INTERN_VIT, image_token_id=0, downsample_ratio=0.5
    ),
    layer_types=True,
    windows=set_later_windows,
    ranges={"cls_token": (-0.2, 0.2), "position_embeddings": (-0.2, 0.2), "lambda_": (0.5, 1.5)},
    draw=draw,
    variants={
        "internvl with windows": {"window": 6, "full_layers": 1},
        "internvl, tied": {"tied": True},
    },
    generating=None,
    without_heads=("regression", "bradley_terry"),
    read=(
        ({}, {"qkv_bias": True, "tied": False, "attachments": ("pixel_values",)}),
        (
            {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
            {"windowed": (False, True, True)},
        ),
    ),
    refused=(
        ({"text_only": True}, "text_only = True: unknown field"),
        ({"downsample_ratio": 0.4}, "downsample_ratio = 0.4: it must be 1 divided by a whole"),
        (
            {"vision_feature_select_strategy": "full"},
            "vision_feature_select_strategy = 'full': features have to be a square",
        ),
        (
            {"vision_config": INTERN_VIT | {"image_size": [8, 16]}},
            "vision_config.image_size = [8, 16]: pictures and patches have to be squares",
        ),
        (
            {"text_config": {"model_type": "gemma2"}},
            "text_config.model_type = 'gemma2': the decoder can be llama or qwen2 or qwen3",
        ),
    ),
    published={
        "InternVL3-1B-hf": {"vision_config": TOWER}
        | parse_published("""938_193_024 parameters
            "hidden_size": 896, "intermediate_size": 4864, "max_position_embeddings": 32768,
            "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2,
            "rms_norm_eps": 1e-06, "rope_scaling": {"factor": 2.0, "rope_type": "dynamic"},
            "rope_theta": 1000000.0, "tie_word_embeddings": false, "vocab_size": 151674
        """)
    },
)
