from functools import partial

from tests.families.qwen2_5_vl import TOWER, WINDOWED, draw
from tests.samples import (
    Fields,
    Samples,
    parse_published,
    set_later_windows,
    surround_with_sound,
)

LISTENING: Fields = {
    "d_model": 16,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "num_mel_bins": 8,
    "n_window": 8,
    "initializer_range": 0.1,
}
EARS: Fields = {
    "d_model": 1280,
    "encoder_layers": 32,
    "encoder_attention_heads": 20,
    "encoder_ffn_dim": 5120,
    "num_mel_bins": 128,
    "n_window": 100,
}

SAMPLES = Samples(
    architecture="Qwen2_5OmniThinkerForConditionalGeneration",
    surround=partial(
        surround_with_sound, vision=WINDOWED, interleaved=False, audio=LISTENING, ending="index"
    ),
    layer_types=True,
    windows=set_later_windows,
    ranges={"ln_q": (0.5, 1.5), "ln_post": (0.5, 1.5)},
    draw=draw,
    variants={"qwen2_5_omni_thinker with windows": {"window": 6, "full_layers": 1, "tied": True}},
    generating=None,
    without_heads=("regression", "bradley_terry"),
    read=(
        ({}, {"qkv_bias": True, "proj_bias": False, "window": None, "tied": False}),
        (
            {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
            {"windowed": (False, True, True)},
        ),
    ),
    refused=(
        ({"text_only": True}, "text_only = True: unknown field"),
        ({"vision_start_token_id": None}, "config.json has no vision_start_token_id"),
    ),
    published={
        "Qwen2.5-Omni-7B": {"vision_config": TOWER, "audio_config": EARS}
        | parse_published("""8_931_813_888 parameters
            "hidden_size": 3584, "intermediate_size": 18944, "max_position_embeddings": 32768,
            "max_window_layers": 28, "num_attention_heads": 28, "num_hidden_layers": 28,
            "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
            "sliding_window": 32768, "tie_word_embeddings": false, "use_sliding_window": false,
            "vocab_size": 152064
        """)
    },
)
