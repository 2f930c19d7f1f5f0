from tests.samples import Samples, parse_published

SAMPLES = Samples(
    architecture="MiMoForCausalLM",
    hf_model_type="qwen2",
    own={
        "attention_bias": True,
        "auto_map": {
            "AutoConfig": "configuration_mimo.MiMoConfig",
            "AutoModelForCausalLM": "modeling_mimo.MiMoForCausalLM",
        },
    },
    layer_types=True,
    full={"num_nextn_predict_layers": 1},
    variants={"mimo": {}},
    generating=None,
    read=(),
    published={
        "MiMo-7B-RL": parse_published("""7_622_619_136 parameters
            "head_dim": 128, "hidden_size": 4096, "intermediate_size": 11008,
            "max_position_embeddings": 32768, "max_window_layers": 32, "num_attention_heads": 32,
            "num_hidden_layers": 36, "num_key_value_heads": 8, "num_nextn_predict_layers": 1,
            "rms_norm_eps": 1e-05, "rope_scaling": null, "rope_theta": 640000,
            "sliding_window": 32768, "tie_word_embeddings": false, "use_sliding_window": false,
            "vocab_size": 151680
        """)
    },
)
