"""Experts in grouped matrix products compute and learn what the loop over experts does.

A GPU takes them by itself; here they are forced onto the CPU, for which torch has them, too.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_policy.engines.megatron.layers import grouped_experts
from tests import oracle
from tests.checkpoints import make_checkpoint
from tests.dist.cases import GLOBAL_BATCH, policy_config, train_two_steps
from tests.dist.layouts import EXPERT_LAYOUTS
from tests.exact import Exact, assert_equal

VOCAB, LENGTH = 200, 24
SMALL = {"hidden": 48, "heads": 4, "layers": 2, "ffn": 40, "vocab": VOCAB}


def grouped(config: dict[str, Any], data: Any, aligned: bool) -> dict[str, Any]:
    """As `train_two_steps`, and how many grouped products there were."""
    products: list[int] = []
    product = torch.nn.functional.grouped_mm

    def counted(rows: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        products.append(len(rows))
        return product(rows, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grouped_experts, "has_grouped_products", lambda tokens: True)
        patch.setattr(torch.nn.functional, "grouped_mm", counted)
        if not aligned:
            patch.setattr(grouped_experts, "_ALIGNMENT", 7)
        seen = train_two_steps(config, "token", data, VOCAB, True)
    return seen | {"products": len(products)}


# A gated MLP; one with biases, a clamp and an offset; latent attention and shared experts.
@pytest.mark.parametrize(
    ("family", "layout"),
    [("qwen3_moe", "EP2xETP2+TP2"), ("gpt_oss", "EP2"), ("deepseek_v3", "EP2xPP2")],
)
def test_grouped_products_learn_what_transformers_does(ranks, tmp_path, family, layout) -> None:
    path = make_checkpoint(tmp_path, family, **SMALL)
    data = oracle.make_batch(2 * GLOBAL_BATCH, LENGTH, VOCAB)
    logits = Exact.of(path, lambda m: m(data["input_ids"]).logits)
    hf = oracle.Learned.of(path, data, GLOBAL_BATCH, oracle.token_level)
    case = EXPERT_LAYOUTS[layout]
    config = policy_config(path, case.megatron, logprob_batch_size=GLOBAL_BATCH)
    results = ranks.run(case.world, grouped, config, data, True)
    assert any(seen["products"] for seen in results)
    for seen in results:
        assert_equal("logits", seen["before"]["logits"], logits, layout)
        hf.assert_same_steps(seen["steps"], layout)


def test_channels_that_kernels_cannot_take_are_computed_one_expert_at_a_time(
    ranks, tmp_path
) -> None:
    path = make_checkpoint(tmp_path, "mixtral", **SMALL)
    data = oracle.make_batch(2 * GLOBAL_BATCH, LENGTH, VOCAB)
    (seen,) = ranks.run(1, grouped, policy_config(path, {}), data, False)
    assert seen["products"] == 0


@pytest.mark.parametrize("counts", [[3, 0, 8, 1], [0, 0, 0, 5], [16, 8, 0, 24]])
def test_every_token_has_a_row_of_its_expert_in_whole_units(counts: list[int]) -> None:
    places, padded = grouped_experts._padded_places(torch.tensor(counts))
    assert [number % 8 for number in padded.tolist()] == [0] * len(counts)
    assert all(0 <= new - old < 8 for new, old in zip(padded.tolist(), counts, strict=True))
    expected, start = [], 0
    for count, whole in zip(counts, padded.tolist(), strict=True):
        expected += range(start, start + count)
        start += whole
    assert places.tolist() == expected
