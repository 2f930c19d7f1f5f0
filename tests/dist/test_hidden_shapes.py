"""Pipeline stages whose microbatches differ in length exchange no shapes, and the shapes that they
derive are those that Megatron-Core would exchange.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from megatron_policy.engines.megatron import hidden_shapes, pipeline
from megatron_policy.engines.megatron.hidden_shapes import DerivedShapes, Shape, StageLink
from tests import oracle
from tests.dist.cases import open_policy, policy_config
from tests.dist.layouts import SP, VOCAB, Layout, layout
from tests.losses import TokenNLL
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
MICROBATCH = {"enabled": True, "train_mb_tokens": 16, "logprob_mb_tokens": 16}
BATCHINGS = {
    "dynamic": {"dynamic_batching": MICROBATCH | {"sequence_length_round": 2}},
    "packed": {"sequence_packing": MICROBATCH},
}

WRONG = r"sent forward: microbatch \d+ has the shape .* expects"
LEFT = r"(sent|received) backward: the schedule has exchanged 0 of \d+"
COMPARED = [
    (name, batching)
    for number, name in enumerate(LAYOUTS)
    for batching in sorted(BATCHINGS, reverse=number % 2 == 1)
]


class Compared(DerivedShapes):
    """Also exchanges the shapes, and compares them with the derived ones."""

    received: ClassVar[list[Shape]] = []

    def _communicate_shapes(self, *args: Any, **kwargs: Any) -> tuple[Shape, Shape]:
        derived = super()._communicate_shapes(*args, **kwargs)
        exchanged = P2PCommunicator._communicate_shapes(self, *args, **kwargs)
        assert derived == tuple(map(tuple, exchanged)), (derived, exchanged)
        self.received.extend(shape for shape in derived if shape != hidden_shapes.NOTHING)
        return derived


def config_of(path: Path, chosen: Layout, batching: str) -> dict[str, Any]:
    return policy_config(path, chosen.megatron, train_global_batch_size=ROWS, **BATCHINGS[batching])


def use(config: dict[str, Any]) -> None:
    """Train, evaluate and score."""
    data = oracle.make_batch(ROWS, LENGTH, VOCAB)
    with open_policy(config, init_reference_model=False) as policy:
        own = data.shard_by_batch_size(policy.topology.dp, batch_size=ROWS)[policy.coords.dp]
        policy.train(own, TokenNLL(), gbs=ROWS)
        policy.train(own, TokenNLL(), gbs=ROWS, eval_mode=True)
        policy.logprobs(own)


def shapes_received(config: dict[str, Any]) -> list[Shape]:
    """The shapes that this rank has derived, each equal to the one that its neighbour sends."""
    Compared.received = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "DerivedShapes", Compared)
        use(config)
    return Compared.received


def calls(config: dict[str, Any]) -> tuple[int, int]:
    """How often this rank has exchanged tensors, and how often shapes."""
    counts = {"_communicate": 0, "_communicate_shapes": 0}

    def counted(name: str) -> Callable[..., Any]:
        original = getattr(P2PCommunicator, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return original(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in counts:
            patch.setattr(P2PCommunicator, name, counted(name))
        use(config)
    return counts["_communicate"], counts["_communicate_shapes"]


def with_a_wrong_shape(config: dict[str, Any]) -> None:
    """Every stage derives two more positions for the widest microbatches."""
    original = hidden_shapes.hidden_shape

    def wrong(*args: Any) -> Shape:
        positions, *rest = original(*args)
        return (positions + 2 * (positions > 12), *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "hidden_shape", wrong)
        use(config)


def with_a_wrong_order(config: dict[str, Any]) -> None:
    """Every stage takes the microbatches of its links from the last to the first."""
    original = hidden_shapes.get_schedule_table

    def backwards(number: int, *sizes: int) -> list[tuple[int, int]]:
        return [(number - 1 - each, chunk) for each, chunk in original(number, *sizes)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hidden_shapes, "get_schedule_table", backwards)
        use(config)


def with_a_shape_left(config: dict[str, Any]) -> None:
    """Every stage expects a backward pass where there is none."""
    original = DerivedShapes.__init__

    def both(self: Any, group: Any, model: Any, shapes: Any, forward_only: bool) -> None:
        original(self, group, model, shapes, False)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DerivedShapes, "__init__", both)
        use(config)


@pytest.mark.parametrize(("name", "batching"), COMPARED)
def test_derived_shapes_are_those_that_neighbours_would_send(
    ranks, checkpoint, name: str, batching: str
) -> None:
    chosen = LAYOUTS[name]
    path = small(checkpoint)
    for received in ranks.run(chosen.world, shapes_received, config_of(path, chosen, batching)):
        assert len({positions * rows for positions, rows, _ in received}) > 1, received


@pytest.mark.parametrize("name", ["PP2", "PP2xVPP2"])
def test_stages_exchange_no_shapes(ranks, checkpoint, name: str) -> None:
    config = config_of(small(checkpoint), LAYOUTS[name], "packed")
    for tensors, shapes in ranks.run(2, calls, config):
        assert tensors and not shapes, (tensors, shapes)


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("PP2", with_a_wrong_shape, WRONG),
        ("PP2xVPP2", with_a_wrong_shape, WRONG),
        ("PP2xVPP2", with_a_wrong_order, WRONG),
        ("PP2", with_a_wrong_order, WRONG),
        ("PP2", with_a_shape_left, LEFT),
        ("PP2xVPP2", with_a_shape_left, LEFT),
    ],
)
def test_a_wrong_expectation_is_an_error_and_no_wait(
    ranks, checkpoint, name: str, wrong: Callable[[dict[str, Any]], None], message: str
) -> None:
    config = config_of(small(checkpoint), LAYOUTS[name], "packed")
    with pytest.raises(RankFailure, match=message):
        ranks.run(2, wrong, config)


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


def small(checkpoint: Callable[..., Path]) -> Path:
    """Eight layers, a layer for each chunk of the largest layout."""
    sizes = {"layers": 8, "heads": 4, "groups": 2, "hidden": 32, "vocab": VOCAB}
    return checkpoint("qwen2", **sizes)
