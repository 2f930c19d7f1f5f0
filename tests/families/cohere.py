from megatron_policy.converters.architecture.rotary import Rope
from megatron_policy.converters.architecture.traits import QkNorm
from tests.samples import Samples, parse_published

SAMPLES = Samples(
    architecture="CohereForCausalLM",
    tiny={"logit_scale": 0.25},
    epsilon="layer_norm_eps",
    full={"attention_bias": True, "use_qk_norm": True},
    variants={
        "cohere with biases": {"tied": True, "attention_bias": True},
        "cohere with norms of each head": {"use_qk_norm": True, "groups": 4},
    },
    generating=("TP2+SP", {"use_qk_norm": True}),
    context={},
    without_heads=("regression", "bradley_terry"),
    read=(
        (
            {"logit_scale": 0.5, "use_qk_norm": True, "rope_theta": 8e6},
            {
                "logit_scale": 0.5,
                "qk_norm": QkNorm.EACH_HEAD,
                "parallel": True,
                "norm_bias": False,
                "rope": Rope(8e6, interleaved=True),
            },
        ),
    ),
    refused=(({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),),
    published={
        "c4ai-command-r-v01": parse_published("""34_980_831_232 parameters
            "attention_bias": false, "hidden_size": 8192, "intermediate_size": 22528,
            "layer_norm_eps": 1e-05, "logit_scale": 0.0625, "max_position_embeddings": 8192,
            "model_max_length": 131072, "num_attention_heads": 64, "num_hidden_layers": 40,
            "num_key_value_heads": 64, "pretraining_tp": 1, "rope_theta": 8000000.0,
            "use_qk_norm": false, "vocab_size": 256000
        """)
    },
)
