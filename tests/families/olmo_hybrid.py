from random import Random
from typing import Any

import torch

from megatron_policy.converters.architecture import DeltaNet, Norms
from megatron_policy.converters.architecture.rotary import Rope
from megatron_policy.converters.architecture.traits import QkNorm
from tests.samples import RECURRENT, Fields, Samples, draw_scaling, parse_published

BIASES = {"attention_bias": True}
LINEAR: Fields = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
    "linear_allow_neg_eigval": True,
}
DELTA = DeltaNet(
    num_key_heads=4,
    num_value_heads=8,
    key_head_dim=8,
    value_head_dim=12,
    taps=4,
    doubled=True,
    norm_epsilon=1e-5,
)


def draw(random: Random, sizes: Fields) -> Fields:
    keys = random.choice([2, 4])
    return draw_scaling(random, sizes) | {
        "linear_num_key_heads": keys,
        "linear_num_value_heads": keys * random.choice([1, 2, 3]),
        "linear_key_head_dim": random.choice([6, 8]),
        "linear_value_head_dim": random.choice([6, 12]),
        "linear_conv_kernel_dim": random.choice([2, 4]),
        "linear_allow_neg_eigval": random.random() < 0.5,
    }


def publish(config: Any, tensors: Fields) -> Fields:
    """With the norms of attention by its own names, and convolutions of queries, keys and values
    where each of these ends: transformers cuts all three into thirds.
    """
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    for layer, kind in enumerate(config.layer_types):
        start = f"model.layers.{layer}."
        if kind == "full_attention":
            norm = tensors.pop(start + "feedforward_layer_norm.weight")
            tensors[start + "post_attention_layernorm.weight"] = norm
        else:
            names = [f"{start}linear_attn.{name}_conv1d.weight" for name in "qkv"]
            parts = torch.cat([tensors[name] for name in names]).tensor_split((keys, 2 * keys))
            tensors |= {name: part.clone() for name, part in zip(names, parts, strict=True)}
    return tensors


SAMPLES = Samples(
    architecture="OlmoHybridForCausalLM",
    tiny=LINEAR,
    turns={"layer_types": ("linear_attention", "full_attention")},
    ranges=RECURRENT,
    publish=publish,
    full=BIASES,
    draw=draw,
    variants={
        "olmo_hybrid with biases": BIASES,
        "olmo_hybrid without rotations": {
            "rope_theta": None,
            "linear_allow_neg_eigval": False,
            "tied": True,
        },
    },
    generating=("PP2xVPP2", BIASES),
    context=BIASES,
    without_heads=("regression", "bradley_terry"),
    read=(
        (
            BIASES | LINEAR,
            {
                "mixers": ("DeltaNet", "Attention", "DeltaNet"),
                "delta_net": DELTA,
                "norms": (Norms.BEFORE.value, Norms.AFTER.value, Norms.BEFORE.value),
                "qk_norm": QkNorm.ALL_HEADS,
                "qkv_bias": True,
                "proj_bias": True,
                "rope": Rope(1e4),
            },
        ),
        (
            {"rope_parameters": {"rope_theta": None, "rope_type": "default"}},
            {"rope": None, "qkv_bias": False},
        ),
    ),
    refused=(
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu': delta nets and MLPs have it"),
        ({"clip_qkv": 8.0}, "clip_qkv = 8.0: unknown field"),
        (
            {"layer_types": ["linear_attention", "full_attention", "conv"]},
            "layer_types = 'conv': must be full_attention or linear_attention",
        ),
    ),
    published={
        "Olmo-Hybrid-7B": parse_published("""7_430_870_688 parameters
            "attention_bias": false, "hidden_size": 3840, "intermediate_size": 11008,
            "linear_allow_neg_eigval": true, "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 96, "linear_num_key_heads": 30, "linear_num_value_heads": 30,
            "linear_value_head_dim": 192, "max_position_embeddings": 65536,
            "num_attention_heads": 30, "num_hidden_layers": 32, "num_key_value_heads": 30,
            "rms_norm_eps": 1e-06, "rope_parameters": {"rope_theta": null, "rope_type": "default"},
            "tie_word_embeddings": false, "vocab_size": 100352
        """)
    },
    # 30 heads are over no more than two ranks.
    larger={"hidden_size": 4096}
    | dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 32)
    | dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 32),
)
