"""Specs and config fields of Megatron-Core's mixtures of experts.

Experts are `GroupedExperts` or, with Transformer Engine, its grouped kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

import torch
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.transformer.moe import fused_a2a, moe_utils
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_policy.config import MegatronConfig
from megatron_policy.converters.architecture import Architecture, Moe, Scoring
from megatron_policy.device import is_accelerated
from megatron_policy.engines.megatron.layers.grouped_experts import GroupedExperts
from megatron_policy.engines.megatron.layers.norm import WholeLinear
from megatron_policy.engines.megatron.layers.router import Router
from megatron_policy.errors import ConfigError
from megatron_policy.parallel.topology import Topology

ALL_TO_ALL, ALL_GATHER, FLEX = "alltoall", "allgather", "flex"
DEEP_EP, HYBRID_EP = "deepep", "hybridep"
_FLEX_INSTALLED = {
    DEEP_EP: getattr(fused_a2a, "HAVE_DEEP_EP", False),
    HYBRID_EP: getattr(fused_a2a, "HAVE_HYBRIDEP", False),
}
_PAD = "moe_hybridep_pad_uneven_dispatch_inputs"
_CAN_PAD = _PAD in {field.name for field in fields(TransformerConfig)}
"""Whether this Megatron-Core can pad what ranks send by HybridEP, which takes the same number of
tokens from each and does not compare them.
"""


def expert_fields(
    architecture: Architecture,
    settings: MegatronConfig,
    topology: Topology,
    with_te: bool,
    variable_lengths: bool,
) -> dict[str, Any]:
    """Fields of Megatron-Core's config: which layers have experts, which experts, and how tokens
    get to them. With `variable_lengths` stages exchange microbatches of different lengths.
    """
    moe = architecture.moe
    if moe is None:
        # With variable lengths, Megatron-Core demands this even of models without experts.
        return {"moe_token_dispatcher_type": ALL_TO_ALL}
    dispatcher = dispatcher_of(settings, topology, variable_lengths)
    corrected = moe.correction_bias or moe.scoring is Scoring.SIGMOID
    capacity: dict[str, Any] = {}
    if settings.moe_expert_capacity_factor is not None:
        capacity = {
            "moe_expert_capacity_factor": settings.moe_expert_capacity_factor,
            "moe_pad_expert_input_to_capacity": settings.moe_pad_expert_input_to_capacity,
            "moe_token_drop_policy": settings.moe_token_drop_policy,
        }
    return {
        "num_moe_experts": moe.experts,
        "moe_ffn_hidden_size": moe.ffn_hidden_size,
        "moe_layer_freq": 1
        if architecture.uniform_layers
        else [int(isinstance(layer.feed, Moe)) for layer in architecture.layers],
        "moe_shared_expert_intermediate_size": moe.shared_ffn_hidden_size or None,
        "moe_shared_expert_gate": moe.shared_gate,
        "moe_token_dispatcher_type": dispatcher,
        "moe_flex_dispatcher_backend": settings.moe_flex_dispatcher_backend or DEEP_EP,
        "moe_permute_fusion": settings.moe_permute_fusion and with_te and _has_fused_permutation(),
        "moe_shared_expert_overlap": settings.moe_shared_expert_overlap
        and bool(moe.shared_ffn_hidden_size)
        and not moe.latent_size
        and dispatcher == ALL_TO_ALL
        and is_accelerated(),
        "moe_grouped_gemm": with_te,
        "moe_router_topk": moe.chosen,
        # `Router` computes the scores itself; these two are only set such that Megatron-Core takes
        # the other fields. It makes correction biases for sigmoid scores alone.
        "moe_router_score_function": "sigmoid" if corrected else "softmax",
        "moe_router_pre_softmax": not corrected,
        # Hugging Face computes routers with sigmoid scores or correction biases in fp32, the others
        # in the model's precision.
        "moe_router_dtype": settings.moe_router_dtype or ("fp32" if corrected else None),
        "moe_router_enable_expert_bias": moe.correction_bias,
        # `Routers` updates the bias, once it is known that the step is taken.
        "moe_router_bias_update_rate": 0.0,
        "moe_router_load_balancing_type": settings.moe_router_load_balancing_type or "none",
        "moe_aux_loss_coeff": balancing_coefficient(settings, moe),
        "moe_z_loss_coeff": settings.moe_z_loss_coeff,
        **({_PAD: topology.joins_replicas} if _CAN_PAD else {}),
        **capacity,
    }


def balancing_coefficient(settings: MegatronConfig, moe: Moe) -> float:
    """Of the load balancing loss: as given, or the model's own; 0 without this loss."""
    if settings.moe_router_load_balancing_type in (None, "none"):
        return 0.0
    given = settings.moe_aux_loss_coeff
    return (moe.aux_loss_coeff if given is None else given) or 0.0


