from megatron_policy.converters.architecture.traits import Norm
from tests.families.qwen3_5 import publish, see
from tests.families.qwen3_5_moe_text import draw
from tests.families.qwen3_next import DELTA, EXPERTS, LINEAR, MOE, RANGES, TURNS
from tests.samples import Samples

SAMPLES = Samples(
    architecture="Qwen3_5MoeForConditionalGeneration",
    surround=see,
    experts=True,
    tiny=LINEAR | EXPERTS,
    head_dim=True,
    turns=TURNS,
    ranges=RANGES,
    full={"attention_bias": True, "mtp_num_hidden_layers": 1},
    draw=draw,
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
    refused=(({"text_only": True}, "text_only = True: unknown field"),),
    published={
        "Qwen3.5-35B-A3B": publish("""35_107_181_936 parameters
            "hidden_size": 2048, "linear_num_value_heads": 32, "moe_intermediate_size": 512,
            "num_attention_heads": 16, "num_experts": 256, "num_experts_per_tok": 8,
            "num_hidden_layers": 40, "num_key_value_heads": 2, "output_router_logits": false,
            "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 512
        """),
        "Qwen3.5-397B-A17B": publish("""396_802_360_816 parameters
            "hidden_size": 4096, "linear_num_value_heads": 64, "moe_intermediate_size": 1024,
            "num_attention_heads": 32, "num_experts": 512, "num_experts_per_tok": 10,
            "num_hidden_layers": 60, "num_key_value_heads": 2, "output_router_logits": false,
            "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 1024
        """),
    },
)
