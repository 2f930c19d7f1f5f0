from megatron_policy.converters.architecture.rotary import Llama3Scaling, Rope
from megatron_policy.converters.architecture.traits import Activation, QkNorm
from tests.samples import Samples

SAMPLES = Samples(
    architecture="ApertusForCausalLM",
    ranges={"alpha_p": (-1, 1), "alpha_n": (-1, 1), "beta": (0.3, 0.7), "eps": (-0.5, -0.1)},
    full={"hidden_act": "xielu", "attention_bias": True},
    variants={"apertus with biases": {"attention_bias": True}},
    without_heads=("bradley_terry",),
    read=(
        (
            {"attention_bias": True},
            {
                "rope": Rope(12e6, Llama3Scaling(8.0, 1.0, 4.0, 8192)),
                "activation": Activation.XIELU,
                "gated": False,
                "qk_norm": QkNorm.PER_HEAD,
                "qkv_bias": True,
                "proj_bias": True,
                "mlp_bias": False,
            },
        ),
    ),
    refused=(
        ({"hidden_act": "silu"}, "hidden_act = 'silu': the table has rows for the"),
        ({"qk_norm": False}, "qk_norm = False"),
        ({"post_norm": True}, "post_norm = True"),
    ),
    published={},
    larger={
        "hidden_act": "xielu",
        "hidden_size": 4096,
        "intermediate_size": 21504,
        "max_position_embeddings": 65536,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
        "vocab_size": 131072,
    },
)
