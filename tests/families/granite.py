from tests.samples import Samples, parse_published

FACTORS = {
    "attention_multiplier": 0.3,
    "embedding_multiplier": 3.0,
    "logits_scaling": 2.0,
    "residual_multiplier": 0.6,
}

SAMPLES = Samples(
    architecture="GraniteForCausalLM",
    tiny=FACTORS,
    full={"attention_bias": True, "mlp_bias": True},
    variants={"granite with biases": {"attention_bias": True, "tied": True, "mlp_bias": True}},
    generating=("PP2", {}),
    without_heads=("regression", "bradley_terry"),
    read=(
        (
            {
                "attention_multiplier": 0.5,
                "embedding_multiplier": 12.0,
                "logits_scaling": 8.0,
                "residual_multiplier": 0.25,
            },
            {
                "attention_scale": 0.5,
                "embedding_scale": 12.0,
                "logit_scale": 0.125,
                "residual_scale": 0.25,
            },
        ),
    ),
    refused=(({"num_local_experts": 8}, "num_local_experts = 8: unknown field"),),
    published={
        "granite-3.0-8b-base": parse_published("""8_170_848_256 parameters
            "attention_bias": false, "attention_dropout": 0.1, "attention_multiplier": 0.0078125,
            "embedding_multiplier": 12.0, "hidden_size": 4096, "intermediate_size": 12800,
            "logits_scaling": 16.0, "max_position_embeddings": 4096, "mlp_bias": false,
            "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 8,
            "residual_multiplier": 0.22, "rms_norm_eps": 1e-05, "rope_scaling": null,
            "rope_theta": 10000, "tie_word_embeddings": true, "vocab_size": 49155
        """)
    },
)
