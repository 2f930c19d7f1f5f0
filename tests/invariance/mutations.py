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

from megatron_policy.attention import causal
from megatron_policy.batch import BatchedDataDict
from megatron_policy.converters.rows.blocks import of_expert
from megatron_policy.engines.hugging_face import engine as hugging_face
from megatron_policy.engines.hugging_face import optimizer
from megatron_policy.engines.hugging_face.fsdp1 import Fsdp1
from megatron_policy.engines.hugging_face.table import Cut
from megatron_policy.engines.megatron import assemble, trainable
from megatron_policy.lm_head.output import Output
from megatron_policy.packing import tokens
from megatron_policy.packing.tokens import AttentionPiece, TokenLayout
from megatron_policy.parallel.groups import take_part
from megatron_policy.parallel.topology import Copy, Placement
from megatron_policy.training import batching, losses, train
from megatron_policy.weights.load import Held
from tests.invariance.cases import Cell
from tests.invariance.measure import run_cell


@dataclass(frozen=True)
class Mutation:
    """What is broken (of what in the package, under which name, and what is made of it), in which
    cell, which quantities must tell, and which must not.
    """

    cell: Cell
    fault: tuple[Any, str, Callable[[Any], Any]]
    breaks: tuple[str, ...]
    keeps: tuple[str, ...] = ()


def run_broken(name: str, config: Mapping[str, Any], data: BatchedDataDict) -> dict[str, Any]:
    """`run_cell` of a mutation's cell on a rank whose package is broken meanwhile."""
    mutation = MUTATIONS[name]
    place, attribute, make = mutation.fault
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(place, attribute, make(getattr(place, attribute)))
        return run_cell(mutation.cell, config, data)


def _always(result: Any) -> Callable[[Any], Any]:
    return lambda original: lambda *args, **kwargs: result


def _one_piece(pieces: Any) -> Any:
    return lambda layout, *_: (AttentionPiece(0, layout.full_length, 0, layout.full_length),)


def _neighbours(layout: Any) -> Any:
    def contiguous(*args: Any) -> TokenLayout:
        made = layout(*args)
        return replace(made, positions_CT=torch.arange(made.full_length).view_as(made.positions_CT))

    return contiguous


def _mask_of_all_but_the_first(counted: Any) -> Any:
    def fewer(data: BatchedDataDict) -> torch.Tensor:
        mask_BS = counted(data)
        mask_BS[:1] = False
        return mask_BS

    return fewer


def _counts_of_one_replica(counted: Any) -> Any:
    def own(batch: BatchedDataDict, group: Any) -> Any:
        rank = torch.distributed.get_rank()
        return counted(batch, torch.distributed.new_group([rank], use_local_synchronization=True))

    return own


def _repetitions_for_dummies(for_training: Any) -> Any:
    def repeated(batch: batching.GlobalBatch) -> batching.GlobalBatch:
        real = [microbatch for microbatch in batch.microbatches if not microbatch.dummy]
        again = [real[-1]] * (len(batch.microbatches) - len(real))
        return replace(batch, microbatches=[*real, *again])

    return lambda *args: [repeated(batch) for batch in for_training(*args)]


def _gradient_of_fillers(nothing: Any) -> Any:
    return lambda output: nothing(output) + 0.1 * output.hidden_TRD[..., 0].sum()


def _results_in_the_order_of_the_plan(for_scoring: Any) -> Any:
    def in_order(batcher: Any, data: BatchedDataDict, at_once: int) -> batching.ScoringBatches:
        read = for_scoring(batcher, data, at_once)
        order = iter(range(data.size))
        return replace(read, rows=[list(islice(order, len(rows))) for rows in read.rows])

    return in_order


def _entropy_without_gradient(scores: Any) -> Any:
    def detached(*args: Any, **kwargs: Any) -> Any:
        logprobs, entropy = scores(*args, **kwargs)
        return logprobs, None if entropy is None else entropy.detach()

    return detached


