from functools import partial

from tests.families import llava_next, qwen2
from tests.families.llava import CLIP
from tests.samples import Fields, Samples, parse_published

SIGLIP = CLIP | {"model_type": "siglip_vision_model", "vision_use_head": False}
TOWER: Fields = SIGLIP | {
    "hidden_size": 1152,
    "image_size": 384,
    "intermediate_size": 4304,
    "num_attention_heads": 16,
    "num_hidden_layers": 26,
    "patch_size": 14,
    "num_channels": 3,
}
READ = ("pixel_values", "batch_num_images", "image_sizes", "pixel_values_videos")

SAMPLES = Samples(
    architecture="LlavaOnevisionForConditionalGeneration",
    surround=partial(
        llava_next.surround,
        decoder="qwen2",
        vision=SIGLIP,
        video_token_index=10**6 + 1,
        vision_aspect_ratio="anyres_max_9",
        vision_feature_select_strategy="full",
    ),
    layer_types=qwen2.SAMPLES.layer_types,
    windows=qwen2.SAMPLES.windows,
    draw=qwen2.SAMPLES.draw,
    variants={"llava_onevision": {}},
    generating=None,
    without_heads=("regression", "bradley_terry"),
    read=(({}, {"qkv_bias": True, "tied": False, "attachments": READ}),),
    refused=(
        ({"text_only": True}, "text_only = True: unknown field"),
        ({"vision_aspect_ratio": "square"}, "'square': it can be anyres_max_ and a number"),
        (
            {"vision_feature_select_strategy": "default"},
            "vision_feature_select_strategy = 'default': a tile of a siglip_vision_model has",
        ),
        (
            {"text_config": {"model_type": "llama"}},
            "text_config.model_type = 'llama': the decoder can be qwen2",
        ),
    ),
    published={
        "llava-onevision-qwen2-7b-ov-hf": {"vision_config": TOWER}
        | parse_published("""8_029_890_080 parameters
            "hidden_size": 3584, "intermediate_size": 18944, "max_position_embeddings": 32768,
            "max_window_layers": 28, "num_attention_heads": 28, "num_hidden_layers": 28,
            "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
            "tie_word_embeddings": false, "use_sliding_window": false, "vocab_size": 152000
        """)
    },
)
