"""Which tokens count where experts are balanced, what rows weigh, and which dispatcher is used."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from megatron_policy.batch import BatchedDataDict
from megatron_policy.config import MegatronConfig
from megatron_policy.converters.architecture import Moe, Scoring
from megatron_policy.engines.megatron.layers import experts
from megatron_policy.engines.megatron.layers.balancing import RoutedRows, probabilities
from megatron_policy.engines.megatron.layers.experts import dispatcher_of
from megatron_policy.errors import ConfigError
from megatron_policy.interfaces import LossType
from megatron_policy.packing.microbatch import (
    Microbatch,
    empty_microbatch,
    packed_microbatch,
    padded_microbatch,
)
from megatron_policy.packing.multiples import Multiples
from megatron_policy.parallel.topology import Topology
from megatron_policy.training.losses import ValidCounts, count_own, weigh_rows
from tests.pure.test_rows import model

LENGTHS, WIDTH, RANKS = (5, 2, 4), 6, 2
MULTIPLES = Multiples(row=8, sequence=4, context_ranks=RANKS)


def rows() -> BatchedDataDict:
    """Three rows, the second of which is left out; the last token mask is a hole."""
    mask = torch.arange(WIDTH) < torch.tensor(LENGTHS).unsqueeze(1)
    mask[2, 3] = False
    return BatchedDataDict(
        {
            "input_ids": torch.ones(3, WIDTH, dtype=torch.long),
            "input_lengths": torch.tensor(LENGTHS),
            "token_mask": mask.long(),
            "sample_mask": torch.tensor([1.0, 0.0, 1.0]),
        }
    )


def microbatches() -> list[Microbatch]:
    shares = torch.tensor([0.5, 0.0, 0.25])
    padded = replace(padded_microbatch(rows(), WIDTH, WIDTH, MULTIPLES), shares=shares)
    packed = replace(packed_microbatch(rows(), WIDTH, LENGTHS, MULTIPLES), shares=shares)
    return [padded, packed, empty_microbatch(WIDTH, MULTIPLES), replace(packed, dummy=True)]


def test_only_text_of_rows_that_count_is_numbered_on_whichever_rank_it_is() -> None:
    by_rank = [RoutedRows.of(microbatches(), rank).numbers for rank in range(RANKS)]
    found = [torch.cat([numbers[index].flatten() for numbers in by_rank]) for index in range(4)]
    assert found[0].bincount(minlength=4)[1:].tolist() == [5, 0, 4]
    assert found[1].bincount(minlength=7)[4:].tolist() == [5, 0, 4]
    assert not found[2].any() and not found[3].any()


def test_a_rows_tokens_weigh_its_share_together() -> None:
    routed = RoutedRows.of(microbatches(), 0)
    assert routed.most == 3
    assert routed.token_weights_N[:7].tolist() == pytest.approx([0, 0.1, 0, 0.0625, 0.1, 0, 0.0625])
    assert not routed.token_weights_N[7:].any()
    assert routed.within_microbatch(torch.tensor([0, 1, 3, 4, 6])).tolist() == [0, 0, 2, 0, 2]


@pytest.mark.parametrize("level", [LossType.TOKEN_LEVEL, LossType.SEQUENCE_LEVEL, None])
def test_the_shares_of_a_global_batch_add_up_to_one(level: LossType | None) -> None:
    data = rows()
    counts = ValidCounts(*count_own(data))
    shares_B = weigh_rows(SimpleNamespace(loss_type=level), data, counts)
    expected = [0.5, 0, 0.5] if level is LossType.SEQUENCE_LEVEL else [4 / 6, 0, 2 / 6]
    assert shares_B.tolist() == pytest.approx(expected)
    data["sample_mask"] = torch.zeros(3)
    nothing = ValidCounts(*count_own(data))
    assert not weigh_rows(SimpleNamespace(loss_type=level), data, nothing).any()


@pytest.mark.parametrize("scoring", Scoring)
def test_probabilities_are_over_all_experts(scoring: Scoring) -> None:
    logits = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    found = probabilities(logits, Moe(experts=4, chosen=2, ffn_hidden_size=8, scoring=scoring))
    weights = logits.sigmoid() if scoring is Scoring.SIGMOID else logits.exp()
    torch.testing.assert_close(found, weights / weights.sum(-1, keepdim=True))


@pytest.mark.parametrize(
    ("asked", "topology", "variable", "used"),
    [
        (None, Topology(ep=2, dp=2), True, "alltoall"),
        ("alltoall", Topology(ep=2, dp=2), True, "alltoall"),
        ("allgather", Topology(tp=2, ep=2, etp=1), True, "allgather"),
        ("allgather", Topology(ep=2, dp=2), False, "alltoall"),
        ("allgather", Topology(pp=2), True, "alltoall"),
        ("allgather", Topology(pp=2), False, "allgather"),
        ("flex", Topology(dp=2), True, "alltoall"),
    ],
)
def test_a_dispatcher_that_cannot_work_gives_way_to_the_one_that_always_can(
    asked: str | None, topology: Topology, variable: bool, used: str
) -> None:
    settings = MegatronConfig(moe_token_dispatcher_type=asked)
    assert dispatcher_of(settings, topology, variable) == used


@pytest.mark.parametrize("backend", [None, "deepep", "hybridep"])
def test_flex_is_refused_by_name_where_its_kernels_are_not_installed(monkeypatch, backend) -> None:
    settings = MegatronConfig(moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend=backend)
    name = backend or "deepep"
    monkeypatch.setitem(experts._FLEX_INSTALLED, name, False)
    with pytest.raises(ConfigError, match=rf"'{name}' needs .*deep_ep.*or use 'alltoall'"):
        dispatcher_of(settings, Topology(ep=2, dp=2), True)
    monkeypatch.setitem(experts._FLEX_INSTALLED, name, True)
    assert dispatcher_of(settings, Topology(tp=2, ep=2, etp=1), True) == "flex"


@pytest.mark.parametrize("pads", [True, False])
def test_hybrid_ep_gets_as_many_tokens_from_every_rank_or_gives_way(monkeypatch, pads) -> None:
    """It does not compare how many tokens ranks send, and replicas have different numbers."""
    monkeypatch.setitem(experts._FLEX_INSTALLED, "hybridep", True)
    monkeypatch.setattr(experts, "_CAN_PAD", pads)
    moe = Moe(experts=4, chosen=2, ffn_hidden_size=8, scoring=Scoring.SOFTMAX)
    architecture = model(moe=moe)
    settings = MegatronConfig(
        moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend="hybridep"
    )
    for topology, uneven in ((Topology(ep=2, dp=2), True), (Topology(tp=2, ep=2, etp=1), False)):
        found = experts.expert_fields(architecture, settings, topology, False, True)
        assert found["moe_token_dispatcher_type"] == ("flex" if pads or not uneven else "alltoall")
        assert found.get(experts._PAD) == (uneven if pads else None)
