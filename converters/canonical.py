"""The table's names for the parameters of a built Megatron-Core model, whatever its layer specs."""

from __future__ import annotations

import re

# Transformer Engine fuses a norm into the linear layer after it, and names its weight there.
_FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_bias": "input_layernorm.bias",
    "self_attention.in_proj.layer_norm_weight": "input_layernorm.weight",
    "mixer.in_proj.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
    "mlp.linear_fc1.layer_norm_bias": "pre_mlp_layernorm.bias",
}
# Its grouped experts hold their parameters side by side.
_GROUPED = re.compile(r"mlp\.experts\.(linear_fc[12])\.(weight|bias)(\d+)")
_EXPERT_NAME = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.+)")
_LAYER_NAME = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_MTP_LAYER_NAME = re.compile(r"mtp_block\.(layers\.\d+\.transformer_layer\.)(.+)")


def canonical_name(name: str, layer_offset: int, expert_offset: int = 0) -> str:
    """The table's name for a built model's parameter; the offsets are the chunk's first layer and
    the rank's first expert of a layer.
    """
    while name.startswith("module."):
        name = name.removeprefix("module.")
    if of_layer := _LAYER_NAME.fullmatch(name):
        number = int(of_layer.group(1)) + layer_offset
        return f"decoder.layers.{number}.{_within_layer(of_layer.group(2), expert_offset)}"
    if of_mtp := _MTP_LAYER_NAME.fullmatch(name):
        return f"mtp.{of_mtp.group(1)}{_within_layer(of_mtp.group(2), expert_offset)}"
    return re.sub(r"^mtp_block\.", "mtp.", name)


def _within_layer(rest: str, expert_offset: int) -> str:
    rest = _GROUPED.sub(r"mlp.experts.local_experts.\3.\1.\2", rest)
    if of_expert := _EXPERT_NAME.fullmatch(rest):
        expert = int(of_expert.group(1)) + expert_offset
        rest = f"mlp.experts.local_experts.{expert}.{of_expert.group(2)}"
    return _FUSED_NORMS.get(rest, rest)
