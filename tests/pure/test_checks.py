"""What is refused before it is computed with, by key and row."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from megatron_policy.batch import BatchedDataDict
from megatron_policy.converters.architecture import (
    FrameMedium,
    PatchMedium,
    PictureMedium,
    Shell,
    TileMedium,
)
from megatron_policy.converters.architecture.shell import choose_placeholders
from megatron_policy.errors import BatchError, ConversionError, LossError
from megatron_policy.interfaces import LossInputType
from megatron_policy.packing.batching import Batching
from megatron_policy.packing.microbatch import PATCHES, inside
from megatron_policy.training.checks import (
    check_batch,
    check_lengths,
    check_loss_inputs,
    check_prompts,
    check_tokens,
    check_training_data,
)

PROMPTS = torch.ones(3, 6, dtype=torch.long)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"input_lengths": torch.tensor([1])}, "lack a tensor 'input_ids'"),
        ({"input_ids": PROMPTS}, "lack a tensor 'input_lengths'"),
        ({"input_ids": PROMPTS, "input_lengths": [1, 2, 3]}, "input_lengths are a list"),
        ({"input_ids": PROMPTS[0], "input_lengths": torch.tensor([1])}, "must be"),
        ({"input_ids": PROMPTS, "input_lengths": torch.ones(3)}, "float32"),
        ({"input_ids": PROMPTS, "input_lengths": torch.tensor([1, 2])}, "must be"),
        ({"input_ids": PROMPTS, "input_lengths": torch.tensor([1, 0, 1])}, "has 0 in row 1"),
        ({"input_ids": PROMPTS, "input_lengths": torch.tensor([4, 4, 5])}, "5 in row 2.* 1 and 4"),
    ],
)
def test_what_cannot_be_continued_is_named(data: dict[str, object], message: str) -> None:
    with pytest.raises(BatchError, match=message):
        check_prompts(BatchedDataDict(data), vocab_size=9, max_length=5)


def test_prompts_of_every_length_that_leaves_room_pass() -> None:
    data = BatchedDataDict({"input_ids": PROMPTS, "input_lengths": torch.tensor([1, 4, 6])})
    found = check_prompts(data, vocab_size=9, max_length=7)
    assert torch.equal(found["input_ids"], PROMPTS)
    assert found["input_lengths"].tolist() == [1, 4, 6]


VECTORS = torch.arange(12.0).view(4, 3)


def test_attachments_are_a_tensor_or_none_for_each_row_whatever_their_size() -> None:
    """Those of other keys are as wide as the tokens; inputs that no model reads are refused."""
    keys = ("features", "pixel_values")
    data = training(features=VECTORS[:3, :2], pixel_values=[VECTORS[:2], None, VECTORS[0]])
    checked = check_training_data(data, 9, PADDED, keys)
    assert [each.tolist() for each in checked["features"]] == [[0, 1], [3, 4], [6, 7]]
    first, nothing, last = checked["pixel_values"]
    assert torch.equal(first, VECTORS[:2]) and nothing is None and torch.equal(last, VECTORS[0])
    for each in (*checked["features"], first, last):
        assert each.untyped_storage().nbytes() == each.nbytes  # it travels alone
    assert check_training_data(checked, 9, PADDED, keys)["features"][0] is not None
    with pytest.raises(BatchError, match=r"'pixel_values', .*: this model reads features beside"):
        check_training_data(data, 9, PADDED, keys[:1])
    with pytest.raises(BatchError, match=r"'features' has shape \(3, 2\), but input_ids are"):
        check_training_data(training(features=VECTORS[:3, :2]), 9)


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ([VECTORS, None, "cat.png"], "'features' has a str in row 2: the model reads a tensor"),
        ([None, None], r"'features' has shape \(2,\), but input_ids have 3 rows"),
        ({"a": 1}, "'features' is a dict: every value must be a tensor or a list"),
        ((VECTORS, None, None), "'features' is a tuple: every value must be a tensor or a list"),
    ],
)
def test_attachments_of_another_kind_are_named(features: object, message: str) -> None:
    with pytest.raises(BatchError, match=message):
        check_training_data(training(features=features), 9, PADDED, ("features",))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_a_tower_reads_is_finite(dtype: torch.dtype, value: float) -> None:
    odd = torch.zeros(4, 3, dtype=dtype)
    features = [None, odd, torch.ones(0, 3), torch.ones(2, dtype=torch.long), odd]
    data = {"input_ids": torch.ones(5, 2, dtype=torch.long), "features": features}
    check_batch(data, 9, ("features",))
    odd[2, 1] = value
    with pytest.raises(
        BatchError, match=rf"'features' has {value} in row 1 at \[2, 1\]: .* finite"
    ):
        check_batch(data, 9, ("features",))


SHELL = Shell(
    tensors=(("tower.weight", (4, 4)),),
    prefix="",
    media=(
        PatchMedium(7, "pixel_values", 4, "image_grid_thw", (5,)),
        PatchMedium(8, "films", 4, "film_grids", (5,)),
    ),
)
WHOLE = Shell(
    tensors=(("tower.weight", (4, 3, 2, 2)),),
    prefix="",
    media=(
        PictureMedium(7, "pixel_values", 4, patch=2, channels=3, sizes="image_sizes"),
        PictureMedium(8, "tiles", 1, patch=2, channels=3, fixed=(2, 5), by_row=True),
    ),
)
GRID = torch.tensor([[1, 2, 4], [1, 2, 2]])

TYPES = torch.tensor([[0] * 6, [1, 1, 0, 1, 0, 0], [2, 0, 0, 0, 0, 0]])


def pictured(**changes: object) -> BatchedDataDict:
    """Three rows: of text, with two pictures of two tokens and one, and with a film of one token
    behind which the policy has drawn a placeholder.
    """
    tokens = torch.tensor([[1, 1, 1, 1, 1, 1], [7, 7, 1, 7, 1, 1], [8, 1, 1, 8, 7, 1]])
    data = {
        "input_ids": tokens,
        "input_lengths": torch.tensor([2, 5, 6]),
        "token_mask": torch.tensor([[0, 1] + [0] * 4, [0] * 4 + [1, 0], [0, 0, 0, 1, 1, 1]]),
        "sample_mask": torch.ones(3),
        "pixel_values": [None, torch.ones(12, 5), None],
        "image_grid_thw": [None, GRID, None],
        "films": [None, None, torch.ones(4, 5)],
        "film_grids": [None, None, GRID[1:]],
    }
    return BatchedDataDict({k: v for k, v in (data | changes).items() if v is not None})


def test_pictures_that_fit_their_placeholders_pass_and_what_was_drawn_is_text() -> None:
    for changes in (
        *({}, {"mm_token_type_ids": TYPES}),
        {"mm_token_type_ids": TYPES, "token_mask": None},
        {"mm_token_type_ids": TYPES.flip(0), "sample_mask": torch.zeros(3)},
    ):
        check_batch(pictured(**changes), 9, SHELL.attachments, SHELL)
    check_training_data(pictured(), 9, PADDED, SHELL.attachments, SHELL)
    seeing = replace(SHELL, both_ways=True)
    check_batch(pictured(token_type_ids=TYPES), 9, SHELL.attachments, seeing)
    check_batch(pictured(token_type_ids=0 * TYPES), 9, SHELL.attachments, SHELL)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input_lengths": torch.tensor([2, 3, 6])}, "row 1 has 2 tokens 7.* make 3"),
        (
            {"pixel_values": [None] * 3, "image_grid_thw": [None] * 3},
            "row 1 has 3 tokens 7.* make 0",
        ),
        ({"token_mask": torch.zeros(3, 6)}, "row 2 has 1 tokens 7.* make 0"),
        ({"token_mask": torch.zeros(3, 5)}, r"'token_mask' has shape \(3, 5\), which is wrong"),
        ({"pixel_values": [None] * 3}, "row 1 has 'image_grid_thw' without 'pixel_values'"),
        ({"film_grids": None}, "row 2 has 'films' without 'film_grids'"),
        ({"pixel_values": [None, torch.ones(8, 5), None]}, "has 8 patches in row 1.* count 12"),
        ({"image_grid_thw": [None, GRID[0], None]}, r"has \[1, 2, 4\] in row 1: pass integers"),
        ({"image_grid_thw": [None, GRID - 1, None]}, "multiples of 2"),
        ({"image_grid_thw": [None, GRID + 1, None]}, "multiples of 2"),
        ({"image_grid_thw": [None, GRID.float(), None]}, "in row 1: pass integers"),
        (
            {"pixel_values": [None, torch.ones(12, 4), None]},
            r"\[12, 4\] in row 1: .* \[patches, 5",
        ),
        ({"films": [None, None, torch.ones(4)]}, r"\[4\] in row 2: .* \[patches, 5\]"),
        ({"token_mask": [[1]] * 3}, "'token_mask' has no tensor"),
        ({"image_grid_thw": [None, GRID.flip(0), None]}, r"groups of \[2, 1\].* of \[1, 2\]"),
        (
            {"pixel_values": [torch.ones(0, 5), torch.ones(12, 5), None]},
            "'pixel_values' is empty in row 0: pass None for a row that has nothing",
        ),
        ({"films": [None, None, torch.ones(4, 5).byte()]}, "'films' is torch.uint8 in row 2"),
        ({"token_type_ids": TYPES}, "has 1 in row 1 .* 0, where token 7 makes it 0"),
        ({"mm_token_type_ids": TYPES.flip(0)}, "has 2 in row 0 .* 0, where token 1 makes it 0"),
        ({"mm_token_type_ids": TYPES * (TYPES != 2)}, "has 0 in row 2 .* token 8 makes it 2"),
        (
            {"input_features": [None] * 3},
            "reads pixel_values, image_grid_thw, films, film_grids be",
        ),
    ],
)
def test_pictures_that_do_not_fit_are_named_with_their_row(
    changes: dict[str, object], message: str
) -> None:
    with pytest.raises(BatchError, match=message):
        check_batch(pictured(**changes), 9, SHELL.attachments, SHELL)


def test_the_key_that_keeps_a_model_from_its_pictures_is_named() -> None:
    with pytest.raises(BatchError, match=r"reads text alone while it is trained .* tokens .MTP."):
        check_batch(pictured(), 9, (), SHELL)
    with pytest.raises(BatchError, match=r"reads text alone. Leave it out"):
        check_batch(pictured(), 9)


def test_what_was_drawn_before_a_picture_is_text_too() -> None:
    at_S = torch.tensor([1, 0, 1, 1, 0, 1]) == 1
    drawn_S = torch.tensor([1, 1, 0, 0, 0, 1]) == 1
    assert choose_placeholders(at_S, drawn_S, 2).tolist() == [0, 0, 1, 1, 0, 0]
    assert choose_placeholders(at_S, at_S, 3).tolist() == [1, 0, 1, 1, 0, 0]
    tokens = torch.tensor([[1, 1, 7, 1, 7, 7, 1, 1]])
    row = {"pixel_values": [torch.ones(8, 5)], "image_grid_thw": [GRID[:1]]}
    data = {"input_ids": tokens, "input_lengths": torch.tensor([8]), **row}
    mask = torch.tensor([[0, 0, 1, 1, 0, 0, 0, 1]])
    masked = BatchedDataDict(token_mask=mask, **data)
    check_batch(masked, 9, SHELL.attachments, SHELL)
    types = {"mm_token_type_ids": torch.tensor([[0, 0, 0, 0, 1, 1, 0, 0]])}
    check_batch(masked | types, 9, SHELL.attachments, SHELL)
    late = {"token_mask": mask.flip(1) * (tokens != 1)}  # as if one of the picture was drawn
    with pytest.raises(BatchError, match=r"groups of \[1, 1\].* of \[2\]"):
        check_batch(masked | late, 9, SHELL.attachments, SHELL)


NOTHING: dict[str, object] = dict.fromkeys(("pixel_values", "image_grid_thw"), [None] * 3)
ONE = {"pixel_values": [None, torch.ones(8, 5), None], "image_grid_thw": [None, GRID[:1], None]}
ALL_OF_ROW_1 = torch.tensor([[0] * 6, [1] * 5 + [0], [0, 0, 0, 1, 1, 1]])
NEXT_OF_ROW_1 = ALL_OF_ROW_1 * (torch.arange(6) > 0)
ANSWER_OF_ROW_1 = ALL_OF_ROW_1 * (torch.arange(6) > 1)


VERBS: dict[str, Callable[..., object]] = {
    "score": check_batch,
    "train": check_training_data,
    "generate": partial(check_prompts, max_length=20),
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(("media", "makes"), [(NOTHING, 0), (ONE, 2)])
@pytest.mark.parametrize(
    ("mask", "types"),
    [
        *((mask, None) for mask in (None, ALL_OF_ROW_1, NEXT_OF_ROW_1)),
        *((mask, TYPES) for mask in (None, NEXT_OF_ROW_1, ANSWER_OF_ROW_1)),
    ],
)
def test_placeholders_that_nobody_says_were_drawn_need_all_their_pictures(
    verb: str,
    media: dict[str, object],
    makes: int,
    mask: torch.Tensor | None,
    types: torch.Tensor | None,
) -> None:
    """A mask of all tokens, or of all that others predict, says what is trained on, and not what
    was drawn; nor does one that counts what types of tokens say is of a picture.
    """
    rows = pictured(token_mask=mask, mm_token_type_ids=types, **media).select_indices([0, 1])
    said = f"row 1 has 3 tokens 7, 0 of them drawn .* 'pixel_values' .* make {makes}: .* token_mask"
    with pytest.raises(BatchError, match=said):
        VERBS[verb](rows, 9, attachments=SHELL.attachments, shell=SHELL)


@pytest.mark.parametrize("verb", VERBS)
def test_a_mask_excuses_what_was_drawn_alone(verb: str) -> None:
    mask = torch.tensor([[0] * 6, [0, 0, 0, 1, 1, 0]])
    check = partial(VERBS[verb], vocab_size=9, attachments=SHELL.attachments, shell=SHELL)
    check(pictured(**ONE).select_indices([0, 1]) | {"token_mask": mask})
    answer = pictured(input_ids=torch.tensor([[1] * 6, [1, 1, 7, 1, 7, 1], [8] + [1] * 5]))
    rows = (answer | {"token_mask": ANSWER_OF_ROW_1} | NOTHING).select_indices([0, 1])
    found = check(rows)
    assert not SHELL.find_types(found, inside(found)).any(), "all is drawn behind the prompt"
    with pytest.raises(BatchError, match=r"row 1 has 3 tokens 7, 1 of them drawn .* make 0"):
        check(pictured(**NOTHING).select_indices([0, 1]) | {"token_mask": mask})


def test_without_a_mask_types_say_which_placeholders_are_text() -> None:
    data = pictured(input_ids=torch.tensor([[1] * 6, [7, 7, 1, 7, 7, 1], [8, 1, 1, 8, 7, 1]]))
    del data["token_mask"]

    def check(types: list[int]) -> BatchedDataDict:
        given = torch.stack([TYPES[0], torch.tensor(types), TYPES[2]])
        given = data | {"mm_token_type_ids": given.int()}
        return check_batch(given, 9, SHELL.attachments, SHELL)

    for types in ([1, 1, 0, 1, 0, 0], [1, 1, 0, 0, 1, 0]):
        checked = check(types)
        found = SHELL.find_types(checked, inside(checked))
        assert found[1].tolist() == types and found[2].tolist() == TYPES[2].tolist()
    for types, said in (
        ([1, 1, 0, 1, 1, 0], "row 1 has 4 tokens 7, 0 of them drawn .* make 3"),
        ([0, 1, 0, 1, 1, 0], r"row 1 .* groups of \[1, 2\].* of \[2, 1\]"),
        ([1, 1, 1, 1, 0, 0], "mm_token_type_ids has 1 in row 1 at position 2"),
        ([0, 0, 0, 0, 0, 0], "mm_token_type_ids has 0 in row 1 at position 0"),
    ):
        with pytest.raises(BatchError, match=said):
            check(types)
    seen = {"token_type_ids": torch.stack([TYPES[0], TYPES[1], TYPES[2]])}
    seeing = replace(SHELL, both_ways=True)
    check_batch(data | seen, 9, SHELL.attachments, seeing)
    with pytest.raises(BatchError, match="row 1 has 4 tokens 7, 0 of them drawn"):
        check_batch(data | seen, 9, SHELL.attachments, SHELL)
    with pytest.raises(BatchError, match="'mm_token_type_ids' is list of shape"):
        check_batch(data | {"mm_token_type_ids": [[0]] * 3}, 9, SHELL.attachments, SHELL)


def test_frames_of_a_video_stand_apart_where_the_model_wants_it() -> None:
    given = {"films": torch.ones(16, 5), "film_grids": torch.tensor([[2, 2, 4]])}
    together = SHELL.media[1]
    assert isinstance(together, PatchMedium)
    assert together.list_groups(given) == [4]
    assert replace(together, by_frame=True).list_groups(given) == [2, 2]


TIMED = replace(
    SHELL, media=(SHELL.media[0], replace(SHELL.media[1], seconds="times", timeless=True))
)
FILMS = {
    "input_ids": torch.tensor([[8, 1, 1, 1, 1, 1], [7, 7, 1, 7, 1, 1], [8, 1, 8, 1, 1, 1]]),
    "films": [torch.ones(4, 5), None, torch.ones(8, 5)],
    "film_grids": [GRID[1:], None, GRID[1:].repeat(2, 1)],
}


@pytest.mark.parametrize(
    ("times", "message"),
    [
        (None, ""),
        ([None] * 3, ""),
        ([torch.ones(1), None, torch.ones(2)], ""),
        ([torch.ones(1), None, None], "row 2 has 'films' without 'times', which row 0 has: pass"),
        ([None, None, torch.ones(2)], "row 0 has 'films' without 'times', which row 2 has: pass"),
        (
            [torch.ones(2), None, torch.ones(2)],
            "'times' has .* in row 0: pass .* for each of 1 videos",
        ),
        ([torch.ones(1), None, torch.ones(1)], "in row 2: pass .* for each of 2 videos"),
        ([torch.ones(1), torch.ones(1), torch.ones(2)], "row 1 has 'times' without 'films'"),
        ([torch.ones(1), None, torch.zeros(2)], "in row 2: pass a positive number"),
    ],
)
def test_every_video_has_its_seconds_or_none_has(times: Any, message: str) -> None:
    given = pictured(**FILMS) | ({} if times is None else {"times": times})
    with pytest.raises(BatchError, match=message) if message else nullcontext():
        check_batch(given, 9, TIMED.attachments, TIMED)


def test_a_picture_of_several_frames_is_refused_where_it_has_one() -> None:
    still = replace(SHELL, media=(replace(SHELL.media[0], still=True), SHELL.media[1]))
    check_batch(pictured(), 9, still.attachments, still)
    grids = [None, torch.tensor([[2, 2, 2], [1, 2, 2]]), None]
    check_batch(pictured(image_grid_thw=grids), 9, SHELL.attachments, SHELL)
    with pytest.raises(BatchError, match=r"\[2, 2, 2\].* in row 1: .* pictures, which have one fr"):
        check_batch(pictured(image_grid_thw=grids), 9, still.attachments, still)


def test_a_row_has_pictures_or_videos_where_their_placeholders_are_the_same() -> None:
    alike = replace(SHELL, media=(SHELL.media[0], replace(SHELL.media[1], placeholder=7)))
    tokens = torch.tensor([[1] * 6, [7, 7, 1, 7, 1, 1], [7, 1, 1, 1, 1, 1]])
    data = check_batch(pictured(input_ids=tokens), 9, alike.attachments, alike)
    assert data[PATCHES].tolist() == [0, 12, 4]
    assert alike.find_types(data, torch.ones(3, 6) > 0).tolist() == TYPES.tolist()
    assert alike.split_rows(data, [2, 0, 1]) == [[2], [0], [1]]
    both = {"films": [None] + [torch.ones(4, 5)] * 2, "film_grids": [None] + [GRID[1:]] * 2}
    for changes, message in (
        (both, "row 1 has pictures and videos, whose placeholders are the same tokens 7"),
        ({"films": [None] * 3, "film_grids": [None] * 3}, "row 2 has 1 tokens 7, .* make 0"),
        ({"image_grid_thw": [None, GRID.flip(0), None]}, r"groups of \[2, 1\].* of \[1, 2\]"),
    ):
        broken = pictured(input_ids=tokens, **changes)
        with pytest.raises(BatchError, match=message):
            check_batch(broken, 9, alike.attachments, alike)


SIZES = torch.tensor([[4, 8], [4, 4]])
PIXELS = torch.stack([torch.ones(3, 4, 8), torch.ones(3, 4, 8) * (torch.arange(8) < 4)])
TILE = torch.ones(1, 3, 2, 5)


def seen_whole(**changes: object) -> BatchedDataDict:
    """The same rows with whole pictures, of which the second is smaller than the pixels, and a tile
    of two tokens in place of the film.
    """
    data = {
        "pixel_values": [None, PIXELS, None],
        "image_sizes": [None, SIZES, None],
        "tiles": [None, None, TILE],
        "token_mask": torch.zeros(3, 6),
        "image_grid_thw": None,
        "films": None,
        "film_grids": None,
    }
    tokens = torch.tensor([[1] * 6, [7, 7, 1, 7, 1, 1], [8, 8, 1, 1, 1, 1]])
    return pictured(**{"input_ids": tokens} | data | changes)


def test_whole_pictures_that_fit_their_placeholders_pass() -> None:
    batch = check_batch(seen_whole(), 9, WHOLE.attachments, WHOLE)
    given = WHOLE.join({key: batch[key] for key in WHOLE.attachments})
    assert given["tiles"].shape == (1, *TILE.shape), "rows before pictures, as the class takes them"
    assert given["pixel_values"].shape == (2, 3, 4, 8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input_lengths": torch.tensor([2, 3, 6])}, "row 1 has 2 tokens 7.* make 3"),
        ({"image_sizes": None}, "row 1 has 'pixel_values' without 'image_sizes'"),
        (
            {"image_sizes": [None, SIZES * 2, None]},
            r"\[\[8, 16\], .* multiples of 4 up to \[4, 8\]",
        ),
        ({"image_sizes": [None, SIZES - 2, None]}, r"\[\[2, 6\], .* in row 1: .* multiples of 4"),
        ({"image_sizes": [None, SIZES[:1], None]}, "in row 1: .* each of the 2 pictures"),
        (
            {"image_sizes": [None, SIZES.flip(0), None]},
            "more than zeros behind the 4 x 4 pixels .* of picture 0 of row 1",
        ),
        (
            {"input_ids": torch.tensor([[1] * 6, [7, 1, 7, 7, 1, 1], [8, 8, 1, 1, 1, 1]])},
            r"groups of \[1, 2\], but its 'image_sizes' make groups of \[2, 1\]",
        ),
        ({"image_sizes": [None, SIZES.float(), None]}, "'image_sizes' has sizes"),
        ({"pixel_values": [None, torch.ones(12, 5), None]}, r"has shape \[12, 5\] in row 1: pass"),
        (
            {"tiles": [None, None, TILE.byte()]},
            "'tiles' is torch.uint8 in row 2: pass the floating-point numbers",
        ),
        ({"tiles": [None, None, TILE.mT]}, r"'tiles' has shape .* row 2: .* 3, 2, 5\]"),
        (
            {"tiles": [None, None, torch.cat([TILE, 0 * TILE])]},
            "'tiles' has nothing but zeros in picture 1 of row 2: .* Leave out those that fill",
        ),
        (
            {"pixel_attention_mask": [None, None, torch.tensor([[[1, 1], [1, 0]]])]},
            "pixel_attention_mask leaves out pixels of row 2: .* without padding",
        ),
    ],
)
def test_whole_pictures_that_do_not_fit_are_named_with_their_row(
    changes: dict[str, object], message: str
) -> None:
    with pytest.raises(BatchError, match=message):
        check_batch(seen_whole(**changes), 9, WHOLE.attachments, WHOLE)


TILED = Shell(
    tensors=(("tower.weight", (4, 3, 1, 1)),),
    prefix="",
    media=(
        TileMedium(
            *(7, "pixel_values", 1),
            patch=1,
            channels=3,
            tile=2,
            canvases=((2, 4), (4, 4)),
            sizes="image_sizes",
            counts="batch_num_images",
        ),
    ),
)


def seen_in_tiles(**changes: object) -> BatchedDataDict:
    """Rows with a picture of 2 x 3 in 3 tiles, whose last column is padding on one side only, and
    with two that are seen as a whole alone.
    """
    data = {
        "input_ids": torch.tensor([[7] * 14 + [1] * 2, [7] * 5 + [1] + [7] * 5 + [1] * 5]),
        "input_lengths": torch.tensor([16, 16]),
        "pixel_values": [torch.ones(1, 3, 3, 2, 2), torch.ones(2, 1, 3, 2, 2)],
        "batch_num_images": [torch.tensor([1]), torch.tensor([2])],
        "image_sizes": [torch.tensor([[2, 3]]), torch.tensor([[9, 1], [1, 9]])],
    }
    return BatchedDataDict({k: v for k, v in (data | changes).items() if v is not None})


def test_pictures_in_tiles_that_fit_their_placeholders_pass() -> None:
    data = check_batch(seen_in_tiles(), 99, TILED.attachments, TILED)
    assert data[PATCHES].tolist() == [12, 8]
    of_each = [torch.tensor([1]), torch.tensor([1, 1])]
    with pytest.raises(BatchError, match=r"has 1 tiles of each picture in row 1, .* one has 3"):
        check_batch(seen_in_tiles(batch_num_images=of_each), 99, TILED.attachments, TILED)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input_lengths": torch.tensor([9, 16])}, "row 0 has 9 tokens 7.*'image_sizes' make 14"),
        ({"image_sizes": None}, "row 0 has 'pixel_values' without 'image_sizes'"),
        ({"batch_num_images": None}, "row 0 has 'pixel_values' without 'batch_num_images'"),
        (
            {"batch_num_images": [torch.tensor([2]), torch.tensor([2])]},
            r"'batch_num_images' has \[2\] in row 0, which has 1 pictures",
        ),
        (
            {"batch_num_images": [torch.tensor([1]), torch.tensor([3, -1])]},
            r"'batch_num_images' has \[3, -1\] in row 1, which has 2 pictures",
        ),
        ({"image_sizes": [GRID[:1, 1:] * 0, GRID[:, 1:]]}, r"\[\[0, 0\]\] in row 0: .* before it"),
        ({"image_sizes": [GRID[:, 1:]] * 2}, "in row 0: .* each of the 1 pictures"),
        (
            {"pixel_values": [torch.ones(1, 2, 3, 2, 2), torch.ones(2, 1, 3, 2, 2)]},
            "has 2 tiles of each picture in row 0, .* one has 3",
        ),
        (
            {"pixel_values": [torch.ones(3, 3, 2, 2), torch.ones(2, 3, 2, 2)]},
            r"has shape \[3, 3, 2, 2\] in row 0: .* \[pictures, tiles, 3, 2, 2\]",
        ),
        (
            {"pixel_values": [torch.ones(1, 3, 3, 2, 4), torch.ones(2, 1, 3, 2, 2)]},
            r"has shape \[1, 3, 3, 2, 4\] in row 0: .* \[pictures, tiles, 3, 2, 2\]",
        ),
    ],
)
def test_pictures_in_tiles_that_do_not_fit_are_named_with_their_row(
    changes: dict[str, object], message: str
) -> None:
    with pytest.raises(BatchError, match=message):
        check_batch(seen_in_tiles(**changes), 99, TILED.attachments, TILED)


FILMED = Shell(
    tensors=TILED.tensors,
    prefix="",
    media=(FrameMedium(8, "films", patch=1, channels=3, tile=3),),
)


def test_videos_in_frames_have_a_token_for_each_four_neighbours_and_one_at_the_end() -> None:
    tokens = torch.tensor([[8] * 9 + [1], [1] * 10, [8] * 10])
    data = {"input_ids": tokens, "input_lengths": torch.tensor([10, 10, 10])}
    data["token_mask"] = torch.zeros(3, 10)
    films = [torch.ones(1, 2, 3, 3, 3), None, torch.ones(2, 1, 3, 3, 3)]
    rows = check_batch(BatchedDataDict(data | {"films": films}), 9, FILMED.attachments, FILMED)
    assert rows[PATCHES].tolist() == [18, 0, 18]
    assert FILMED.split_rows(rows, [0, 1, 2]) == [[0], [1], [2]]
    for odd, message in (
        (torch.ones(1, 1, 3, 3, 3), "row 0 has 9 tokens 8, .* make 5"),
        (torch.ones(2, 3, 3, 3), r"has shape \[2, 3, 3, 3\] in row 0: .* frames, 3, 3, 3\]"),
        (torch.ones(1, 2, 3, 3, 4), r"has shape \[1, 2, 3, 3, 4\] in row 0: pass the frames"),
        (torch.ones(1, 0, 3, 3, 3), "'films' is empty in row 0: pass None"),
    ):
        broken = BatchedDataDict(data | {"films": [odd, *films[1:]]})
        with pytest.raises(BatchError, match=message):
            check_batch(broken, 9, FILMED.attachments, FILMED)


def test_canvases_that_tiles_do_not_fill_are_refused() -> None:
    with pytest.raises(ConversionError, match=r"tiles of 2 pixels, .*\(\(2, 3\),\) are multiples"):
        replace(TILED.media[0], canvases=((2, 3),))


def test_placeholders_of_prompts_are_pictures_unless_a_mask_says_they_were_drawn() -> None:
    prompts = pictured()
    found = check_prompts(prompts, 9, 8, SHELL.attachments, SHELL)
    assert found["film_grids"][2].tolist() == [[1, 2, 2]]
    again = check_prompts(found, 9, 8, SHELL.attachments, SHELL)
    assert torch.equal(again["token_mask"], prompts["token_mask"]), "a driver's workers check too"
    del prompts["token_mask"]
    with pytest.raises(BatchError, match=r"row 2 has 1 tokens 7.* make 0"):
        check_prompts(prompts, 9, 8, SHELL.attachments, SHELL)
    seeing = replace(SHELL, both_ways=True)
    found = check_prompts(prompts | {"token_type_ids": TYPES}, 9, 8, SHELL.attachments, seeing)
    assert torch.equal(seeing.find_types(found, inside(found)), TYPES), "what workers read of it"


PADDED = Batching("padded")
DYNAMIC = Batching("dynamic", 8, 4, key="dynamic_batching.train_mb_tokens")
PACKED = Batching("packed", 5, 4, key="sequence_packing.train_mb_tokens")


def training(**changes: object) -> BatchedDataDict:
    """Three rows of six positions, of lengths 1, 4 and 3, all of whose tokens count."""
    data = {
        "input_ids": PROMPTS,
        "input_lengths": torch.tensor([1, 4, 3]),
        "sample_mask": torch.ones(3),
        "token_mask": (torch.arange(6) < torch.tensor([[1], [4], [3]])).float(),
    }
    return BatchedDataDict({k: v for k, v in (data | changes).items() if v is not None})


def spoilt(rows: int, *at: int, value: float) -> torch.Tensor:
    mask = torch.ones(rows, 6) if len(at) == 2 else torch.ones(rows)
    mask[at] = value
    return mask


def test_data_whose_rows_fit_pass_and_without_lengths_rows_are_as_long_as_the_tensor() -> None:
    for batching in (PADDED, DYNAMIC, PACKED):
        check_training_data(training(), 9, batching)
        assert check_lengths(training(), batching) == [1, 4, 3]
    assert check_lengths(training(input_lengths=None), PADDED) == [6, 6, 6]


@pytest.mark.parametrize(
    ("changes", "batching", "message"),
    [
        ({"input_lengths": None}, PACKED, "lack a tensor 'input_lengths', which packed"),
        ({"input_lengths": None}, DYNAMIC, "lack a tensor 'input_lengths', which dynamic"),
        ({"input_lengths": [1, 1, 1]}, PADDED, "input_lengths are a list"),
        ({"input_lengths": torch.ones(3)}, PADDED, "float32 of shape"),
        ({"input_lengths": torch.ones(3, dtype=torch.bool)}, PACKED, "bool of shape"),
        ({"input_lengths": torch.ones(3, 6, dtype=torch.long)}, PACKED, r"integers \[3\]"),
        ({"input_lengths": torch.tensor([1, 0, 1])}, PADDED, "has 0 in row 1.* 1 and 6"),
        ({"input_lengths": torch.tensor([1, 1, 7])}, PADDED, "has 7 in row 2.* 1 and 6"),
        ({"input_lengths": torch.tensor([1, -1, 7])}, DYNAMIC, "has -1 in row 1"),
        (
            {"input_lengths": torch.tensor([1, 4, 5])},
            PACKED,
            r"row 2 has 5 tokens \(8 with padding\), more than sequence_packing.train_mb_tokens=5",
        ),
        (
            {
                "input_ids": torch.ones(3, 9, dtype=torch.long),
                "token_mask": None,
                "input_lengths": torch.tensor([1, 9, 9]),
            },
            DYNAMIC,
            r"row 1 has 9 tokens, more than dynamic_batching.train_mb_tokens=8: raise it",
        ),
        ({"input_ids": PROMPTS - 2}, PACKED, "has token -1 in row 0 at position 0"),
        ({"sample_mask": None}, PADDED, "lack 'sample_mask'"),
        ({"sample_mask": torch.ones(3, 6)}, PADDED, r"'sample_mask' has shape \(3, 6\).* \[3\]"),
        ({"sample_mask": [1, 1, 1]}, PADDED, "'sample_mask' has no tensor"),
        ({"token_mask": torch.ones(3)}, PADDED, r"'token_mask' has shape \(3,\).* \[3, 6\]"),
        ({"token_mask": torch.ones(3)}, PADDED, "wrong from row 0 on"),
        ({"token_mask": torch.ones(3, 5)}, PADDED, r"'token_mask' has shape \(3, 5\)"),
        ({"token_mask": torch.ones(3, 5)}, PADDED, "row 0 has 5 entries for 6 tokens"),
        ({"token_mask": torch.ones(2, 6)}, PADDED, "row 2 is in one of them only"),
        ({"sample_mask": spoilt(3, 1, value=float("nan"))}, PADDED, "has nan in row 1; masks"),
        (
            {"token_mask": spoilt(3, 2, 4, value=float("inf"))},
            PADDED,
            "'token_mask' has inf in row 2 at position 4",
        ),
        (
            {"token_mask": torch.ones(3, 6)},
            DYNAMIC,
            "counts position 1 of row 0, whose input_lengths is 1",
        ),
    ],
)
def test_what_cannot_be_batched_is_named(
    changes: dict[str, object], batching: Batching, message: str
) -> None:
    with pytest.raises(BatchError, match=message):
        check_training_data(training(**changes), 9, batching)


def test_a_mask_may_count_what_a_masked_out_row_has_beyond_its_length() -> None:
    mask = training()["token_mask"].clone()
    mask[0] = 1
    data = training(token_mask=mask, sample_mask=torch.tensor([0.0, 1.0, 1.0]))
    for batching in (PADDED, DYNAMIC):
        check_training_data(data, 9, batching)
        with pytest.raises(BatchError, match="token_mask counts position 1 of row 0"):
            check_training_data(training(token_mask=mask), 9, batching)


def test_only_a_rank_whose_plan_has_no_row_for_it_may_come_without_rows() -> None:
    none = BatchedDataDict({"input_ids": PROMPTS[:0]})
    with pytest.raises(BatchError, match="at least one row"):
        check_tokens(none, 9)
    none.micro_batch_indices = [[[0, 0]]]
    assert check_tokens(none, 9).shape == (0, 6)
    none["input_ids"] = torch.ones(0, 0, dtype=torch.long)
    with pytest.raises(BatchError, match="one position"):
        check_tokens(none, 9)


class Distillation:
    input_type = LossInputType.LOGPROB
    candidates = "teacher"


def entries(*at: int, value: int) -> torch.Tensor:
    """Two entries for each token of `training()`, all right but the one at a place."""
    entries_BSK = torch.full((3, 6, 2), 8)
    entries_BSK[at] = value
    return entries_BSK


@pytest.mark.parametrize(
    ("teacher", "message"),
    [
        (None, "Distillation.candidates is 'teacher', but the data lack it"),
        ([1, 2, 3], "'teacher' is a list"),
        (torch.ones(3, 6, dtype=torch.long), r"shape \(3, 6\).*must be integers \[3, 6, K\]"),
        (torch.ones(3, 5, 2, dtype=torch.long), r"must be integers \[3, 6, K\]"),
        (torch.ones(3, 6, 0, dtype=torch.long), r"must be integers \[3, 6, K\]"),
        (torch.ones(3, 6, 2), "'teacher' is torch.float32"),
        (entries(1, 3, 1, value=9), "entry 9 in row 1 at position 3, but.* has 9 entries"),
        (entries(2, 0, 0, value=-1), "entry -1 in row 2 at position 0"),
    ],
)
def test_candidates_that_are_missing_or_no_entries_of_the_vocabulary_are_named(
    teacher: object, message: str
) -> None:
    with pytest.raises(BatchError, match=message):
        check_loss_inputs(Distillation(), training(teacher=teacher), 9)


def test_candidates_beyond_a_row_are_looked_at_where_it_is_computed() -> None:
    teacher = entries(1, 4, 0, value=-100)
    check_loss_inputs(Distillation(), training(teacher=teacher), 9)
    with pytest.raises(BatchError, match="entry -100 in row 1 at position 4"):
        check_loss_inputs(Distillation(), training(teacher=teacher, input_lengths=None), 9)


def test_a_loss_that_takes_what_is_not_fed_is_told_what_is() -> None:
    loss = Distillation()
    loss.input_type = "distillation"
    with pytest.raises(NotImplementedError, match=r"'distillation'.*'logprob' loss.*`candidates`"):
        check_loss_inputs(loss, training(), 9)
    loss.input_type = "logprobs"
    with pytest.raises(LossError, match="'logprobs', which is not an input") as error:
        check_loss_inputs(loss, training(), 9)
    assert "use one of LossInputType, that is 'logprob' or 'logit', and" in str(error.value)
    assert "distil" not in str(error.value)
