"""Rows of Nemotron Omni in NeMo RL, which its makers' processor lays out: they become those of
transformers' processor, to the last bit.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers

from megatron_policy.batch import BatchedDataDict
from megatron_policy.converters.architecture import FilmMedium, PatchMedium, Shell, SoundMedium
from megatron_policy.errors import BatchError
from megatron_policy.hosts.nemo_rl.rows import from_host_batch
from megatron_policy.training.checks import check_batch
from tests.hosts.fake_host import HostBatch, Packed
from tests.picture_models import IMAGE, SOUND

SIDE, BINS = 2, 5
STILL = PatchMedium(IMAGE, "pixel_values", 4, "image_grid_hw", (3 * SIDE**2,), flat=True)
FILMS = FilmMedium(IMAGE, "pixel_values_videos", 4, SIDE, 6)
CLIPS = SoundMedium(
    *(SOUND, "input_features"),
    **{"mask": "input_features_mask", "bins": BINS, "stride": 8, "spare": 8},
    **{"bins_last": True, "beyond": 1},
)
SHELL = Shell((("tower", (1,)),), "", (STILL, FILMS, CLIPS))


def find_cut() -> Callable[[torch.Tensor, int], torch.Tensor]:
    """What transformers' processor cuts pictures with, whose module needs torchvision."""
    folder = Path(transformers.__file__).parent / "models" / "nemotron_h_omni"
    tree = ast.parse((folder / "image_processing_nemotron_h_omni.py").read_text())
    (own,) = (
        each
        for each in tree.body
        if isinstance(each, ast.FunctionDef) and each.name == "convert_image_to_patches"
    )
    place: dict[str, Any] = {}
    exec(compile(ast.Module([own], []), "transformers", "exec"), place)
    found: Callable[[torch.Tensor, int], torch.Tensor] = place["convert_image_to_patches"]
    return found


