"""The package broken in one place each, to show that the comparison of the table would see it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from megatron_policy.attention import context_parallel
from megatron_policy.batch import BatchedDataDict
from megatron_policy.converters.rows.blocks import of_expert
from megatron_policy.engines.hugging_face import engine as hugging_face
from megatron_policy.engines.hugging_face import optimizer
from megatron_policy.engines.hugging_face.fsdp1 import Fsdp1
from megatron_policy.engines.hugging_face.table import Cut
from megatron_policy.engines.megatron import assemble, trainable
from megatron_policy.lm_head.output import Output
from megatron_policy.packing import tokens
from megatron_policy.packing.tokens import CausalRectangle, TokenLayout
from megatron_policy.parallel.topology import Copy, Placement
from megatron_policy.training import batching, losses, step
from megatron_policy.weights.load import Held
from tests.invariance.cases import Cell
from tests.invariance.measure import run_cell


@dataclass(frozen=True)
class Mutation:
    """What is broken, in which cell, which quantities must tell, and which must not."""

    cell: Cell
    apply: Callable[[pytest.MonkeyPatch], None]
    breaks: tuple[str, ...]
    keeps: tuple[str, ...] = ()


def run_broken(name: str, config: Mapping[str, Any], data: BatchedDataDict) -> dict[str, Any]:
    """`run_cell` of a mutation's cell on a rank whose package is broken meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        MUTATIONS[name].apply(patch)
        return run_cell(MUTATIONS[name].cell, config, data)


def _one_piece(patch: pytest.MonkeyPatch) -> None:
    def whole(self: TokenLayout, rank: int) -> tuple[CausalRectangle, ...]:
        return (CausalRectangle(0, self.full_length, 0, self.full_length),)

    patch.setattr(TokenLayout, "pieces", whole)


def _neighbours(patch: pytest.MonkeyPatch) -> None:
    layout = tokens._layout

    def contiguous(*args: Any) -> TokenLayout:
        made = layout(*args)
        return replace(made, positions_CT=torch.arange(made.full_length).view_as(made.positions_CT))

    patch.setattr(tokens, "_layout", contiguous)