def dispatcher_of(settings: MegatronConfig, topology: Topology, variable_lengths: bool) -> str:
    """The dispatcher that sends tokens to experts: the one asked for, or `alltoall`, with the same
    results, where that one cannot work. ConfigError if its kernels are not installed.

    `allgather` needs the same number of tokens on all ranks that share experts, and the same length
    of all microbatches; `flex` needs at least two ranks that share experts, and with HybridEP the
    same number of tokens on all of them, which Megatron-Core has from 0.19 on by padding.
    """
    asked = settings.moe_token_dispatcher_type or ALL_TO_ALL
    if asked == ALL_GATHER and (topology.joins_replicas or (variable_lengths and topology.pp > 1)):
        return ALL_TO_ALL
    if asked != FLEX or topology.ep * topology.expert_tp == 1:
        return ALL_TO_ALL if asked == FLEX else asked
    backend = settings.moe_flex_dispatcher_backend or DEEP_EP
    if not _FLEX_INSTALLED[backend]:
        raise ConfigError(
            "policy.megatron_cfg.moe_token_dispatcher_type is 'flex', whose "
            f"moe_flex_dispatcher_backend '{backend}' needs the package deep_ep with that backend, "
            "which is not installed: install it, or use 'alltoall', whose results are the same"
        )
    uneven = backend == HYBRID_EP and topology.joins_replicas
    return ALL_TO_ALL if uneven and not _CAN_PAD else asked


def _has_fused_permutation() -> bool:
    """Whether Transformer Engine's fused kernels, all that Megatron-Core asks for, are there."""
    kernels = ("permute", "unpermute", "sort_chunks_by_index")
    names = (*kernels, *(f"{name}_with_probs" for name in kernels if name != "unpermute"))
    return all(getattr(moe_utils, f"fused_{name}", None) is not None for name in names)


def experts_spec(moe: Moe, with_te: bool) -> Any:
    """The spec Megatron-Core builds a layer's mixture of experts from."""
    spec: Any = get_moe_module_spec(
        use_te=with_te, num_experts=moe.experts, moe_grouped_gemm=with_te
    )
    submodules = _parts(spec)
    submodules.router = functools.partial(Router, moe)
    width = {"latent_size": moe.latent_size} if moe.latent_size else {}
    if not with_te:
        submodules.experts = _of_class(GroupedExperts, submodules.experts, **width)
        if moe.mlp_bias:
            _parts(submodules.experts).linear_fc2 = ExpertOutput
    return _of_class(LatentExpertLayer if width else ExpertLayer, spec, **width)


class ExpertLayer(MoELayer):
    """Megatron-Core's layer, whose padding mask holds the row numbers of its positions instead."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        intermediate_tensors: Any = None,
        padding_mask: torch.Tensor | None = None,
    ) -> Any:
        """`hidden_states` `[T, R, D]`; `padding_mask` int64 `[R, T]`, see `RoutedRows`.

        Under sequence parallelism this rank's part of the mask is taken here.
        """
        numbers_TR = None if padding_mask is None else padding_mask.T
        if numbers_TR is not None and numbers_TR.size(0) != hidden_states.size(0):
            group = self.attn_tp_group
            numbers_TR = numbers_TR.chunk(group.size())[group.rank()]
        balancing = self.router.balancing
        balancing.numbers_T = None if numbers_TR is None else numbers_TR.flatten()
        return super().forward(hidden_states, intermediate_tensors)


class LatentExpertLayer(ExpertLayer):
    """Routed experts read and give vectors of `latent_size`, projected from and to the model's
    width; the shared MLP and the router read the model's own. Megatron-Core's projections for that
    need Transformer Engine, so its config leaves the size out.

    Source: NVIDIA 2025, "Nemotron 3".
    """

    def __init__(self, config: TransformerConfig, *args: Any, latent_size: int, **given: Any):
        super().__init__(config, *args, **given)
        self.fc1_latent_proj = WholeLinear(config, config.hidden_size, latent_size)
        self.fc2_latent_proj = WholeLinear(config, latent_size, config.hidden_size)

    def preprocess(self, hidden_states: torch.Tensor, *routing: torch.Tensor) -> Any:
        """What is sent to experts: latent vectors."""
        return super().preprocess(self.fc1_latent_proj(hidden_states)[0], *routing)

    def postprocess(self, output: torch.Tensor, shared_expert_output: torch.Tensor | None) -> Any:
        """The sum of what the routed experts gave, projected back, and the shared MLP's output."""
        whole, _ = self.fc2_latent_proj(super().postprocess(output, None))
        return whole if shared_expert_output is None else whole + shared_expert_output


class ExpertOutput(RowParallelLinear):
    """An expert's output, to which Megatron-Core adds a bias in place.

    That is forbidden on the result of a sum over tensor-parallel ranks, even over a single one. The
    sum is therefore left out, as for all experts that are split over ranks.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.explicit_expert_comm = True


def _of_class(cls: type, spec: Any, **given: Any) -> Any:
    """The spec with another class, which is `given` more; newer releases bind a class's arguments
    instead.
    """
    if isinstance(spec, functools.partial):
        return functools.partial(cls, *spec.args, **spec.keywords, **given)
    spec.module, spec.params = cls, {**spec.params, **given}
    return spec


def _parts(spec: Any) -> Any:
    """The submodules of a spec of either kind."""
    return spec.keywords["submodules"] if isinstance(spec, functools.partial) else spec.submodules


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
