"""The rank grid and the layer split equal Megatron-Core's own, without process groups."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from megatron.core.parallel_state import RankGenerator
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megatron_policy.errors import ConfigError
from megatron_policy.parallel.topology import Coords, ExpertCoords, LayerSplit, Topology

SIZE = st.integers(1, 4)


@given(tp=SIZE, cp=SIZE, dp=SIZE, pp=SIZE)
def test_rank_inverts_coords_on_every_rank(tp: int, cp: int, dp: int, pp: int) -> None:
    grid = Topology(tp=tp, cp=cp, dp=dp, pp=pp)
    ranks = range(tp * cp * dp * pp)
    assert [grid.rank(grid.coords(rank)) for rank in ranks] == list(ranks)
    assert grid.world_size == len(ranks)


def test_tp_runs_fastest_then_cp_dp_pp_and_the_first_rank_of_each_replica_reports() -> None:
    grid, first = Topology(tp=2, cp=2, dp=2, pp=2), {"pp": 0, "dp": 0, "cp": 0, "tp": 0}
    ranks = [grid.rank(Coords(**first | {axis: 1})) for axis in ("tp", "cp", "dp", "pp")]
    assert ranks == [1, 2, 4, 8]
    assert Topology(tp=2, cp=2, dp=3, pp=2).reporters() == (0, 4, 8)


@settings(max_examples=25, deadline=None)
@given(tp=SIZE, cp=SIZE, dp=SIZE, pp=SIZE)
def test_groups_along_every_axis_equal_those_of_megatron_core(
    tp: int, cp: int, dp: int, pp: int
) -> None:
    grid = Topology(tp=tp, cp=cp, dp=dp, pp=pp)
    axes = {axis: axis for axis in ("tp", "cp", "dp", "pp")}
    assert_groups_are_megatrons(grid, grid.coords, axes, tp=tp, ep=1, dp=dp, pp=pp, cp=cp)


def assert_groups_are_megatrons(
    grid: Topology, coords: Any, axes: dict[str, str], **sizes: int
) -> None:
    """`axes`: our names of them, and Megatron-Core's."""
    theirs = RankGenerator(order="tp-cp-ep-dp-pp", **sizes)
    for axis, name in axes.items():
        ours: dict[Coords | ExpertCoords, list[int]] = {}
        for rank in range(grid.world_size):
            ours.setdefault(replace(coords(rank), **{axis: 0}), []).append(rank)
        assert sorted(ours.values()) == sorted(theirs.get_ranks(name)), axis