def _own_gradient(patch: pytest.MonkeyPatch) -> None:
    def own(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        by_rank = torch.empty_like(grad)
        by_rank[ctx.saved_tensors[0]] = grad
        return by_rank.chunk(ctx.group.size())[ctx.group.rank()].clone(), None, None

    patch.setattr(context_parallel._Gather, "backward", staticmethod(own))


def _mask_of_all_but_the_first(patch: pytest.MonkeyPatch) -> None:
    counted = losses.counted

    def fewer(data: BatchedDataDict) -> torch.Tensor:
        mask_BS = counted(data)
        mask_BS[:1] = False
        return mask_BS

    patch.setattr(losses, "counted", fewer)


def _counts_of_one_replica(patch: pytest.MonkeyPatch) -> None:
    counted = step.count_valid

    def own(batch: BatchedDataDict, group: Any) -> Any:
        alone = torch.distributed.new_group(
            [torch.distributed.get_rank()], use_local_synchronization=True
        )
        return counted(batch, alone)

    patch.setattr(step, "count_valid", own)


def _repetitions_for_fillers(patch: pytest.MonkeyPatch) -> None:
    for_training = batching.Batcher.for_training

    def repeated(batch: batching.GlobalBatch) -> batching.GlobalBatch:
        real = [microbatch for microbatch in batch.microbatches if not microbatch.filler]
        again = [real[-1]] * (len(batch.microbatches) - len(real))
        return replace(batch, microbatches=[*real, *again])

    def cut(self: batching.Batcher, *args: Any) -> list[batching.GlobalBatch]:
        return [repeated(batch) for batch in for_training(self, *args)]

    patch.setattr(batching.Batcher, "for_training", cut)


def _gradient_of_fillers(patch: pytest.MonkeyPatch) -> None:
    nothing = Output.nothing

    def something(self: Output) -> torch.Tensor:
        return nothing(self) + 0.1 * self.hidden_TRD[..., 0].sum()

    patch.setattr(Output, "nothing", something)


def _results_in_the_order_of_the_plan(patch: pytest.MonkeyPatch) -> None:
    for_scoring = batching.Batcher.for_scoring

    def in_order(
        self: batching.Batcher, data: BatchedDataDict, at_once: int
    ) -> batching.ScoringBatches:
        read = for_scoring(self, data, at_once)
        order = iter(range(data.size))
        return replace(read, rows=[list(islice(order, len(rows))) for rows in read.rows])

    patch.setattr(batching.Batcher, "for_scoring", in_order)


def _entropy_without_gradient(patch: pytest.MonkeyPatch) -> None:
    scores = Output.next_token_scores

    def detached(self: Output, *args: Any, **kwargs: Any) -> Any:
        logprobs, entropy = scores(self, *args, **kwargs)
        return logprobs, None if entropy is None else entropy.detach()

    patch.setattr(Output, "next_token_scores", detached)


def _no_gradient_of_an_expert(patch: pytest.MonkeyPatch) -> None:
    separated = trainable.separate_experts

    def dropped(held: Held, place: Placement) -> None:
        separated(held, place)
        for entry, parameter in held:
            if (entry.layer, entry.expert) == (2, 1):
                parameter.register_hook(torch.zeros_like)

    patch.setattr(trainable, "separate_experts", dropped)


def _experts_not_apart(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(trainable, "separate_experts", lambda held, place: None)


def _experts_among_all_else(patch: pytest.MonkeyPatch) -> None:
    def together(held: Held, place: Placement) -> None:
        for entry, parameter in held:
            if of_expert(entry.row.megatron):
                parameter.allreduce = True  # type: ignore[attr-defined]

    patch.setattr(trainable, "separate_experts", together)


def _experts_swapped(patch: pytest.MonkeyPatch) -> None:
    load = assemble.load_parameters

    def swapped(held: Held, *args: Any) -> None:
        load(held, *args)
        named = {entry.megatron: parameter for entry, parameter in held}
        for entry, parameter in held:
            if entry.expert == 0:
                other = named[entry.megatron.replace("local_experts.0", "local_experts.1")].data
                kept = other.clone()
                other.copy_(parameter.data)
                parameter.data.copy_(kept)

    patch.setattr(assemble, "load_parameters", swapped)


def _copies_of_experts(patch: pytest.MonkeyPatch, copy: Callable[[Placement], Copy]) -> None:
    of_all_else = Placement.copy_of

    def copy_of(self: Placement, row: Any) -> Copy:
        return copy(self) if of_expert(row.megatron) else of_all_else(self, row)

    patch.setattr(Placement, "copy_of", copy_of)


def _every_copy_of_an_expert_counts(patch: pytest.MonkeyPatch) -> None:
    _copies_of_experts(patch, lambda place: Copy(0, place.topology.edp))


def _experts_of_the_first_replica_count(patch: pytest.MonkeyPatch) -> None:
    _copies_of_experts(patch, lambda place: Copy(place.coords.dp, place.topology.dp))


def _rows_of_fsdp2_are_single_sequences(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(hugging_face, "sequences_in", lambda layout, cp: None)


def _fsdp2_averages_gradients(patch: pytest.MonkeyPatch) -> None:
    divided = FSDPModule.set_gradient_divide_factor
    patch.setattr(FSDPModule, "set_gradient_divide_factor", lambda module, _: divided(module, 2.0))


def _parts_of_gradients_are_not_summed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(optimizer, "sum_partial", lambda trained, group: None)


def _every_copy_counts_in_the_norm(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Cut, "is_first", lambda cut, rank: True)


def _fsdp1_reduces_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Fsdp1, "adding_gradients", lambda sharding, wanted: nullcontext())


READ = ("logprobs before", "logprobs after", "reference", "entropy", "top-k")
TRAINED = ("loss", "metrics", "grad norm", "weights")
UNTRAINED = ("logprobs before", "reference", "entropy", "top-k")
LEARNED = ("grad norm", "weights", "logprobs after")
MUTATIONS = {
    "packed sequences see those before them": Mutation(
        Cell("one process", "packed", "token", "qwen2"), _one_piece, (*READ, *TRAINED)
    ),
    "a context-parallel rank takes its positions for neighbours": Mutation(
        Cell("CP2", "padded", "token", "qwen3"), _neighbours, (*READ, *TRAINED)
    ),
    "keys of other context-parallel ranks get no gradient": Mutation(
        Cell("CP2", "packed", "policy gradient", "qwen2"), _own_gradient, LEARNED, UNTRAINED
    ),
    "the first sequence of a microbatch is left out of the loss": Mutation(
        Cell("one process", "packed", "policy gradient", "qwen3"),
        _mask_of_all_but_the_first,
        ("loss", "grad norm", "weights"),
        UNTRAINED,
    ),
    "replicas divide by their own counts": Mutation(
        Cell("DP2", "dynamic", "sequence", "qwen2"),
        _counts_of_one_replica,
        ("loss", "grad norm", "weights"),
        UNTRAINED,
    ),
    "a filler repeats what was computed already": Mutation(
        Cell("PP2xVPP2", "dynamic", "token", "qwen3", 1),
        _repetitions_for_fillers,
        # Gradients are clipped: twice as large, they make the same weights.
        ("loss", "metrics", "grad norm"),
        UNTRAINED,
    ),
    "a filler leaves a gradient": Mutation(
        Cell("PP2xVPP2", "packed", "policy gradient", "qwen2", 1),
        _gradient_of_fillers,
        LEARNED,
        UNTRAINED,
    ),
    "results are placed in the order of the plan": Mutation(
        Cell("one process", "dynamic", "sequence", "qwen2"),
        _results_in_the_order_of_the_plan,
        READ,
        TRAINED,
    ),
    "the entropy has no gradient": Mutation(
        Cell("TP2", "packed", "policy gradient", "qwen3"),
        _entropy_without_gradient,
        LEARNED,
        UNTRAINED,
    ),
    "an expert's gradient is dropped": Mutation(
        Cell("EP2", "padded", "sequence", "qwen3_moe"),
        _no_gradient_of_an_expert,
        LEARNED,
        UNTRAINED,
    ),
    "gradients of experts are not reduced over the ranks that hold the same": Mutation(
        Cell("TP2+SP, experts whole", "dynamic", "token", "gpt_oss"),
        _experts_not_apart,
        LEARNED,
        UNTRAINED,
    ),
    "gradients of experts are reduced over ranks that hold others": Mutation(
        Cell("EP2", "padded", "sequence", "qwen3_moe"), _experts_among_all_else, LEARNED, UNTRAINED
    ),
    "a filler leaves a gradient in experts": Mutation(
        Cell("EP4", "dynamic", "sequence", "qwen3_moe", 3), _gradient_of_fillers, LEARNED, UNTRAINED
    ),
    "two experts are swapped on loading": Mutation(
        Cell("EP2xTP2+SP", "padded", "sequence", "mixtral"), _experts_swapped, (*READ, *TRAINED)
    ),
    "the norm counts every copy of an expert": Mutation(
        Cell("TP2+SP, experts whole", "dynamic", "token", "gpt_oss"),
        _every_copy_of_an_expert_counts,
        LEARNED,
        UNTRAINED,
    ),
    "the norm counts experts of one replica only": Mutation(
        Cell("EP2", "padded", "sequence", "qwen3_moe"),
        _experts_of_the_first_replica_count,
        LEARNED,
        UNTRAINED,
    ),
    "attention under FSDP2 is not told of packed sequences": Mutation(
        Cell("FSDP2 x 2", "packed", "token", "qwen2"),
        _rows_of_fsdp2_are_single_sequences,
        (*READ, *TRAINED),
    ),
    "FSDP2 averages gradients over ranks": Mutation(
        Cell("FSDP2 x 2", "dynamic", "sequence", "qwen2"),
        _fsdp2_averages_gradients,
        ("grad norm",),
        UNTRAINED,
    ),
    "norms of heads under FSDP2 learn from one tensor-parallel rank's heads": Mutation(
        Cell("FSDP2 TP2 x 2", "packed", "sequence", "qwen3"),
        _parts_of_gradients_are_not_summed,
        LEARNED,
        UNTRAINED,
    ),
    "the norm under FSDP2 counts every copy of a weight": Mutation(
        Cell("FSDP2 TP2 x 2", "packed", "sequence", "qwen3"),
        _every_copy_counts_in_the_norm,
        ("grad norm",),
        UNTRAINED,
    ),
    "FSDP1 reduces gradients again with those of the next microbatch": Mutation(
        Cell("FSDP1 2 copies", "padded", "token", "qwen2"),
        _fsdp1_reduces_again,
        ("grad norm",),
        UNTRAINED,
    ),
}
