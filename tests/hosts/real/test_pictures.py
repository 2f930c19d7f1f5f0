"""What the host itself packs for towers that see and hear, dealt to ranks and planned by it, as a
policy reads it.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_policy.converters.architecture import PictureMedium, Shell
from megatron_policy.errors import BatchError
from megatron_policy.hosts.nemo_rl.rows import from_host_batch
from megatron_policy.packing.microbatch import inside
from megatron_policy.packing.plan import Plan
from megatron_policy.training.checks import check_batch
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


@pytest.mark.parametrize("key", ["mm_token_type_ids", "token_type_ids", "none"])
def test_teachers_know_what_was_drawn_where_types_of_tokens_say_it(key: str) -> None:
    """The host's collector gives teachers no mask, but what its rows have of pictures."""
    pytest.importorskip("datasets", reason="the host's messages need it")
    from nemo_rl.data.llm_message_utils import batched_message_log_to_flat_message
    from nemo_rl.data.multimodal_utils import PackedTensor
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict as HostBatch

    if key not in (*HostBatch.ADDITIONAL_OPTIONAL_KEY_TENSORS, "none"):
        pytest.skip("this release gives no such types")
    medium = PictureMedium(7, "pixel_values", 1, patch=2, channels=3, fixed=(2, 4))
    shell = Shell((("tower", (1,)),), "", (medium,), both_ways=key == "token_type_ids")
    asked, types = torch.tensor([1, 7, 7, 1]), torch.tensor([0, 1, 1, 0])
    picture = PackedTensor(torch.ones(1, 3, 2, 4), dim_to_pack=0)
    prompt = {"role": "user", "content": "", "token_ids": asked, "pixel_values": picture}
    answers = [[5, 7, 2], [5, 2]]
    logs = [
        [
            prompt if key == "none" else prompt | {key: types},
            {"role": "assistant", "content": "", "token_ids": torch.tensor(answer)},
        ]
        for answer in answers
    ]
    flat, lengths = batched_message_log_to_flat_message(logs, pad_value_dict={"token_ids": 0})
    ids = {"input_ids": flat["token_ids"], "input_lengths": lengths}
    given = from_host_batch(host.batch(ids | flat.get_multimodal_dict(as_tensors=False)))
    if key == "none":
        with pytest.raises(BatchError, match=r"row 0 has 3 tokens 7, 0 of them drawn .* make 2"):
            check_batch(given, 9, shell.attachments, shell)
        return
    checked = check_batch(given, 9, shell.attachments, shell)
    found = shell.find_types(checked, inside(checked))
    assert found.tolist() == [[*types.tolist(), 0, 0, 0]] * 2


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
