"""Which layers a model is made of: what Transformer Engine cannot express is said by name."""

from __future__ import annotations

import pytest
import torch

from megatron_policy.config import MegatronConfig
from megatron_policy.converters.architecture import Norms
from megatron_policy.converters.architecture.traits import Activation, Norm, QkNorm, QueryGrowth
from megatron_policy.engines.megatron.layer_spec import resolve_implementation
from megatron_policy.engines.megatron.model_config import (
    LOCAL,
    TRANSFORMER_ENGINE,
    transformer_config,
)
from megatron_policy.errors import ConfigError
from megatron_policy.parallel.topology import Topology
from tests.pure.test_rows import model


def test_what_transformer_engine_cannot_express_is_refused_by_name() -> None:
    for traits, said in (
        ({"attention_softcap": 50.0}, "softcapped attention scores"),
        ({"query_growth": QueryGrowth(0.1, 64)}, "queries that grow with their position"),
        ({"activation": Activation.XIELU}, "activation function with learnt constants"),
        ({"attention_sinks": True}, "attention sinks"),
        ({"norms": Norms.AROUND}, "norms after attention and MLP"),
        (
            {"norms": Norms.AFTER},
            "norms after attention and MLP, layers without norms before attention and MLP",
        ),
        ({"norms": Norms.ONE}, "parallel attention and MLP"),
        ({"residual_scale": 0.5}, "factor on the residual sum"),
        ({"norm": Norm.LAYER}, "layer norm without bias"),
        ({"qk_norm": QkNorm.ALL_HEADS}, "query and key norms across heads"),
        ({"qk_norm": QkNorm.EACH_HEAD}, "query and key norms across heads"),
        ({"qk_norm": QkNorm.AFTER_ROTATION}, "query and key norms after rotation"),
    ):
        with pytest.raises(ConfigError, match=f"cannot express this model's {said}; use 'auto' or"):
            resolve_implementation("transformer_engine", model(**traits))
        for wish in ("auto", "local"):
            assert resolve_implementation(wish, model(**traits)) == "local"


@pytest.mark.parametrize(("pp", "variable"), [(1, False), (1, True), (2, False), (2, True)])
def test_stages_exchange_shapes_where_lengths_vary(pp: int, variable: bool) -> None:
    """Megatron-Core refuses it with its default way of dispatching tokens to experts, also of a
    model without experts.
    """
    described = transformer_config(
        model(), MegatronConfig(), Topology(pp=pp, cp=2), torch.float32, LOCAL, variable
    )
    assert described.variable_seq_lengths == (variable and pp > 1)
    assert described.moe_token_dispatcher_type == "alltoall"
    assert described.context_parallel_size == 2


def test_no_layer_overwrites_or_drops_weight_gradients() -> None:
    """The flag for all linear layers drops those of weights with two readers, and Transformer
    Engine overwrites them in the first microbatch of each run of the schedule unless it keeps no
    transposed weights.
    """
    for layers in (LOCAL, TRANSFORMER_ENGINE):
        described = transformer_config(
            model(), MegatronConfig(), Topology(), torch.bfloat16, layers
        )
        assert not described.gradient_accumulation_fusion
        assert described.disable_parameter_transpose_cache == (layers == TRANSFORMER_ENGINE)
