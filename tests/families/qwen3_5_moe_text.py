from random import Random

from megatron_policy.converters.architecture.traits import Norm
from tests.families.qwen3_5_text import COMMON
from tests.families.qwen3_next import DELTA, EXPERTS, LINEAR, MOE, RANGES, TURNS, draw_linear
from tests.samples import Fields, Samples, parse_published


def draw(random: Random, sizes: Fields) -> Fields:
    experts = random.choice([3, 4, 6])
    return draw_linear(random) | {
        "num_experts": experts,
        "num_experts_per_tok": random.randint(1, experts),
        "moe_intermediate_size": random.choice([8, 24]),
        "shared_expert_intermediate_size": random.choice([8, 20]),
    }


SAMPLES = Samples(
    architecture="Qwen3_5MoeForCausalLM",
    experts=True,
    tiny=LINEAR | EXPERTS | {"partial_rotary_factor": 0.5},
    head_dim=True,
    turns=TURNS,
    ranges=RANGES,
    full={"attention_bias": True, "mtp_num_hidden_layers": 1},
    draw=draw,
    context={},
    without_heads=("regression", "bradley_terry"),
    read=(
        (
            {},
            {
                "mixers": ("DeltaNet", "Attention", "DeltaNet"),
                "delta_net": DELTA,
                "moe": MOE,
                "moe_layers": (),
                "norm": Norm.RMS_PLUS_ONE,
                "attention_output_gate": True,
            },
        ),
    ),
    refused=(
        ({"norm_topk_prob": False}, "norm_topk_prob = False: weights of chosen experts"),
        ({"mlp_only_layers": [0]}, "mlp_only_layers = [0]"),
    ),
    published={
        "Qwen3.5-35B-A3B, text": COMMON
        | parse_published("""34_660_610_688 parameters
            "hidden_size": 2048, "linear_num_value_heads": 32, "moe_intermediate_size": 512,
            "num_attention_heads": 16, "num_experts": 256, "num_experts_per_tok": 8,
            "num_hidden_layers": 40, "num_key_value_heads": 2, "output_router_logits": false,
            "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 512
        """),
        "Qwen3.5-397B-A17B, text": COMMON
        | parse_published("""396_346_350_336 parameters
            "hidden_size": 4096, "linear_num_value_heads": 64, "moe_intermediate_size": 1024,
            "num_attention_heads": 32, "num_experts": 512, "num_experts_per_tok": 10,
            "num_hidden_layers": 60, "num_key_value_heads": 2, "output_router_logits": false,
            "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 1024
        """),
    },
)
