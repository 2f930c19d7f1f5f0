"""Patches for vLLM's sparse trainer engine: of what several ranks have changed in several versions
the newest, each element once; what its protocol cannot say is refused, and all weights follow what
has failed.
"""

from __future__ import annotations

import math
import threading
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_policy.errors import ConfigError, RefitError
from megatron_policy.inference.vllm.weight_patches import Patch, WeightPatches, make_patches
from megatron_policy.refit.delivery import deliver
from megatron_policy.refit.manifest import ServedModel, WeightVersion
from megatron_policy.refit.plan import RefitTensor
from tests.pure.test_delta_messages import changed, fragments
from tests.refit_engine import bits
from tests.refit_trainer import FORMS, Plan, StandIn, weights

FIRST = ServedModel(version=WeightVersion("chain", 7))


class Engine:
    """vLLM's end, on which patches are applied; it refuses the next call named in `refused`."""

    def __init__(self, held: dict[str, Tensor]) -> None:
        self.held, self.client, self.refused, self.calls = held, self, "", list[str]()
        self.sent: list[list[int]] = []
        self.over: threading.Event | None = None

    def _note(self, call: str) -> None:
        self.calls.append(call)
        if call == self.refused:
            self.refused = ""
            raise ValueError("no")

    def start_weight_update(self) -> None:
        self._note("start")

    def update_weights(self, update_info: Any) -> None:
        self._note("update")

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._note(f"finish {weight_version}")

    def send_weight_chunk(self, patches: Any) -> None:
        self._note("send")
        self.sent.append([patch.nbytes for patch in patches])
        if self.over is not None:
            self.over.wait(60)
        for patch in patches:
            apply(self.held, patch)


class OneRank(StandIn):
    bucket_bytes = 4096


def apply(held: dict[str, Tensor], patch: Patch) -> None:
    assert patch.indices.dtype == torch.int32 and patch.full_shape == held[patch.name].shape
    assert len(patch.indices.unique()) == len(patch.indices) == len(patch.values)
    held[patch.name].view(-1)[patch.indices.long()] = patch.values


def test_patches_of_all_ranks_and_versions_make_the_newest_weights() -> None:
    first = weights(1)
    versions = [first, changed(first, 2, 0.4)]
    versions.append(changed(versions[1], 3, 0.4))
    ranks: dict[tuple[str, int], list[Any]] = {}
    for old, new in pairwise(versions):
        for number, fragment in enumerate(fragments(old, new)):
            ranks.setdefault((fragment.tensor, number), []).append(fragment)
    patches = list(make_patches(f for own in ranks.values() for f in own))
    held = {name: tensor.clone() for name, tensor in first.items()}
    assert len(patches) == len({patch.name for patch in patches})
    for patch in patches:
        apply(held, patch)
    assert bits(held) == bits(versions[2])


@pytest.mark.parametrize("refused", ["start", "send", "finish 3"])
def test_what_fails_is_said_and_leaves_no_version(refused: str) -> None:
    engine, held = Engine(weights(1)), weights(2)
    to, rank = WeightPatches(engine), OneRank(held, model=FIRST)
    deliver(rank, to, 2)
    assert bits(engine.held) == bits(held) and to.ask(rank) == [("chain", 7)]
    engine.refused = refused
    if refused == "start":  # an update of a trainer that is gone is ended first
        deliver(rank, to, 3)
        second = engine.calls[engine.calls.index("finish 2") + 1 :]
        assert second[:4] == ["start", "update", "start", "send"]
        assert to.ask(rank) == [("chain", 7)]
        return
    with pytest.raises(RefitError, match=r"vLLM could not .*: no"):
        deliver(rank, to, 3)
    assert to.ask(rank) == [None]


def test_all_weights_are_sent_in_batches_of_a_bucket_or_of_one_tensor() -> None:
    engine = Engine(weights(1))
    deliver(OneRank(weights(2), model=FIRST), WeightPatches(engine), 1)
    sizes = [math.prod(shape) * (4 + dtype.itemsize) for shape, dtype in FORMS.values()]
    assert [size for batch in engine.sent for size in batch] == sizes
    assert all(len(batch) == 1 or sum(batch) <= OneRank.bucket_bytes for batch in engine.sent)
    assert len(engine.sent) < len(FORMS)
    for batch, (first, *_) in pairwise(engine.sent):
        assert sum(batch) + first > OneRank.bucket_bytes


def test_a_vllm_that_is_still_at_a_call_that_was_given_up_gets_no_other() -> None:
    engine, over = Engine(weights(1)), threading.Event()
    engine.over, held = over, weights(2)
    to, rank = WeightPatches(engine), OneRank(held, model=FIRST, timeout_s=0.2)
    try:
        with pytest.raises(RefitError, match=r"did not take the weights within 0\.2 s"):
            deliver(rank, to, 2)
        with pytest.raises(RefitError, match=r"an earlier call to take the weights, .* restart"):
            deliver(rank, to, 3)
        assert engine.calls == ["start", "send"]
    finally:
        over.set()
    engine.over = None
    for thread in threading.enumerate():
        if thread.name == "vllm-call":
            thread.join(60)
    deliver(rank, to, 4)
    assert bits(engine.held) == bits(held) and to.ask(rank) == [("chain", 7)]


def test_nan_too_many_elements_and_refits_without_versions_are_refused() -> None:
    to = WeightPatches(Engine(weights(1)))
    held = weights(2)
    held["norm"][3] = torch.nan
    with pytest.raises(RefitError, match="weights of norm are NaN"):
        deliver(OneRank(held, model=FIRST), to, 1)
    with pytest.raises(RefitError, match="wrap it in one"):
        deliver(OneRank(weights(2)), to, 1)

    class Large(OneRank):
        def plan(self, names: Any = None) -> Any:
            return Plan((RefitTensor("embed", (1 << 16, 1 << 15), torch.bfloat16),))

    with pytest.raises(ConfigError, match="embed has 2147483648 elements"):
        to.plan(Large(weights(2)))
