"""What the host itself packs for towers that see and hear, dealt to ranks and planned by it, as a
policy reads it.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from megatron_policy.hosts.nemo_rl.host_imports import from_host_batch
from megatron_policy.packing.plan import Plan
from tests.hosts.real import host
from tests.picture_models import CLIPS, KEYS, SOUNDS, make_rows

PLANS: dict[str, dict[str, Any]] = {
    "rows": {},
    "packed": {
        "sequence_packing_args": {
            "max_tokens_per_microbatch": 80,
            "input_key": "input_ids",
            "input_lengths_key": "input_lengths",
            "algorithm": "modified_first_fit_decreasing",
            "sequence_length_pad_multiple": 4,
        }
    },
    "dynamic": {
        "dynamic_batching_args": {
            "max_tokens_per_microbatch": 80,
            "input_key": "input_ids",
            "input_lengths_key": "input_lengths",
            "sequence_length_round": 4,
        }
    },
}


def pack(rows: dict[str, Any], keys: list[str], shared: bool) -> dict[str, Any]:
    """As the host's rollouts leave them; if `shared`, what two rows have is there once."""
    from nemo_rl.data.multimodal_utils import PackedTensor

    packed = {}
    for key in keys:
        own = [PackedTensor([each], dim_to_pack=0) for each in rows[key]]
        if shared:
            own[1].enable_deduplication()
            own = [each.enable_deduplication() for each in own]
            own[2] = copy.deepcopy(own[1])
        packed[key] = PackedTensor.concat(own)
    return rows | packed


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("family", ["qwen3_vl", *CLIPS])
def test_what_the_host_deals_to_ranks_has_the_media_of_its_rows(
    family: str, plan: str, shared: bool
) -> None:
    rows = dict(make_rows(family))
    keys = [key for key in KEYS if key in rows]
    assert {*SOUNDS} <= {*keys} or family not in CLIPS
    for key in keys if shared else ():
        rows[key][2] = rows[key][1]
    rows["number"] = torch.arange(8)
    shards = host.batch(pack(rows, keys, shared)).shard_by_batch_size(
        2, batch_size=8, **PLANS[plan]
    )
    shards = shards[0] if isinstance(shards, tuple) else shards
    seen: list[int] = []
    for shard in shards:
        taken = from_host_batch(shard)
        assert (Plan.of(taken) is not None) == (plan != "rows")
        for place, row in enumerate(taken["number"].tolist()):
            seen.append(row)
            for key in keys:
                found, wanted = taken[key][place], rows[key][row]
                assert (found is None) == (wanted is None)
                assert found is None or torch.equal(found, wanted)
    assert sorted(seen) == list(range(8))
