"""What a plan says that context-parallel ranks send, against the bytes of their collectives."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_policy.adapters.targets import bind_tables
from megatron_policy.config import PolicyConfig
from megatron_policy.estimate.devices import SHORT
from megatron_policy.estimate.plan import plan_of
from megatron_policy.estimate.states import ModelRows
from tests.dist.cases import open_policy
from tests.dist.layouts import layout
from tests.dist.test_estimate import ALL, CP2, LENGTH, ROWS, Case, full_rows, recomputed
from tests.losses import SequenceNLL

GIVEN = {"all_gather_into_tensor": 1, "reduce_scatter_tensor": 0, "all_to_all_single": 1}
"""Of each collective the argument that is as large as what a rank has of its own."""


def count_sent(config: dict[str, Any], rows: int, length: int) -> int:
    """Bytes of hidden channels that this rank sends to its context-parallel ranks in a step."""
    sent = 0

    def counted(name: str) -> Any:
        call = getattr(dist, name)

        def count(*args: torch.Tensor, group: dist.ProcessGroup, **given: Any) -> Any:
            nonlocal sent
            own = args[GIVEN[name]]
            if group is context and own.dtype is torch.bfloat16:
                sent += own.nbytes * (group.size() - 1) // (group.size() if "all_to" in name else 1)
            return call(*args, group=group, **given)

        return mock.patch.object(dist, name, count)

    with open_policy(config) as policy, ExitStack() as stack:
        context = parallel_state.get_context_parallel_group()
        for name in GIVEN:
            stack.enter_context(counted(name))
        policy.train(full_rows(rows, length), SequenceNLL())
    return sent


FAMILIES: dict[str, dict[str, Any]] = {
    "falcon_h1": {},
    "granitemoehybrid": {"num_local_experts": 0},  # tensor-parallel ranks share its only group
    "lfm2": {},
    "qwen3_5_text": {},
}
CASES = {
    f"{family}, {name}": (family, of)
    for family in FAMILIES
    for name, of in {
        "CP2": layout(2, **CP2),
        "TP2xCP2+SP": layout(4, tp=2, sequence_parallel=True, **CP2),
        "CP2, all layers again": recomputed(world=2, **CP2),
        "CP2, every module again": recomputed(ALL, 2, **CP2),
    }.items()
}


@pytest.mark.parametrize("case", CASES)
def test_context_parallel_ranks_send_what_a_plan_says(ranks, checkpoint, case: str) -> None:
    family, of = CASES[case]
    raw = Case(family, of).config(checkpoint(family, **FAMILIES[family]))
    config = PolicyConfig.parse(raw)
    rows = ModelRows.of(bind_tables(config)[1])
    plan = plan_of(config, rows, of.world, SHORT["H100"], LENGTH)
    for sent in ranks.run(of.world, count_sent, raw, ROWS, LENGTH):
        assert sent == plan.time.wire_bytes["cp"]
