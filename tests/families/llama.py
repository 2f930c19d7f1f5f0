from megatron_policy.converters.architecture.rotary import Llama3Scaling, Rope
from megatron_policy.converters.architecture.traits import Activation
from tests.samples import LLAMA3, Samples, parse_published

SAMPLES = Samples(
    architecture="LlamaForCausalLM",
    head_dim=True,
    full={"attention_bias": True, "mlp_bias": True},
    variants={
        "llama with llama 3 rope scaling": {
            "rope_scaling": LLAMA3 | {"factor": 4.0, "original_max_position_embeddings": 64},
            "tied": True,
        },
        "llama": {},
        "llama with biases": {"attention_bias": True, "mlp_bias": True},
        "llama with one head per group": {"groups": 4, "head_dim": 32},
        "llama with biases in attention only": {"attention_bias": True},
        "llama with biases in the mlp only": {"mlp_bias": True},
        "llama with one group": {"groups": 1, "head_dim": 8},
    },
    generating=None,
    read=(
        ({}, {"rope": Rope(1e4), "window": None, "tied": False, "kv_channels": 4}),
        ({"rope_theta": 5e5}, {"rope": Rope(5e5)}),
        (
            {"rope_theta": 5e5, "rope_scaling": LLAMA3},
            {"rope": Rope(5e5, Llama3Scaling(8.0, 1.0, 4.0, 8192))},
        ),
        ({"attention_bias": True}, {"qkv_bias": True, "proj_bias": True}),
        ({"mlp_bias": True}, {"qkv_bias": False, "proj_bias": False, "mlp_bias": True}),
        ({"head_dim": 8}, {"kv_channels": 8}),
        ({"hidden_act": "gelu_new"}, {"activation": Activation.GELU_TANH}),
    ),
    refused=(
        ({"hidden_act": "relu"}, "hidden_act = 'relu': the MLP's activation can be silu, swish, "),
        ({"router_aux_loss_coef": 0.1}, "router_aux_loss_coef = 0.1: unknown field"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised weights"),
    ),
    published={
        "Llama-3.1-8B": parse_published("""8_030_261_248 parameters
            "attention_bias": false, "hidden_size": 4096, "intermediate_size": 14336,
            "max_position_embeddings": 131072, "mlp_bias": false, "num_attention_heads": 32,
            "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1,
            "rms_norm_eps": 1e-05, "rope_scaling": {"rope_type": "llama3", "factor": 8.0,
            "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192}, "rope_theta": 500000.0,
            "tie_word_embeddings": false, "vocab_size": 128256
        """),
        "SmolLM2-135M": parse_published("""134_515_008 parameters
            "attention_bias": false, "hidden_size": 576, "intermediate_size": 1536,
            "is_llama_config": true, "max_position_embeddings": 8192, "num_attention_heads": 9,
            "num_hidden_layers": 30, "num_key_value_heads": 3, "pretraining_tp": 1,
            "rms_norm_eps": 1e-05, "rope_interleaved": false, "rope_scaling": null,
            "rope_theta": 100000, "tie_word_embeddings": true,
            "transformers.js_config": {"dtype": "q4"}, "vocab_size": 49152
        """),
    },
)
