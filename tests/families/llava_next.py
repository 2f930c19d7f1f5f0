from functools import partial
from typing import Any

from tests.families.llava import CLIP, TOWER
from tests.families.qwen3_vl import draw
from tests.samples import Fields, Samples, enclose, parse_published, set_window


def surround(text: Fields, **more: Any) -> Fields:
    """Pictures are cut into two tiles or four."""
    whole = enclose(text, image_token_index=0, **more)
    tile = whole["vision_config"]["image_size"]
    canvases = [[tile, 2 * tile], [2 * tile, tile], [2 * tile, 2 * tile]]
    return whole | {"image_grid_pinpoints": canvases}


SAMPLES = Samples(
    architecture="LlavaNextForConditionalGeneration",
    surround=partial(surround, decoder="mistral", vision=CLIP),
    head_dim=True,
    windows=set_window,
    full={"sliding_window": 16},
    draw=draw,
    variants={"llava_next": {"window": 7}},
    generating=None,
    without_heads=("regression", "bradley_terry"),
    read=(
        (
            {"sliding_window": None},
            {"window": None, "tied": False, "attachments": ("pixel_values", "image_sizes")},
        ),
    ),
    refused=(
        ({"text_only": True}, "text_only = True: unknown field"),
        ({"use_image_newline_parameter": False}, "False: a feature ends each row of others"),
        (
            {"vision_feature_select_strategy": "full"},
            "vision_feature_select_strategy = 'full': a tile of a clip_vision_model has features",
        ),
        ({"image_grid_pinpoints": [[8, 12]]}, "not all of ((8, 12),) are multiples"),
        (
            {"text_config": {"model_type": "gemma2"}},
            "text_config.model_type = 'gemma2': the decoder can be llama or mistral or qwen2",
        ),
    ),
    published={
        "llava-v1.6-mistral-7b-hf": {"vision_config": TOWER}
        | parse_published("""7_566_747_648 parameters
            "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 32768,
            "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "sliding_window": null,
            "tie_word_embeddings": false, "vocab_size": 32064
        """)
    },
)
