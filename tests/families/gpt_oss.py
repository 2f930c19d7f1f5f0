from random import Random

from megatron_policy.converters.architecture.traits import Activation, Scoring
from tests.families import mixtral
from tests.families.deepseek_v3 import SCALED
from tests.samples import Fields, Samples, make_moe, parse_published

PUBLISHED = parse_published("""20_914_757_184 parameters
    "attention_bias": true, "experts_per_token": 4, "head_dim": 64, "hidden_size": 2880,
    "initial_context_length": 4096, "intermediate_size": 2880,
    "max_position_embeddings": 131072, "num_attention_heads": 64, "num_experts_per_tok": 4,
    "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32,
    "output_router_logits": false, "rms_norm_eps": 1e-05, "rope_scaling": {
    "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0,
    "original_max_position_embeddings": 4096, "rope_type": "yarn", "truncate": false},
    "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128,
    "swiglu_limit": 7.0, "tie_word_embeddings": false, "vocab_size": 201088
""") | {"layer_types": ["sliding_attention", "full_attention"] * 12}


def draw(random: Random, sizes: Fields) -> Fields:
    plain = {"rope_type": "default"}
    yarn = {k: v for k, v in SCALED.items() if "mscale" not in k} | {"truncate": False}
    return mixtral.draw(random, sizes) | {
        "sliding_window": random.choice([4, 128]),
        "attention_bias": random.random() < 0.7,
        "rope_scaling": random.choice([plain, yarn]),
    }


SAMPLES = Samples(
    architecture="GptOssForCausalLM",
    experts=True,
    tiny={"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6},
    head_dim=True,
    layer_types=True,
    draw=draw,
    context={},
    expert_biases=True,
    trained=("one process", "PP2"),
    read=(
        (
            {"rope_theta": 1e4, "rope_scaling": {"rope_type": "default"}},
            {
                "moe": make_moe(
                    ffn_hidden_size=24,
                    scoring=Scoring.SOFTMAX_OF_CHOSEN,
                    router_bias=True,
                    activation=Activation.CLAMPED_SWIGLU,
                    mlp_bias=True,
                ),
                "activation": Activation.CLAMPED_SWIGLU,
                "attention_sinks": True,
                "mlp_bias": True,
                "window": 6,
                "windowed": (True, False, True),
            },
        ),
    ),
    refused=(
        ({"swiglu_limit": 5.0}, "swiglu_limit = 5.0"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
    ),
    published={
        "gpt-oss-20b in bf16": PUBLISHED,
        "gpt-oss-120b in bf16": PUBLISHED
        | {
            "parameters": 116_829_156_672,
            "layer_types": ["sliding_attention", "full_attention"] * 18,
            "num_hidden_layers": 36,
            "num_local_experts": 128,
        },
    },
)
