from tests.samples import Samples, parse_published, set_window

SAMPLES = Samples(
    architecture="Starcoder2ForCausalLM",
    epsilon="norm_epsilon",
    windows=set_window,
    full={"use_bias": True},
    variants={
        "starcoder2": {"window": 9, "tied": True},
        "starcoder2 without biases": {"use_bias": False},
    },
    generating=("one process", {"tied": True}),
    read=(
        (
            {"residual_dropout": 0.1, "embedding_dropout": 0.2, "use_bias": False},
            {
                "hidden_dropout": 0.1,
                "embedding_dropout": 0.2,
                "gated": False,
                "norm_bias": True,
                "mlp_bias": False,
            },
        ),
    ),
    published={
        "starcoder2-3b": parse_published("""3_030_371_328 parameters
            "attention_dropout": 0.1, "embedding_dropout": 0.1, "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": 3072, "intermediate_size": 12288, "max_position_embeddings": 16384,
            "mlp_type": "default", "norm_epsilon": 1e-05, "norm_type": "layer_norm",
            "num_attention_heads": 24, "num_hidden_layers": 30, "num_key_value_heads": 2,
            "residual_dropout": 0.1, "rope_theta": 999999.4420358813, "sliding_window": 4096,
            "use_bias": true, "vocab_size": 49152
        """)
    },
)
