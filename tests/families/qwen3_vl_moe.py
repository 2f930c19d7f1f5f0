from functools import partial
from random import Random

from megatron_policy.converters.architecture.traits import QkNorm, Scoring
from tests.families.qwen2_moe import draw_softmax
from tests.families.qwen3_vl import DECODER, DEEP, TOWER
from tests.samples import Fields, Samples, make_moe, parse_published, surround


def draw(random: Random, sizes: Fields) -> Fields:
    drawn = draw_softmax(random, sizes)
    return {name: drawn[name] for name in drawn if name != "norm_topk_prob"}


SAMPLES = Samples(
    architecture="Qwen3VLMoeForConditionalGeneration",
    surround=partial(surround, vision=DEEP, interleaved=True),
    experts=True,
    tiny={"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    | {"mlp_only_layers": [0]},
    head_dim=True,
    full={"attention_bias": True},
    draw=draw,
    shared=False,
    without_heads=("regression", "bradley_terry"),
    read=(
        (
            {"attention_bias": True, "head_dim": 8},
            {
                "moe": make_moe(scoring=Scoring.SOFTMAX_OF_CHOSEN),
                "moe_layers": (False, True, True),
                "qk_norm": QkNorm.PER_HEAD,
                "qkv_bias": True,
            },
        ),
    ),
    refused=(({"text_only": True}, "text_only = True: unknown field"),),
    published={
        "Qwen3-VL-30B-A3B-Instruct": DECODER
        | {"vision_config": TOWER}
        | parse_published("""31_070_754_032 parameters
            "decoder_sparse_step": 1, "hidden_size": 2048, "intermediate_size": 6144,
            "mlp_only_layers": [], "moe_intermediate_size": 768, "norm_topk_prob": true,
            "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8,
            "num_hidden_layers": 48, "num_key_value_heads": 4
        """)
    },
)
