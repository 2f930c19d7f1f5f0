"""What a microbatch tells the routers of a chunk: which experts tokens take, or to record those
that they take.

Megatron-Core's own replay keeps what a router is to do in the router, and what it did in a list for
recomputation. Here both travel with the microbatch, as an argument of its layers: in whatever order
and however often microbatches are computed, a router gets those of the one that it computes.

Shapes: C context-parallel ranks, T positions of one of them, R rows that are computed in parallel,
N = T * R, or this rank's share of it under sequence parallelism; B rows and S positions of the
caller; L layers with experts, of the model or of a chunk, K experts that a token takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from megatron_policy.converters.architecture import Architecture
from megatron_policy.device import to_device
from megatron_policy.packing.microbatch import Microbatch, inside
from megatron_policy.parallel.groups import Groups

Recorded = dict[int, torch.Tensor]
"""The chosen experts `[N, K]` of one microbatch by (global) layer."""


@dataclass(frozen=True)
class RouterParams:
    """What one microbatch tells the routers of one chunk."""

    replayed: Mapping[int, torch.Tensor] = field(default_factory=dict)
    """The experts to take, integers `[N, K]`, by layer; negative where the router chooses."""
    recorded: Recorded | None = None
    """Where routers leave the experts that are taken."""

    def chosen(self, layer: int, own_NK: torch.Tensor) -> torch.Tensor:
        """The experts `[N, K]` that tokens take in `layer`, where its router would choose
        `own_NK`.
        """
        chosen_NK = own_NK
        if layer in self.replayed:
            given_NK = self.replayed[layer].long()
            assert given_NK.shape == own_NK.shape, (given_NK.shape, own_NK.shape)
            chosen_NK = torch.where(given_NK >= 0, given_NK, own_NK)
        if self.recorded is not None:
            self.recorded[layer] = chosen_NK.to(torch.int32)
        return chosen_NK


@dataclass(frozen=True)
class RouterChannel:
    """Brings the experts that tokens take from the caller's rows to this rank's routers, and back.

    `layers` are those with experts of the whole model, whose tokens take `chosen` each. With
    `splits_sequences` each tensor-parallel rank has its share of the positions.
    """

    groups: Groups
    layers: tuple[int, ...]
    chosen: int
    splits_sequences: bool

    @classmethod
    def of(
        cls, groups: Groups, architecture: Architecture, splits_sequences: bool
    ) -> RouterChannel | None:
        """None for a model without experts."""
        if (moe := architecture.moe) is None:
            return None
        return cls(groups, architecture.expert_layers, moe.chosen, splits_sequences)

    def params(
        self, microbatch: Microbatch, held: range, recorded: Recorded | None
    ) -> RouterParams | None:
        """What `microbatch` tells the routers of a chunk that holds the layers `held`; None if that
        is nothing.
        """
        given_BSLK = microbatch.routed_experts_BSLK
        if given_BSLK is None:
            return None if recorded is None else RouterParams(recorded=recorded)
        own = [index for index, layer in enumerate(self.layers) if layer in held]
        cp, tp = self.groups.cp, self.groups.tp
        own_BSLK = given_BSLK.index_select(2, to_device(torch.tensor(own, dtype=torch.long)))
        mine_TRLK = microbatch.layout.take(own_BSLK, cp.rank(), filler=-1)
        if self.splits_sequences:
            mine_TRLK = mine_TRLK.chunk(tp.size())[tp.rank()]
        layers_NK = mine_TRLK.flatten(0, 1).unbind(1)
        layers = [self.layers[index] for index in own]
        return RouterParams(dict(zip(layers, layers_NK, strict=True)), recorded)

    def collect(self, microbatch: Microbatch, recorded: Recorded) -> torch.Tensor:
        """int32 `[B, S, L, K]`: the experts taken in all layers with experts of the model, -1
        beyond `input_lengths`. The same on every rank of a replica, all of which call it with what
        they recorded.
        """
        tokens_BS = microbatch.tokens_BS
        whole_BSLK = torch.full(
            (*tokens_BS.shape, len(self.layers), self.chosen),
            -1,
            dtype=torch.int32,
            device=tokens_BS.device,
        )
        own = [index for index, layer in enumerate(self.layers) if layer in recorded]
        if own:
            mine_NLK = torch.stack([recorded[self.layers[index]] for index in own], dim=1)
            if self.splits_sequences:
                mine_NLK = _gathered(mine_NLK, self.groups.tp).flatten(0, 1)
            layout = microbatch.layout
            all_CNLK = _gathered(mine_NLK, self.groups.cp)
            all_CTRLK = all_CNLK.view(*layout.sources_CTR.shape, *mine_NLK.shape[1:])
            # `put` leaves 0 where there is none, which is an expert, too.
            placed_BSLK = layout.put(all_CTRLK + 1) - 1
            whole_BSLK.index_copy_(2, to_device(torch.tensor(own)), placed_BSLK)
        if self.groups.pp.size() > 1:
            dist.all_reduce(whole_BSLK, op=dist.ReduceOp.MAX, group=self.groups.pp)
        return whole_BSLK.masked_fill(~inside(microbatch.data)[:, :, None, None], -1)


def _gathered(values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Every rank's values, all of the same shape, `[ranks, ...]`."""
    if group.size() == 1:
        return values.unsqueeze(0)
    gathered = values.new_empty(group.size() * values.size(0), *values.shape[1:])
    dist.all_gather_into_tensor(gathered, values.contiguous(), group=group)
    return gathered.view(group.size(), *values.shape)
