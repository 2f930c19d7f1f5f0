from megatron_policy.converters.architecture.traits import Activation, Norm
from tests.samples import Samples, parse_published

SAMPLES = Samples(
    architecture="Gemma2ForCausalLM",
    tiny={
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    head_dim=True,
    layer_types=True,
    windows=lambda layers, window, full_layers: {"sliding_window": window or 7},
    ranges={"norm": (-0.5, 0.5)},
    full={"attention_bias": True, "hidden_activation": "gelu"},
    variants={"gemma2 with biases": {"tied": True, "attention_bias": True}},
    generating=("one process", {"window": 6}),
    context={},
    read=(
        (
            {"head_dim": 8, "query_pre_attn_scalar": 16, "sliding_window": 4},
            {
                "attention_scale": 0.25,
                "embedding_scale": 4.0,
                "attention_softcap": 50.0,
                "logit_softcap": 30.0,
                "window": 4,
                "windowed": (True, False, True),
                "norm": Norm.RMS_PLUS_ONE,
                "post_norm": True,
                "activation": Activation.GELU_TANH,
            },
        ),
    ),
    refused=(
        ({"hidden_activation": "relu"}, "hidden_activation = 'relu'"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
    ),
    published={
        "gemma-2-2b": parse_published("""2_614_341_888 parameters
            "attention_bias": false, "attn_logit_softcapping": 50.0,
            "cache_implementation": "hybrid", "final_logit_softcapping": 30.0, "head_dim": 256,
            "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size": 2304, "intermediate_size": 9216, "max_position_embeddings": 8192,
            "num_attention_heads": 8, "num_hidden_layers": 26, "num_key_value_heads": 4,
            "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_theta": 10000.0,
            "sliding_window": 4096, "vocab_size": 256000
        """)
    },
    larger={
        "hidden_size": 4608,
        "intermediate_size": 36864,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128,
    },
)