def _no_gradient_of_an_expert(separated: Any) -> Any:
    def dropped(held: Held, place: Placement) -> None:
        separated(held, place)
        for entry, parameter in held:
            if (entry.layer, entry.expert) == (2, 1):
                parameter.register_hook(torch.zeros_like)

    return dropped


def _experts_among_all_else(separated: Any) -> Any:
    def together(held: Held, place: Placement) -> None:
        for entry, parameter in held:
            if of_expert(entry.row.megatron):
                parameter.allreduce = True  # type: ignore[attr-defined]

    return together


def _experts_swapped(load: Any) -> Any:
    def swapped(held: Held, *args: Any) -> None:
        load(held, *args)
        named = {entry.megatron: parameter for entry, parameter in held}
        for entry, parameter in held:
            if entry.expert == 0:
                other = named[entry.megatron.replace("local_experts.0", "local_experts.1")].data
                kept = other.clone()
                other.copy_(parameter.data)
                parameter.data.copy_(kept)

    return swapped


def _copies_of_experts(copy: Callable[[Placement], Copy]) -> Callable[[Any], Any]:
    return lambda of_all_else: (
        lambda place, row: copy(place) if of_expert(row.megatron) else of_all_else(place, row)
    )


ONE_PIECE = (TokenLayout, "pieces", _one_piece)
NEIGHBOURS = (tokens, "_layout", _neighbours)
OWN_GRADIENT = (causal, "sum_scatter", lambda sum_scatter: take_part)
LEFT_OUT = (losses, "counted", _mask_of_all_but_the_first)
OWN_COUNTS = (train, "count_valid", _counts_of_one_replica)
REPEATED = (batching.Batcher, "for_training", _repetitions_for_dummies)
FILLERS_LEARN = (Output, "nothing", _gradient_of_fillers)
ORDER_OF_PLAN = (batching.Batcher, "for_scoring", _results_in_the_order_of_the_plan)
NO_ENTROPY_GRADIENT = (Output, "next_token_scores", _entropy_without_gradient)
DROPPED = (trainable, "separate_experts", _no_gradient_of_an_expert)
NOT_APART = (trainable, "separate_experts", _always(None))
AMONG_ALL_ELSE = (trainable, "separate_experts", _experts_among_all_else)
SWAPPED = (assemble, "load_parameters", _experts_swapped)
EVERY_COPY = _copies_of_experts(lambda place: Copy(0, place.topology.edp))
FIRST_REPLICA = _copies_of_experts(lambda place: Copy(place.coords.dp, place.topology.dp))
SINGLE_SEQUENCES = (hugging_face, "sequences_in", _always(None))
NOT_SUMMED = (optimizer, "sum_partial", _always(None))
EVERY_CUT = (Cut, "is_first", _always(True))
REDUCED_AGAIN = (Fsdp1, "adding_gradients", lambda old: lambda sharding, wanted: nullcontext())
AVERAGED = (
    FSDPModule,
    "set_gradient_divide_factor",
    lambda divide: lambda module, _: divide(module, 2.0),
)


