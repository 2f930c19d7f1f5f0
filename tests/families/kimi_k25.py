from random import Random
from typing import Any

from tests.families import kimi_k2
from tests.families.deepseek_v3 import LATENT_FIELDS, SIGMOID_FIELDS
from tests.samples import Fields, Samples, enclose

TINY: Fields = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "patch_size": 2,
    "pos_emb_height": 4,
    "pos_emb_width": 4,
    "merge_kernel_size": [2, 2],
}
TOWER = TINY | {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
    "patch_size": 14,
    "pos_emb_height": 64,
    "pos_emb_width": 64,
}


def publish(config: Any, tensors: Fields) -> Fields:
    """transformers 5.23 takes all blocks for the tower's, all of that for its encoder's, and leaves
    a norm under its own name.
    """
    return {
        name.replace("language_model.model.blocks.", "language_model.model.layers.")
        .replace("vision_tower.encoder.patch_embed.", "vision_tower.patch_embed.")
        .removeprefix("model."): tensor
        for name, tensor in tensors.items()
    }


def surround(text: Fields, **more: Any) -> Fields:
    """The projection begins with the features of the tower."""
    whole = enclose(text, decoder="kimi_k2", vision=TINY, image_token_id=0, **more)
    width = whole["vision_config"]["hidden_size"]
    return whole | {"projection_hidden_size": width}


def draw(random: Random, sizes: Fields) -> Fields:
    """transformers takes queries that are not compressed for the tower's when it saves them."""
    return kimi_k2.draw(random, sizes) | {"q_lora_rank": random.choice([12, 20])}


SAMPLES = Samples(
    architecture="KimiK25ForConditionalGeneration",
    surround=surround,
    publish=publish,
    experts=True,
    tiny=SIGMOID_FIELDS | LATENT_FIELDS | {"n_group": 1, "topk_group": 1},
    draw=draw,
    trained=(),
    shared=False,
    without_heads=("regression", "bradley_terry"),
    read=(({}, {"attachments": ("pixel_values", "image_grid_thw"), "tied": False}),),
    refused=(
        ({"text_only": True}, "text_only = True: unknown field"),
        ({"media_placeholder_token_id": 7}, "media_placeholder_token_id = 7: image_token_id is"),
        (
            {"vision_config": TINY | {"vt_hidden_size": 32}},
            "vision_config.vt_hidden_size = 32: transformers reads hidden_size, which is 16",
        ),
        (
            {"vision_config": TINY | {"merge_kernel_size": [1, 4]}},
            "merge_kernel_size = [1, 4]: a token is made of a square",
        ),
    ),
    published={
        f"{name.replace('Kimi-K2-Instruct', 'Kimi-K2.5')}": fields
        | {"vision_config": TOWER, "parameters": 1_026_879_376_368}
        for name, fields in kimi_k2.SAMPLES.published.items()
    },
)
