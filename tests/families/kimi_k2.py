from random import Random

from tests.families import deepseek_v3
from tests.families.deepseek_v3 import LATENT_FIELDS, SCALED, SIGMOID_FIELDS
from tests.samples import Fields, Samples, parse_published


def draw(random: Random, sizes: Fields) -> Fields:
    # One ramp that is a step, as published.
    scaling = random.choice([None, SCALED | {"beta_fast": 1.0, "beta_slow": 1.0}])
    experts = random.choice([3, 6])
    return deepseek_v3.draw(random, sizes) | {
        "n_group": 1,
        "topk_group": 1,
        "n_routed_experts": experts,
        "num_experts_per_tok": random.randint(1, experts),
        "rope_scaling": scaling,
    }


SAMPLES = Samples(
    architecture="DeepseekV3ForCausalLM",
    hf_model_type="deepseek_v3",
    own={
        "auto_map": {
            "AutoConfig": "configuration_deepseek.DeepseekV3Config",
            "AutoModel": "modeling_deepseek.DeepseekV3Model",
            "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
        }
    },
    experts=True,
    tiny=SIGMOID_FIELDS | LATENT_FIELDS | {"n_group": 1, "topk_group": 1},
    draw=draw,
    trained=(),
    read=(),
    published={
        "Kimi-K2-Instruct in bf16": parse_published("""1_026_408_232_448 parameters
            "attention_bias": false, "aux_loss_alpha": 0.001, "first_k_dense_replace": 1,
            "hidden_size": 7168, "intermediate_size": 18432, "kv_lora_rank": 512,
            "max_position_embeddings": 131072, "moe_intermediate_size": 2048, "moe_layer_freq": 1,
            "n_group": 1, "n_routed_experts": 384, "n_shared_experts": 1, "norm_topk_prob": true,
            "num_attention_heads": 64, "num_experts_per_tok": 8, "num_hidden_layers": 61,
            "num_key_value_heads": 64, "num_nextn_predict_layers": 0, "pretraining_tp": 1,
            "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
            "rms_norm_eps": 1e-06, "rope_scaling": {"beta_fast": 1.0, "beta_slow": 1.0,
            "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096, "type": "yarn"}, "rope_theta": 50000.0,
            "routed_scaling_factor": 2.827, "scoring_func": "sigmoid", "seq_aux": true,
            "tie_word_embeddings": false, "topk_group": 1, "topk_method": "noaux_tc",
            "v_head_dim": 128, "vocab_size": 163840
        """)
    },
)
