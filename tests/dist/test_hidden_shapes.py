"""Pipeline stages whose microbatches differ in length exchange no shapes, and the shapes that they
derive are those that Megatron-Core would exchange; and no stage sends a view.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from megatron_policy.engines.megatron import hidden_shapes, pipeline
from megatron_policy.engines.megatron.hidden_shapes import DerivedShapes, Shape, StageLink
from tests import oracle
from tests.dist.cases import GLOBAL_BATCH, open_policy, own_share, policy_config
from tests.dist.layouts import SIZES, SP, VOCAB, layout
from tests.dist.resuming import replaced
from tests.dist.shortcuts import dynamic, packed
from tests.losses import Result, TokenNLL
from tests.ranks import RankFailure

LENGTH, ROWS = 13, 16
LAYOUTS = {
    "PP2": layout(2, pp=2),
    "PP4": layout(4, pp=4),
    "PP2xVPP2": layout(2, pp=2, vpp=2),
    "PP2xVPP4": layout(2, pp=2, vpp=4),
    "PP4xVPP2": layout(4, pp=4, vpp=2),
    "TP2xPP2+SP": layout(4, tp=2, pp=2, **SP),
    "PP2xVPP2xCP2": layout(4, pp=2, vpp=2, context_parallel_size=2),
    "PP2xVPP2xDP2": layout(4, pp=2, vpp=2),
}
BATCHINGS = {"dynamic": dynamic(16, sequence_length_round=2), "packed": packed(16)}

WRONG = r"sent forward: microbatch \d+ has the shape .* expects"
LEFT = r"(sent|received) backward: the schedule has exchanged 0 of \d+"
COMPARED = [
    (name, batching)
    for number, name in enumerate(LAYOUTS)
    for batching in sorted(BATCHINGS, reverse=number % 2 == 1)
]


@pytest.fixture
def path(checkpoint) -> Path:
    """Eight layers, a layer for each chunk of the largest layout."""
    return checkpoint("qwen2", layers=8, heads=4, groups=2, hidden=32, vocab=VOCAB)


def config_of(path: Path, name: str, batching: str) -> dict[str, Any]:
    sections = {"train_global_batch_size": ROWS, **BATCHINGS[batching]}
    return policy_config(path, LAYOUTS[name].megatron, **sections)


def use(config: dict[str, Any]) -> None:
    """Train, evaluate and score."""
    data = oracle.make_batch(ROWS, LENGTH, VOCAB)
    with open_policy(config, init_reference_model=False) as policy:
        own = data.shard_by_batch_size(policy.topology.dp, batch_size=ROWS)[policy.coords.dp]
        policy.train(own, TokenNLL(), gbs=ROWS)
        policy.train(own, TokenNLL(), gbs=ROWS, eval_mode=True)
        policy.logprobs(own)


class Compared(DerivedShapes):
    """Also exchanges the shapes, and compares them with the derived ones."""

    received: ClassVar[list[Shape]] = []

    def _communicate_shapes(self, *args: Any, **kwargs: Any) -> tuple[Shape, Shape]:
        derived = super()._communicate_shapes(*args, **kwargs)
        exchanged = P2PCommunicator._communicate_shapes(self, *args, **kwargs)
        assert derived == tuple(map(tuple, exchanged)), (derived, exchanged)
        self.received.extend(shape for shape in derived if shape != hidden_shapes.NOTHING)
        return derived


def shapes_received(config: dict[str, Any]) -> list[Shape]:
    """The shapes that this rank has derived, each equal to the one that its neighbour sends."""
    Compared.received = []
    with replaced(pipeline, "DerivedShapes", lambda _: Compared):
        use(config)
    return Compared.received


@pytest.mark.parametrize(("name", "batching"), COMPARED)
def test_derived_shapes_are_those_that_neighbours_would_send(ranks, path, name, batching) -> None:
    config = config_of(path, name, batching)
    for received in ranks.run(LAYOUTS[name].world, shapes_received, config):
        assert len({positions * rows for positions, rows, _ in received}) > 1, received


def count_exchanges(config: dict[str, Any]) -> tuple[int, int]:
    """How often this rank has exchanged tensors, and how often shapes."""
    tensors, shapes = [], []

    def counting(calls: list[int]) -> Callable[[Any], Any]:
        return lambda call: lambda *args, **kwargs: (calls.append(1), call(*args, **kwargs))[1]

    with (
        replaced(P2PCommunicator, "_communicate", counting(tensors)),
        replaced(P2PCommunicator, "_communicate_shapes", counting(shapes)),
    ):
        use(config)
    return len(tensors), len(shapes)


@pytest.mark.parametrize("name", ["PP2", "PP2xVPP2"])
def test_stages_exchange_no_shapes(ranks, path, name: str) -> None:
    for tensors, shapes in ranks.run(2, count_exchanges, config_of(path, name, "packed")):
        assert tensors and not shapes, (tensors, shapes)


def make_wrong_shapes(hidden_shape: Any) -> Any:
    """Two more positions for the widest microbatches."""

    def wrong(*args: Any) -> Shape:
        positions, *rest = hidden_shape(*args)
        return (positions + 2 * (positions > 12), *rest)

    return wrong


def make_wrong_order(schedule: Any) -> Any:
    """The microbatches of links from the last to the first."""
    return lambda number, *sizes: [
        (number - 1 - each, chunk) for each, chunk in schedule(number, *sizes)
    ]


def expect_backward_passes(init: Any) -> Any:
    """Also where there are none."""
    return lambda self, group, model, shapes, forward_only: init(self, group, model, shapes, False)


def use_broken(config: dict[str, Any], place: str, name: str, make: Any) -> None:
    with replaced(globals()[place], name, make):
        use(config)


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("PP2", ("pipeline", "hidden_shape", make_wrong_shapes), WRONG),
        ("PP2xVPP2", ("pipeline", "hidden_shape", make_wrong_shapes), WRONG),
        ("PP2xVPP2", ("hidden_shapes", "get_schedule_table", make_wrong_order), WRONG),
        ("PP2", ("hidden_shapes", "get_schedule_table", make_wrong_order), WRONG),
        ("PP2", ("DerivedShapes", "__init__", expect_backward_passes), LEFT),
        ("PP2xVPP2", ("DerivedShapes", "__init__", expect_backward_passes), LEFT),
    ],
)
def test_a_wrong_expectation_is_an_error_and_no_wait(ranks, path, name, wrong, message) -> None:
    """Every stage has the same one."""
    with pytest.raises(RankFailure, match=message):
        ranks.run(2, use_broken, config_of(path, name, "packed"), *wrong)


def test_a_schedule_that_exchanges_too_much_is_found() -> None:
    link = StageLink("sent forward", [(4, 1, 8), (6, 1, 8)], 1, 2, wraps=False)
    assert [link.next(), link.next()] == [(0, (4, 1, 8)), (1, (6, 1, 8))]
    link.finish()
    with pytest.raises(AssertionError, match="more than the 2 tensors of 2 microbatches"):
        link.next()


def test_a_link_from_the_last_stage_to_the_first_lacks_one_chunk() -> None:
    shapes = [(length, 1, 8) for length in (2, 4, 6, 8)]
    link = StageLink("sent forward", shapes, 2, 2, wraps=True)
    assert [link.next()[0] for _ in shapes] == [0, 1, 2, 3]
    link.finish()
    StageLink("sent forward", shapes, 1, 4, wraps=True).finish()


class View(TokenNLL):
    """A loss whose value is a view."""

    def __call__(self, *args: Any, **kwargs: Any) -> Result:
        value, metrics = super().__call__(*args, **kwargs)
        return torch.stack([value, value])[0], metrics


def train_with_outputs_seen(config: dict[str, Any]) -> dict[str, Any]:
    """On a GPU an output is freed once it is sent: of a view the base would stay in memory."""
    seen = []

    def looking_at(free: Any) -> Any:
        def look(out: Any, *args: Any, **kwargs: Any) -> None:
            for each in out if isinstance(out, list) else [out]:
                seen.append(each is not None and each._base is not None)
            free(out, *args, **kwargs)

        return look

    with (
        replaced(schedules, "deallocate_output_tensor", looking_at),
        open_policy(config, init_reference_model=False) as policy,
    ):
        data = own_share(policy, oracle.make_batch(GLOBAL_BATCH, LENGTH, VOCAB))
        loss = policy.train(data, View())["loss"].item()
        policy.logprobs(data)
    return {"loss": loss, "views": sum(seen), "seen": len(seen)}


@pytest.mark.parametrize("family", ["qwen2", "deepseek_v3", "gpt_oss"])
def test_a_stage_sends_no_view_of_another_tensor(ranks, checkpoint, family: str) -> None:
    path = checkpoint(family, **SIZES)
    (whole,) = ranks.run(1, train_with_outputs_seen, policy_config(path, {}))
    for name in ("PP2", "PP2xVPP2"):
        config = policy_config(path, LAYOUTS[name].megatron)
        for seen in ranks.run(2, train_with_outputs_seen, config):
            assert seen["seen"] and not seen["views"], (name, seen)
            assert seen["loss"] == pytest.approx(whole["loss"], rel=1e-5)
