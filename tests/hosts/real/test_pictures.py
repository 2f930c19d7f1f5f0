"""What the host itself packs for towers that see and hear, dealt to ranks and planned by it, as a
policy reads it.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_policy.hosts.nemo_rl.rows import from_host_batch
from megatron_policy.packing.plan import Plan
from tests.hosts.real import host
from tests.picture_models import CLIPS, KEYS, make_rows
from tests.unit.test_omni_rows import SHELL, SIDE, find_cut

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
    assert "input_features" in keys or family not in CLIPS
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


class NemotronH_Nano_Omni_Reasoning_V3Processor:
    """Gives pictures as they are, of any size, as the makers' processor does, whose name the host
    knows.
    """

    tokenizer = SimpleNamespace(model_input_names=["input_ids"])
    model_input_names = ("input_ids", "pixel_values")

    def __call__(self, text: str, images: list[torch.Tensor], return_tensors: Any) -> Any:
        alike = len({each.shape for each in images}) == 1
        pixels: Any = torch.stack(images) if alike else images
        return {"input_ids": torch.ones(1, len(images)).long(), "pixel_values": pixels}


def test_pictures_of_nemotron_omni_are_padded_by_the_host_and_read_without() -> None:
    from nemo_rl.data import multimodal_utils as utils

    if not hasattr(utils, "attach_image_model_inputs_to_message"):
        pytest.skip("this release has no such pictures")
    sizes = [[(4, 8)], [(8, 4), (4, 4), (12, 8)], [(8, 8), (8, 8)], []]
    pictures = [[torch.randn(3, *size) for size in own] for own in sizes]
    messages: list[dict[str, Any]] = [{} for _ in sizes]
    for message, own in zip(messages, pictures, strict=True):
        utils.attach_image_model_inputs_to_message(
            message,
            images=own,
            processor=NemotronH_Nano_Omni_Reasoning_V3Processor(),
            pad_dynamic_image_shapes=True,
        )
    assert {*messages[0]} == {"pixel_values", "imgs_sizes", "num_frames"}
    empty = {key: utils.PackedTensor.empty_like(each) for key, each in messages[0].items()}
    rows = {
        key: utils.PackedTensor.concat([(message or empty)[key] for message in messages])
        for key in messages[0]
    }
    cut = find_cut()
    data = host.batch(rows | {"input_ids": torch.ones(4, 24).long(), "number": torch.arange(4)})
    for shard in data.shard_by_batch_size(2, batch_size=4):
        taken = from_host_batch(shard, SHELL)
        for place, row in enumerate(taken["number"].tolist()):
            found, grids = taken["pixel_values"][place], taken["image_grid_hw"][place]
            assert (found is None) == (grids is None) == (not sizes[row])
            if sizes[row]:
                wanted = [cut(each[None], SIDE)[0] for each in pictures[row]]
                assert torch.equal(found, torch.cat(wanted))
                assert torch.equal(grids, torch.tensor(sizes[row]) // SIDE)
