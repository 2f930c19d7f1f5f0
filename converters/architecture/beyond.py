"""What Transformer Engine's modules cannot build."""

from __future__ import annotations

from .architecture import Architecture
from .attention import Attention
from .channel_delta_net import ChannelDeltaNet
from .delta_net import DeltaNet
from .layer import Norms
from .mamba2 import Mamba2
from .mlp import Mlp
from .short_convolution import ShortConvolution
from .traits import Activation, Norm, QkNorm


def beyond_transformer_engine(architecture: Architecture, adapted: bool = False) -> list[str]:
    """The model's features that Transformer Engine's modules cannot express: torch modules do. A
    model is `adapted` if it has adapters: the engine's layers apply a norm to what these would
    read, and its experts are one module.
    """
    norms = {layer.norms for layer in set(architecture.layers)}
    attention, mlp = architecture.find_part(Attention), architecture.find_part(Mlp)
    qk_norm = QkNorm.NONE if attention is None else attention.qk_norm
    features = {
        "softcapped attention scores": attention and attention.attention_softcap is not None,
        "attention sinks": attention and attention.attention_sinks,
        "queries that grow with their position": attention and attention.query_growth is not None,
        "norms after attention and MLP": any(each.after for each in norms),
        "layers without norms before attention and MLP": Norms.AFTER in norms,
        "parallel attention and MLP": Norms.ONE in norms,
        "factor on the residual sum": architecture.residual_scale != 1.0,
        "layer norm without bias": architecture.norm is Norm.LAYER and not architecture.norm_bias,
        "query and key norms across heads": qk_norm in (QkNorm.ALL_HEADS, QkNorm.EACH_HEAD),
        "activation function with learnt constants": mlp and mlp.activation is Activation.XIELU,
        "query and key norms after rotation": qk_norm is QkNorm.AFTER_ROTATION,
        "gated delta nets": architecture.find_part(DeltaNet),
        "Kimi's delta attention": architecture.find_part(ChannelDeltaNet),
        "Mamba2": architecture.find_part(Mamba2),
        "mixers side by side": any(each.beside for each in set(architecture.layers)),
        "factors within MLPs": mlp and (mlp.gate_factor, mlp.out_factor) != (1.0, 1.0),
        "gated short convolutions": architecture.find_part(ShortConvolution),
        "gated attention": attention and attention.attention_output_gate,
        "a mixer or a feed alone": architecture.has_single_parts,
        "squares of ReLU": architecture.feed.activation is Activation.SQUARED_RELU,
        "adapters": adapted,
    }
    return [name for name, has in features.items() if has]
