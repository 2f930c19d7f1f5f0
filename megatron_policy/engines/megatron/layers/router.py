"""Chooses experts for tokens exactly as Hugging Face does.

Shapes: T tokens, E experts, K chosen experts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.moe.moe_utils import apply_router_token_dropping
from megatron.core.transformer.moe.router import TopKRouter

from megatron_policy.converters.architecture import Moe, Scoring
from megatron_policy.engines.megatron.layers.balancing import Balancing
from megatron_policy.engines.megatron.layers.replay import RouterParams
from megatron_policy.engines.megatron.layers.sequences import MicrobatchParams


class Router(TopKRouter):
    """Megatron-Core's router with every way to score and choose that `Moe` names.

    Megatron-Core's own renormalizes sigmoid scores always or, for one chosen expert, never, and
    ranks groups by as many experts as it takes from each. Auxiliary losses and counts are those of
    `balancing`, of all choices; Megatron-Core's own stay 0. Tokens beyond the capacity of an expert
    are dropped by Megatron-Core's own rule.
    """

    def __init__(self, moe: Moe, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.moe = moe
        self.params: RouterParams | None = None
        """What the microbatch that its layer computes now tells this router."""
        self.layer: int | None = None
        """The (global) number of its layer, from `tell_routers`."""
        self.balancing = Balancing(moe, self.config, self)

    def routing(
        self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights `[T, E]`, zero for experts that a token does not take, and the mask of taken."""
        assert padding_mask is None, "`ExpertLayer` keeps it"
        params, self.params = self.params, None
        replayed = None
        if params is not None:
            assert self.layer is not None
            replayed = partial(params.chosen, self.layer)
        logits_TE = logits.flatten(0, -2)
        weights_TE, taken_TE = route(logits_TE, self.moe, self.expert_bias, replayed)
        weights_TE = self.balancing(logits_TE, weights_TE, taken_TE)
        config: Any = self.config
        if config.moe_expert_capacity_factor is None:
            return weights_TE, taken_TE
        kept_TE, mask_TE = apply_router_token_dropping(
            weights_TE,
            taken_TE,
            router_topk=self.moe.chosen,
            capacity_factor=config.moe_expert_capacity_factor,
            drop_policy=config.moe_token_drop_policy,
            pad_to_capacity=config.moe_pad_expert_input_to_capacity,
        )
        return kept_TE, mask_TE


def tell_routers(layer: Any, number: int) -> None:
    """Have Megatron-Core's `layer`, the (global) decoder layer `number`, pass on the two parts of
    `MicrobatchParams`: to its router, if it has experts, and to its attention. It is given them at
    every computation, recomputation included.
    """
    router = getattr(layer.mlp, "router", None)
    if router is not None:
        assert not layer.mlp.moe_layer_recompute, "would be recomputed without its layer"
        router.layer = number

    def hand_over(_: Any, args: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        params = given.get("packed_seq_params")
        if not isinstance(params, MicrobatchParams):
            return None
        if router is not None:
            router.params = params.routers
        return args, given | {"packed_seq_params": params.sequences}

    layer.register_forward_pre_hook(hand_over, with_kwargs=True)


def route(
    logits_TE: torch.Tensor,
    moe: Moe,
    correction_E: torch.Tensor | None,
    taken: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights `[T, E]` of each token's chosen experts, in fp32 or wider, and their mask.
    `taken` maps the experts `[T, K]` chosen here to those that tokens take; their weights come from
    the scores in any case.

    Source: DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", for groups and `correction_E`.
    """
    logits_TE = logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))
    if moe.scoring is Scoring.SIGMOID:
        scores_TE = logits_TE.sigmoid()
    elif moe.scoring is Scoring.SOFTMAX:
        scores_TE = logits_TE.softmax(-1)
    else:
        scores_TE = logits_TE
    with torch.no_grad():
        ranked_TE = scores_TE if correction_E is None else scores_TE + correction_E
        chosen_TK = _mask_other_groups(ranked_TE, moe).topk(moe.chosen, dim=-1).indices
        if taken is not None:
            chosen_TK = taken(chosen_TK)
    weights_TK = scores_TE.gather(-1, chosen_TK)
    if moe.scoring is Scoring.SOFTMAX_OF_CHOSEN:
        weights_TK = weights_TK.softmax(-1)
    elif moe.renormalized:
        sum_T1 = weights_TK.sum(-1, keepdim=True).clamp(min=moe.least_sum)
        weights_TK = weights_TK / (sum_T1 + moe.added_to_sum)
    weights_TE = torch.zeros_like(scores_TE).scatter(-1, chosen_TK, weights_TK * moe.scale)
    taken_TE = torch.zeros_like(scores_TE, dtype=torch.bool).scatter(-1, chosen_TK, True)
    return weights_TE, taken_TE


def _mask_other_groups(ranked_TE: torch.Tensor, moe: Moe) -> torch.Tensor:
    """The scores, with minus infinity outside a token's best groups; a group ranks by the sum of
    its two best experts' scores.
    """
    if moe.groups_chosen == moe.groups:
        return ranked_TE
    grouped: torch.Tensor = ranked_TE.unflatten(-1, (moe.groups, -1))
    goodness = grouped.topk(min(2, grouped.size(-1)), dim=-1).values.sum(-1)
    best = goodness.topk(moe.groups_chosen, dim=-1).indices
    outside = torch.ones_like(goodness, dtype=torch.bool).scatter(-1, best, False)
    return grouped.masked_fill(outside.unsqueeze(-1), -torch.inf).flatten(-2)
