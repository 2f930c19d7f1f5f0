"""Which models need torch modules, as Transformer Engine has none that compute the same."""

from __future__ import annotations

from .architecture import Architecture
from .traits import Activation, Norm, QkNorm


def beyond_transformer_engine(architecture: Architecture) -> list[str]:
    """The model's features that Transformer Engine's modules cannot express: torch modules do."""
    features = {
        "softcapped attention scores": architecture.attention_softcap is not None,
        "attention sinks": architecture.attention_sinks,
        "queries that grow with their position": architecture.query_growth is not None,
        "norms after attention and MLP": architecture.post_norm,
        "layers without norms before attention and MLP": not architecture.pre_norm,
        "parallel attention and MLP": architecture.parallel,
        "factor on the residual sum": architecture.residual_scale != 1.0,
        "layer norm without bias": architecture.norm is Norm.LAYER and not architecture.norm_bias,
        "query and key norms across heads": architecture.qk_norm
        in (QkNorm.ALL_HEADS, QkNorm.EACH_HEAD),
        "activation function with learnt constants": architecture.activation is Activation.XIELU,
        "query and key norms after rotation": architecture.qk_norm is QkNorm.AFTER_ROTATION,
    }
    return [name for name, has in features.items() if has]