@st.composite
def expert_grids(draw: st.DrawFn) -> Topology:
    """Any grid whose experts fit on its ranks."""
    tp, cp, dp, pp = (draw(SIZE) for _ in range(4))
    stage = tp * cp * dp
    etp = draw(st.sampled_from([n for n in range(1, stage + 1) if stage % n == 0]))
    ep = draw(st.sampled_from([n for n in range(1, stage // etp + 1) if stage // etp % n == 0]))
    return Topology(tp=tp, cp=cp, dp=dp, pp=pp, ep=ep, etp=etp)


@settings(max_examples=40, deadline=None)
@given(grid=expert_grids(), share=st.integers(1, 4))
def test_every_expert_has_the_owner_that_holds_it(grid: Topology, share: int) -> None:
    number = grid.ep * share
    held = [(ep, expert) for ep in range(grid.ep) for expert in grid.experts_of(ep, number)]
    assert [expert for _, expert in held] == list(range(number))
    assert all(grid.expert_owner(expert, number) == ep for ep, expert in held)


@settings(max_examples=40, deadline=None)
@given(grid=expert_grids())
def test_groups_along_every_axis_of_the_experts_equal_those_of_megatron_core(
    grid: Topology,
) -> None:
    # As `initialize_model_parallel` makes them for experts: no context parallelism of their own.
    sizes = {"tp": grid.etp, "ep": grid.ep, "dp": grid.edp, "pp": grid.pp, "cp": 1}
    axes = {"etp": "tp", "ep": "ep", "edp": "dp", "pp": "pp"}
    assert_groups_are_megatrons(grid, grid.expert_coords, axes, **sizes)


def test_experts_are_split_over_as_many_ranks_as_other_parameters_if_nothing_else_is_said() -> None:
    grid = Topology(tp=2, cp=2, dp=2, ep=2)
    assert (grid.expert_tp, grid.edp) == (2, 2)
    assert (Topology(tp=2, dp=2, etp=1).expert_tp, Topology(tp=2, dp=2, etp=1).edp) == (1, 4)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"tp": 2, "dp": 2, "ep": 3}, r"etp 2 x ep 3 does not .* ep can be one of \[1, 2\]"),
        ({"tp": 2, "cp": 2, "ep": 2, "etp": 4}, r"ep can be one of \[1\]"),
        ({"tp": 2, "etp": 3}, "etp must divide 2"),
        ({"tp": 2, "etp": 0}, "etp is 0"),
        ({"cp": 0}, "cp is 0"),
    ],
)
def test_sizes_that_do_not_fit_on_the_ranks_are_refused(sizes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Topology(**sizes)


@st.composite
def splits(draw: st.DrawFn) -> dict[str, int | None]:
    """A legal split: layers per stage drawn first, so that uneven and chunked cases are common."""
    pp = draw(st.integers(1, 5))
    vpp = draw(st.integers(1, 3)) if pp > 1 else 1
    inner = draw(st.integers(1, 3)) * vpp
    first = draw(st.none() | st.integers(1, 4)) if pp > 1 else None
    both = st.none() | st.integers(1, 4)
    last = draw(both) if pp > 2 or (pp == 2 and (first is None or vpp == 1)) else None
    ends = [n * vpp for n in (first, last) if n is not None]
    return {
        "num_layers": sum(ends) + inner * (pp - len(ends)),
        "pp": pp,
        "vpp": vpp,
        "first": None if first is None else first * vpp,
        "last": None if last is None else last * vpp,
    }


def built_by_megatron_core(split: dict[str, int | None]) -> list[list[range]]:
    """The layers of each stage and chunk; raises what Megatron-Core raises."""
    pp, vpp = split["pp"], split["vpp"]
    config = TransformerConfig(
        num_layers=split["num_layers"],
        hidden_size=8,
        num_attention_heads=1,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
        num_layers_in_first_pipeline_stage=split["first"],
        num_layers_in_last_pipeline_stage=split["last"],
        pipeline_dtype=torch.float32,
    )

    def layers(stage: int, chunk: int) -> range:
        at = {"vp_stage": chunk if vpp > 1 else None, "pp_rank": stage}
        count = get_num_layers_to_build(config, **at)
        start = get_transformer_layer_offset(config, **at)
        return range(start, start + count)

    return [[layers(stage, chunk) for chunk in range(vpp)] for stage in range(pp)]


@settings(max_examples=150, deadline=None)
@given(split=splits())
def test_layer_split_equals_that_of_megatron_core_and_every_layer_has_one_owner(
    split: dict[str, int | None],
) -> None:
    ours = LayerSplit.of(**split)
    assert [list(chunks) for chunks in ours.stages] == built_by_megatron_core(split)
    held = [layer for stage in ours.stages for chunk in stage for layer in chunk]
    assert sorted(held) == list(range(split["num_layers"]))
    for layer in held:
        stage, chunk = ours.owner(layer)
        assert layer in ours.stages[stage][chunk]


def cuts_of(layers: int, chunks: int) -> Iterator[tuple[int, ...]]:
    """All ways to cut layers into chunks of at least one."""
    for ends in combinations(range(1, layers), chunks - 1):
        yield 0, *ends, layers


@settings(max_examples=150, deadline=None)
@given(
    costs=st.lists(st.integers(1, 20), min_size=1, max_size=9),
    pp=st.integers(1, 3),
    vpp=st.integers(1, 2),
)
def test_no_split_has_a_cheaper_dearest_chunk_than_a_balanced_one(
    costs: list[int], pp: int, vpp: int
) -> None:
    vpp = vpp if pp > 1 else 1
    assume(pp * vpp <= len(costs))
    split = LayerSplit.balance(costs, pp, vpp)
    chunks = split.chunks
    assert [layer for chunk in chunks for layer in chunk] == list(range(len(costs)))
    assert [split.owner(chunk.start) for chunk in chunks] == [
        (stage, chunk) for chunk in range(vpp) for stage in range(pp)
    ]
    least = min(
        max(sum(costs[a:b]) for a, b in pairwise(cuts)) for cuts in cuts_of(len(costs), pp * vpp)
    )
    assert max(sum(costs[layer] for layer in chunk) for chunk in chunks) == least


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ({"num_layers": 10, "pp": 4}, r"one of \[1, 2, 5, 10\]"),
        ({"num_layers": 8, "pp": 2, "vpp": 3}, r"use one of \[1, 2, 4\]"),
        ({"num_layers": 8, "pp": 1, "vpp": 2}, "at least 2"),
        ({"num_layers": 8, "pp": 1, "first": 4}, "at least 2"),
        ({"num_layers": 8, "pp": 3, "first": 3}, r"first_pipeline_stage can be one of \[2, 4, 6\]"),
        ({"num_layers": 8, "pp": 3, "last": 3}, r"last_pipeline_stage can be one of \[2, 4, 6\]"),
        ({"num_layers": 8, "pp": 4, "first": 2, "last": 3}, r"can be one of \[1, 3\]"),
        ({"num_layers": 8, "pp": 2, "first": 2, "last": 3}, r"can be one of \[5\]"),
        ({"num_layers": 8, "pp": 3, "first": 4, "last": 4}, r"can be one of \[1, 2, 3\]"),
        ({"num_layers": 8, "pp": 2, "first": 0}, r"can be one of \[1, 2, 3, 4, 5, 6, 7\]"),
        ({"num_layers": 8, "pp": 3, "first": 1, "last": 9}, "lower num_layers_in_last"),
        ({"num_layers": 8, "pp": 2, "first": 4, "last": 4, "vpp": 2}, "not both"),
    ],
)
def test_an_impossible_split_names_the_legal_values(split: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LayerSplit.of(**split)


@settings(max_examples=150, deadline=None)
@given(
    num_layers=st.integers(1, 12),
    pp=st.integers(2, 4),
    vpp=st.integers(1, 3),
    first=st.none() | st.integers(0, 6),
    last=st.none() | st.integers(0, 6),
)
def test_a_split_is_refused_only_where_megatron_core_has_none(**split: int | None) -> None:
    try:
        LayerSplit.of(**split)
    except ConfigError:
        try:
            built = [len(chunk) for stage in built_by_megatron_core(split) for chunk in stage]
        except (AssertionError, ValueError, ZeroDivisionError):
            return
        assert sum(built) != split["num_layers"] or min(built) < 1