def lay_out(pictures: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Pictures as the makers' processor gives them, filled up to the largest of the row."""
    sizes = torch.tensor([each.shape[1:] for each in pictures], dtype=torch.int32)
    height, width = sizes.max(0).values.tolist()
    filled = [
        F.pad(each, (0, width - each.size(2), 0, height - each.size(1)), value=9.0)
        for each in pictures
    ]
    frames = torch.ones(len(pictures), dtype=torch.long)
    return {"pixel_values": torch.stack(filled), "imgs_sizes": sizes, "num_frames": frames}


def pack(*rows: dict[str, torch.Tensor], **more: Any) -> HostBatch:
    keys = dict.fromkeys(key for row in rows for key in row)
    tokens = torch.ones(len(rows), 24, dtype=torch.long)
    packed = {key: Packed([row.get(key) for row in rows], 0) for key in keys}
    return HostBatch({"input_ids": tokens, **packed, **more})


def draw(*sizes: tuple[int, int]) -> list[torch.Tensor]:
    return [torch.randn(3, *size) for size in sizes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counted", [True, False])
def test_pictures_become_what_transformers_processor_makes_of_them(
    dtype: torch.dtype, counted: bool
) -> None:
    cut, pictures = find_cut(), [draw((4, 8)), [], draw((8, 4), (4, 4), (12, 8))]
    pictures = [[each.to(dtype) for each in own] for own in pictures]
    rows = [lay_out(own) if own else {} for own in pictures]
    for row in rows if not counted else ():
        row.pop("num_frames", None)
    found = from_host_batch(pack(*rows), SHELL)
    assert {*found} == {"input_ids", "pixel_values", "image_grid_hw"}
    assert found["pixel_values"][1] is found["image_grid_hw"][1] is None
    for row in (0, 2):
        wanted = torch.cat([cut(each[None], SIDE)[0] for each in pictures[row]])
        grids = torch.tensor(
            [[each.size(1) // SIDE, each.size(2) // SIDE] for each in pictures[row]]
        )
        assert found["pixel_values"][row].dtype == dtype
        assert torch.equal(found["pixel_values"][row], wanted)
        assert torch.equal(found["image_grid_hw"][row], grids)
    found["input_ids"][0, 1:3] = IMAGE
    for place, own in enumerate((2, 1, 6)):
        start = 1 + 3 * place + sum((2, 1, 6)[:place])
        found["input_ids"][2, start : start + own] = IMAGE
    check_batch(found, 128, SHELL.attachments, SHELL)


def test_frames_are_read_together_as_the_class_packs_them() -> None:
    """Two videos of three frames, of which the last is there twice."""
    frames = draw(*[(4, 8)] * 6)
    row = lay_out(frames) | {"num_frames": torch.tensor([3, 3])}
    found = from_host_batch(pack({}, row), SHELL)
    assert "pixel_values" not in found and found["pixel_values_videos"][0] is None
    first, second = frames[:3], frames[3:]
    wanted = [
        torch.stack([torch.cat(own[:2]), torch.cat([own[2], own[2]])]) for own in (first, second)
    ]
    assert torch.equal(found["pixel_values_videos"][1], torch.stack(wanted))


def test_clips_keep_their_frames_and_get_a_mask() -> None:
    clips = torch.randn(2, 9, BINS)
    row = {"sound_clips": clips, "sound_length": torch.tensor([8, 3])}
    found = from_host_batch(pack(row, {}), SHELL)
    assert {*found} == {"input_ids", "input_features", "input_features_mask"}
    assert torch.equal(found["input_features"][0], clips)
    assert found["input_features_mask"][0].sum(1).tolist() == [8, 3]
    assert found["input_features"][1] is found["input_features_mask"][1] is None
    found["input_ids"][0, [1, 2, 4]] = SOUND
    check_batch(found, 128, SHELL.attachments, SHELL)


ROW = lay_out(draw((4, 8), (8, 4)))
HEARD = {"sound_clips": torch.ones(2, 9, BINS), "sound_length": torch.tensor([8, 3])}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (ROW | {"imgs_sizes": ROW["imgs_sizes"][:1]}, r"row 1 has pixel_values \[2, 3, 8, 8\] and"),
        (ROW | {"imgs_sizes": ROW["imgs_sizes"] + 1}, r"imgs_sizes \[\[5, 9\], .*multiples of 2"),
        (ROW | {"imgs_sizes": ROW["imgs_sizes"] - 1}, r"imgs_sizes \[\[3, 7\], .*multiples of 2"),
        (ROW | {"imgs_sizes": ROW["imgs_sizes"] * 2}, "pass .* height and width that are not padd"),
        (ROW | {"pixel_values": torch.ones(1, 16, 12)}, r"row 1 has pixel_values \[1, 16, 12\]"),
        ({"imgs_sizes": ROW["imgs_sizes"]}, "row 1 has 'imgs_sizes' without 'pixel_values'"),
        ({"num_frames": torch.ones(1), "imgs_sizes": None}, "'num_frames' without 'pixel_values'"),
        (ROW | {"num_frames": torch.tensor([3])}, r"2 pictures or frames, but num_frames .*\[3\]"),
        (ROW | {"num_frames": torch.tensor([2, 0])}, r"2 pictures or frames, .* count \[2, 0\]"),
        (ROW | {"num_frames": torch.tensor([2])}, r"videos of \[2\] frames of sizes .* are alike"),
        (
            lay_out(draw(*[(4, 4)] * 3)) | {"num_frames": torch.tensor([1, 2])},
            r"videos of \[1, 2\] frames .* no picture is beside them",
        ),
        (HEARD | {"sound_length": torch.tensor([8])}, r"row 1 has sound_clips \[2, 9, 5\] and"),
        (HEARD | {"sound_length": torch.tensor([8, 10])}, r"sound_length \[8, 10\]: pass \[clips"),
        (HEARD | {"sound_length": torch.tensor([8, 0])}, "how many frames of each count"),
        ({"sound_clips": HEARD["sound_clips"]}, "'sound_clips' without 'sound_length'"),
    ],
)
def test_what_is_in_no_layout_is_refused_with_its_row(row: dict[str, Any], message: str) -> None:
    with pytest.raises(BatchError, match=message):
        from_host_batch(pack({}, row), SHELL)


@pytest.mark.parametrize(
    "shell", [None, Shell(SHELL.tensors, "", (PatchMedium(7, "p", 4, "g", (1,)),))]
)
@pytest.mark.parametrize("row", [ROW, HEARD])
def test_other_models_refuse_the_keys_by_name(shell: Shell | None, row: dict[str, Any]) -> None:
    taken = from_host_batch(pack(row), shell)
    assert isinstance(taken, BatchedDataDict)
    attachments = () if shell is None else shell.attachments
    with pytest.raises(BatchError, match=r"'(pixel_values|sound_clips)', which is not read"):
        check_batch(taken, 128, attachments, shell)