READ = ("logprobs before", "logprobs after", "reference", "entropy", "top-k")
TRAINED = ("loss", "metrics", "grad norm", "weights")
UNTRAINED = ("logprobs before", "reference", "entropy", "top-k")
LEARNED = ("grad norm", "weights", "logprobs after")
MUTATIONS = {
    "packed sequences see those before them": Mutation(
        Cell("one process", "packed", "token", "qwen2"), ONE_PIECE, (*READ, *TRAINED)
    ),
    "a context-parallel rank takes its positions for neighbours": Mutation(
        Cell("CP2", "padded", "token", "qwen3"), NEIGHBOURS, (*READ, *TRAINED)
    ),
    "keys of other context-parallel ranks get no gradient": Mutation(
        Cell("CP2", "packed", "policy gradient", "qwen2"), OWN_GRADIENT, LEARNED, UNTRAINED
    ),
    "the first sequence of a microbatch is left out of the loss": Mutation(
        Cell("one process", "packed", "policy gradient", "qwen3"),
        LEFT_OUT,
        ("loss", "grad norm", "weights"),
        UNTRAINED,
    ),
    "replicas divide by their own counts": Mutation(
        Cell("DP2", "dynamic", "sequence", "qwen2"),
        OWN_COUNTS,
        ("loss", "grad norm", "weights"),
        UNTRAINED,
    ),
    "a dummy repeats what was computed already": Mutation(
        Cell("PP2xVPP2", "dynamic", "token", "qwen3", 1),
        REPEATED,
        # Gradients are clipped: twice as large, they make the same weights.
        ("loss", "metrics", "grad norm"),
        UNTRAINED,
    ),
    "a dummy leaves a gradient": Mutation(
        Cell("PP2xVPP2", "packed", "policy gradient", "qwen2", 1), FILLERS_LEARN, LEARNED, UNTRAINED
    ),
    "results are placed in the order of the plan": Mutation(
        Cell("one process", "dynamic", "sequence", "qwen2"), ORDER_OF_PLAN, READ, TRAINED
    ),
    "the entropy has no gradient": Mutation(
        Cell("TP2", "packed", "policy gradient", "qwen3"), NO_ENTROPY_GRADIENT, LEARNED, UNTRAINED
    ),
    "an expert's gradient is dropped": Mutation(
        Cell("EP2", "padded", "sequence", "qwen3_moe"), DROPPED, LEARNED, UNTRAINED
    ),
    "gradients of experts are not reduced over the ranks that hold the same": Mutation(
        Cell("TP2+SP, experts whole", "dynamic", "token", "gpt_oss"), NOT_APART, LEARNED, UNTRAINED
    ),
    "gradients of experts are reduced over ranks that hold others": Mutation(
        Cell("EP2", "padded", "sequence", "qwen3_moe"), AMONG_ALL_ELSE, LEARNED, UNTRAINED
    ),
    "a dummy leaves a gradient in experts": Mutation(
        Cell("EP4", "dynamic", "sequence", "qwen3_moe", 3), FILLERS_LEARN, LEARNED, UNTRAINED
    ),
    "two experts are swapped on loading": Mutation(
        Cell("EP2xTP2+SP", "padded", "sequence", "mixtral"), SWAPPED, (*READ, *TRAINED)
    ),
    "the norm counts every copy of an expert": Mutation(
        Cell("TP2+SP, experts whole", "dynamic", "token", "gpt_oss"),
        (Placement, "copy_of", EVERY_COPY),
        LEARNED,
        UNTRAINED,
    ),
    "the norm counts experts of one replica only": Mutation(
        Cell("EP2", "padded", "sequence", "qwen3_moe"),
        (Placement, "copy_of", FIRST_REPLICA),
        LEARNED,
        UNTRAINED,
    ),
    "attention under FSDP2 is not told of packed sequences": Mutation(
        Cell("FSDP2 x 2", "packed", "token", "qwen2"), SINGLE_SEQUENCES, (*READ, *TRAINED)
    ),
    "FSDP2 averages gradients over ranks": Mutation(
        Cell("FSDP2 x 2", "dynamic", "sequence", "qwen2"), AVERAGED, ("grad norm",), UNTRAINED
    ),
    "norms of heads under FSDP2 learn from one tensor-parallel rank's heads": Mutation(
        Cell("FSDP2 TP2 x 2", "packed", "sequence", "qwen3"), NOT_SUMMED, LEARNED, UNTRAINED
    ),
    "the norm under FSDP2 counts every copy of a weight": Mutation(
        Cell("FSDP2 TP2 x 2", "packed", "sequence", "qwen3"), EVERY_CUT, ("grad norm",), UNTRAINED
    ),
    "FSDP1 reduces gradients again with those of the next microbatch": Mutation(
        Cell("FSDP1 2 copies", "padded", "token", "qwen2"), REDUCED_AGAIN, ("grad norm",), UNTRAINED
    ),
}
