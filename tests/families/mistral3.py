from functools import partial

from tests.families.qwen3_vl import draw
from tests.samples import Fields, Samples, enclose, parse_published, set_window

PIXTRAL: Fields = {
    "model_type": "pixtral",
    "head_dim": 8,
    "hidden_size": 16,
    "image_size": 32,
    "initializer_range": 0.1,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "patch_size": 2,
    "num_channels": 3,
}
TOWER = PIXTRAL | {
    "head_dim": 64,
    "hidden_size": 1024,
    "image_size": 1540,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "patch_size": 14,
    "num_channels": 3,
}

SAMPLES = Samples(
    architecture="Mistral3ForConditionalGeneration",
    surround=partial(
        enclose, decoder="mistral", vision=PIXTRAL, image_token_index=0, spatial_merge_size=2
    ),
    head_dim=True,
    windows=set_window,
    full={"sliding_window": 16},
    draw=draw,
    ranges={"ln_pre": (0.5, 1.5)},
    variants={
        "mistral3 with a window": {"window": 7},
        "mistral3 without one": {"tied": True},
    },
    generating=None,
    without_heads=("regression", "bradley_terry"),
    read=(
        (
            {"sliding_window": None},
            {"window": None, "tied": False, "attachments": ("pixel_values", "image_sizes")},
        ),
        ({"sliding_window": 4}, {"window": 4, "windowed": ()}),
    ),
    refused=(
        ({"text_only": True}, "text_only = True: unknown field"),
        (
            {"text_config": {"model_type": "llama"}},
            "text_config.model_type = 'llama': the decoder can be mistral or ministral3",
        ),
    ),
    published={
        "Mistral-Small-3.1-24B-Instruct-2503": {"vision_config": TOWER}
        | parse_published("""24_011_361_280 parameters
            "head_dim": 128, "hidden_size": 5120, "intermediate_size": 32768,
            "max_position_embeddings": 131072, "num_attention_heads": 32, "num_hidden_layers": 40,
            "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000000.0,
            "sliding_window": null, "tie_word_embeddings": false, "vocab_size": 131072
        """)
    },
)
