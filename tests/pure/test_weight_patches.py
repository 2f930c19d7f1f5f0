"""Patches for vLLM's sparse trainer engine: of what several ranks have changed in several versions
the newest, each element once; what its protocol cannot say is refused, and all weights follow what
has failed.
"""

from __future__ import annotations

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
        assert engine.calls[-len(FORMS) - 4 : -len(FORMS)] == ["start", "update", "start", "send"]
        assert to.ask(rank) == [("chain", 7)]
        return
    with pytest.raises(RefitError, match=r"vLLM could not .*: no"):
        deliver(rank, to, 3)
    assert to.ask(rank) == [None]


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
