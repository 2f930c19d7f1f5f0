from megatron_policy.converters.architecture import ShortConvolution
from megatron_policy.converters.architecture.traits import QkNorm
from tests.samples import Samples, parse_published

BIASES = {"conv_bias": True}

SAMPLES = Samples(
    architecture="Lfm2ForCausalLM",
    tiny={"block_auto_adjust_ff_dim": True, "block_multiple_of": 8, "conv_L_cache": 3},
    epsilon="norm_eps",
    turns={"layer_types": ("conv", "full_attention")},
    full=BIASES,
    variants={
        "lfm2 with biases": BIASES,
        "lfm2 with an MLP as wide as it says": {"block_auto_adjust_ff_dim": False, "tied": True},
    },
    generating=("PP2xVPP2", BIASES),
    context=BIASES,
    without_heads=("regression", "bradley_terry"),
    shared=False,
    read=(
        (
            BIASES,
            {
                "mixers": ("ShortConvolution", "Attention", "ShortConvolution"),
                "short_convolution": ShortConvolution(channels=16, taps=3, bias=True),
                "qk_norm": QkNorm.PER_HEAD,
                "ffn_hidden_size": 256,
            },
        ),
        (
            {"conv_L_cache": 4, "block_multiple_of": 8, "block_ffn_dim_multiplier": 1.2},
            {
                "short_convolution": ShortConvolution(channels=16, taps=4),
                "ffn_hidden_size": 24,
            },
        ),
        ({"block_auto_adjust_ff_dim": False}, {"ffn_hidden_size": 24}),
    ),
    refused=(
        (
            {"layer_types": ["conv", "conv", "linear_attention"]},
            "layer_types = 'linear_attention': must be full_attention",
        ),
        ({"block_use_swiglu": False}, "block_use_swiglu = False: the MLP is gated"),
        ({"conv_dim": 48}, "conv_dim = 48: repeats hidden_size"),
    ),
    published={
        "LFM2-1.2B": parse_published("""1_170_340_608 parameters
            "block_auto_adjust_ff_dim": true, "block_dim": 2048, "block_ff_dim": 12288,
            "block_ffn_dim_multiplier": 1.0, "block_mlp_init_scale": 1.0, "block_multiple_of": 256,
            "block_norm_eps": 1e-05, "block_out_init_scale": 1.0, "block_use_swiglu": true,
            "block_use_xavier_init": true, "conv_L_cache": 3, "conv_bias": false, "conv_dim": 2048,
            "conv_dim_out": 2048, "conv_use_xavier_init": true,
            "full_attn_idxs": [2, 5, 8, 10, 12, 14], "hidden_size": 2048,
            "max_position_embeddings": 128000, "norm_eps": 1e-05, "num_attention_heads": 32,
            "num_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8,
            "rope_theta": 1000000.0, "use_pos_enc": true, "vocab_size": 65536
        """)
    },
)
