from random import Random

from megatron_policy.converters.architecture.traits import Norm, QkNorm
from tests.families.qwen3_5_text import COMMON
from tests.families.qwen3_next import DELTA, LINEAR, RANGES, TURNS, draw_linear
from tests.families.qwen3_vl import TOWER
from tests.samples import VISION, Fields, Samples, parse_published, surround

TINY_TOWER = VISION | {"num_position_embeddings": 64}


def see(text: Fields) -> Fields:
    rotated = {} if "rope_parameters" in text else {"partial_rotary_factor": 0.5}
    return surround(rotated | text, vision=TINY_TOWER, interleaved=True)


def publish(text: str) -> Fields:
    fields = parse_published(text)
    width = {"deepstack_visual_indexes": [], "out_hidden_size": fields["hidden_size"]}
    return COMMON | fields | {"vision_config": TOWER | width}


def draw(random: Random, sizes: Fields) -> Fields:
    return draw_linear(random)


SAMPLES = Samples(
    architecture="Qwen3_5ForConditionalGeneration",
    surround=see,
    tiny=LINEAR,
    head_dim=True,
    turns=TURNS,
    ranges=RANGES,
    full={"attention_bias": True, "mtp_num_hidden_layers": 1},
    draw=draw,
    variants={"qwen3_5 with biases": {"attention_bias": True}, "qwen3_5, tied": {"tied": True}},
    generating=("TP2+SP", {"attention_bias": True}),
    read=(
        (
            LINEAR | {"attention_bias": True, "head_dim": 8},
            {
                "mixers": ("DeltaNet", "Attention", "DeltaNet"),
                "delta_net": DELTA,
                "norm": Norm.RMS_PLUS_ONE,
                "qk_norm": QkNorm.PER_HEAD,
                "attention_output_gate": True,
                "qkv_bias": True,
                "proj_bias": True,
                "further_layers": 1,
                "tied": False,
            },
        ),
    ),
    refused=(({"text_only": True}, "text_only = True: unknown field"),),
    published={
        "Qwen3.5-27B": publish("""27_356_728_560 parameters
            "hidden_size": 5120, "intermediate_size": 17408, "linear_num_value_heads": 48,
            "num_attention_heads": 24, "num_hidden_layers": 64, "num_key_value_heads": 4
        """)
    },
)
