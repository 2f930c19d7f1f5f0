from megatron_policy.converters.architecture.rotary import Rope
from megatron_policy.converters.architecture.traits import QkNorm
from tests.samples import Samples, parse_published, set_all_windows_but_the_last

SAMPLES = Samples(
    architecture="Gemma3ForCausalLM",
    tiny={"query_pre_attn_scalar": 24, "rope_local_base_freq": 500.0},
    head_dim=True,
    layer_types=True,
    windows=set_all_windows_but_the_last,
    ranges={"norm": (-0.5, 0.5)},
    full={"attention_bias": True, "hidden_activation": "gelu"},
    variants={
        "gemma3_text": {
            "head_dim": 32,
            "rope_scaling": {"rope_type": "linear", "factor": 4.0},
            "tied": True,
        }
    },
    generating=("TP2+SP", {"window": 5, "head_dim": 32}),
    context={"head_dim": 32, "tied": True},
    without_heads=("regression",),
    read=(
        (
            {"head_dim": 8, "layer_types": ["full_attention"] * 3},
            {"window": None, "window_rope": None, "rope": Rope(1e6), "qk_norm": QkNorm.PER_HEAD},
        ),
    ),
    refused=(({"attn_logit_softcapping": 5.0}, "attn_logit_softcapping = 5.0"),),
    published={
        "gemma-3-1b-it": parse_published("""999_885_952 parameters
            "attention_bias": false, "attn_logit_softcapping": null,
            "cache_implementation": "hybrid", "eos_token_id": [1, 106],
            "final_logit_softcapping": null, "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152,
            "intermediate_size": 6912, "max_position_embeddings": 32768, "num_attention_heads": 4,
            "num_hidden_layers": 26, "num_key_value_heads": 1, "query_pre_attn_scalar": 256,
            "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000, "rope_scaling": null,
            "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6,
            "vocab_size": 262144
        """)
    },
    larger={
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "sliding_window_pattern": 2,
    },
)
