"""Specs and config fields of Megatron-Core's mixtures of experts.

Experts are Megatron-Core's `SequentialMLP` or, with Transformer Engine, its grouped kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.tensor_parallel.layers import RowParallelLinear

from megatron_policy.config import MegatronConfig
from megatron_policy.converters.architecture import Architecture
from megatron_policy.converters.architecture.traits import Scoring
from megatron_policy.engines.megatron.layers.router import Router


def expert_fields(
    architecture: Architecture, settings: MegatronConfig, with_te: bool
) -> dict[str, Any]:
    """Fields of Megatron-Core's config: which layers have experts, and which experts."""
    moe = architecture.moe
    if moe is None:
        return {}
    sigmoid = moe.scoring is Scoring.SIGMOID
    return {
        "num_moe_experts": moe.experts,
        "moe_ffn_hidden_size": moe.ffn_hidden_size,
        "moe_layer_freq": [int(x) for x in architecture.moe_layers] or 1,
        "moe_shared_expert_intermediate_size": moe.shared_ffn_hidden_size or None,
        "moe_shared_expert_gate": moe.shared_gate,
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": with_te,
        "moe_router_topk": moe.chosen,
        # `Router` computes the scores itself; these two are only set as such scores require.
        "moe_router_score_function": "sigmoid" if sigmoid else "softmax",
        "moe_router_pre_softmax": not sigmoid,
        # Hugging Face computes sigmoid routers in fp32, the others in the model's precision.
        "moe_router_dtype": settings.moe_router_dtype or ("fp32" if sigmoid else None),
        "moe_router_enable_expert_bias": moe.correction_bias,
        "moe_router_bias_update_rate": 0.0,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
    }


def experts_spec(architecture: Architecture, with_te: bool) -> Any:
    """The spec Megatron-Core builds a layer's mixture of experts from."""
    moe = architecture.moe
    assert moe is not None
    spec: Any = get_moe_module_spec(
        use_te=with_te, num_experts=moe.experts, moe_grouped_gemm=with_te
    )
    submodules = _parts(spec)
    submodules.router = functools.partial(Router, moe)
    if architecture.mlp_bias and not with_te:
        _parts(submodules.experts).linear_fc2 = ExpertOutput
    return spec


class ExpertOutput(RowParallelLinear):
    """An expert's output, to which Megatron-Core adds a bias in place.

    That is forbidden on the result of a sum over tensor-parallel ranks, even over a single one. The
    sum is therefore left out, as for all experts that are split over ranks.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.explicit_expert_comm = True


def _parts(spec: Any) -> Any:
    """The submodules of a spec; newer releases bind a class's arguments instead."""
    return spec.keywords["submodules"] if isinstance(spec, functools.partial) else spec.submodules


def freeze_routers(chunks: Iterable[torch.nn.Module]) -> None:
    """Freeze the routers' parameters while everything else is trained."""
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, Router):
                module.requires_grad_(False)


def forget_routing(chunks: Iterable[torch.nn.Module]) -> None:
    """Drop what token dispatchers keep of the last batch.

    Its graph holds the gradient hooks, and through them the whole model with its process groups, in
    a cycle that Python's collector cannot see.
    """
    for chunk in chunks:
        for module in chunk.modules():
            kept = vars(getattr(module, "token_dispatcher", module))
            for name, value in kept.items():
                if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                    kept[name] = None
