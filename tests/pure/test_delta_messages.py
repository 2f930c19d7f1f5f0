"""Messages of changed elements: what is applied is what was sent, and can be undone; nothing
damaged, of other weights, or out of order is accepted.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from megatron_policy.converters.rows.regions import Region, flatten
from megatron_policy.errors import RefitError
from megatron_policy.refit.deltas.arrays import pad_words
from megatron_policy.refit.deltas.codec import encode, sum_elements, take_changes, view_bits
from megatron_policy.refit.deltas.message import (
    Fragment,
    decode_message,
    encode_message,
)
from megatron_policy.refit.deltas.patching import OtherWeightsError, Patches
from tests.refit_trainer import FORMS, weights

DRAWS = 200


def halves(shape: tuple[int, ...]) -> tuple[tuple[Region, ...], ...]:
    """The elements of a tensor as two ranks hold them, that split its last dimension."""
    if len(shape) < 2 or shape[-1] % 2:
        return ((Region(shape, tuple([1] * len(shape)), 0),),) if len(shape) < 2 else ()
    rows, columns = shape[0], shape[-1]
    half = columns // 2
    quarter = Region((rows, half // 2), (columns, 1), half)
    second = quarter, quarter._replace(offset=half + half // 2)
    return (Region((rows, half), (columns, 1), 0),), second


def taken(tensor: Tensor, regions: tuple[Region, ...]) -> Tensor:
    return torch.cat([tensor.view(-1).as_strided(*r).reshape(-1) for r in regions])


def fragments(old: dict[str, Tensor], new: dict[str, Tensor]) -> Iterator[Fragment]:
    for name, (shape, dtype) in FORMS.items():
        for regions in halves(shape):
            before, now = (view_bits(taken(of[name], regions)) for of in (old, new))
            found = take_changes(now, pad_words(before))
            yield Fragment(
                name,
                dtype,
                shape,
                tuple(map(flatten, regions)),
                encode(found.values, found.gaps, now),
                f"{sum_elements(now):016x}",
            )


def changed(old: dict[str, Tensor], seed: int, share: float = 0.05) -> dict[str, Tensor]:
    """Weights of which that share is new."""
    torch.manual_seed(seed)
    return {
        name: torch.where(torch.rand(of.shape) < share, torch.randn(of.shape).to(of.dtype), of)
        for name, of in old.items()
    }


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(one[name].view(-1), other[name].view(-1)) for name in one)


V0 = weights(1)
V1 = changed(V0, 1)
V2 = changed(V1, 2)
FIRST, SECOND = (encode_message([*fragments(*pair)]) for pair in ((V0, V1), (V1, V2)))


def copy_of(of: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in of.items()}


def apply(held: dict[str, Tensor], *messages: bytes) -> Patches:
    patches = Patches(held)
    for message in messages:
        patches.apply(decode_message(message))
    return patches


def test_messages_of_split_tensors_make_one_version_the_next_and_can_be_undone() -> None:
    held = copy_of(V0)
    patches = apply(held, FIRST, SECOND)
    patches.check()
    assert same(held, V2)
    patches.undo()
    assert same(held, V0)
    assert [*decode_message(FIRST)] == [*fragments(V0, V1)]


def test_what_many_deltas_overwrite_is_kept_in_twice_the_bytes_of_the_weights_at_most() -> None:
    held, now = copy_of(V0), V0
    patches = Patches(held)
    for seed in range(40):
        before, now = now, changed(now, seed, (0.02, 0.3, 0.9)[seed % 3])
        patches.apply(decode_message(encode_message([*fragments(before, now)])))
    patches.check()
    assert same(held, now)
    kept = [each.nbytes for restore in patches._overwritten for each in restore.args]
    assert sum(kept) <= 2 * sum(tensor.nbytes for tensor in held.values())
    patches.undo()
    assert same(held, V0)


@pytest.mark.parametrize("messages", [(SECOND,), (SECOND, FIRST), (FIRST, SECOND, FIRST)])
def test_a_delta_that_is_lost_reordered_or_repeated_is_refused_by_its_result(
    messages: tuple[bytes, ...],
) -> None:
    held = copy_of(V0)
    patches = apply(held, *messages)
    with pytest.raises(OtherWeightsError, match="another digest"):
        patches.check()
    patches.undo()
    assert same(held, V0)


def test_messages_in_whatever_order_make_the_version_of_the_last_one_or_are_refused() -> None:
    draw, versions = random.Random(0), [V0, V1, V2, changed(V2, 3)]
    messages = [encode_message([*fragments(*pair)]) for pair in pairwise(versions)]
    accepted = 0
    for _ in range(DRAWS):
        numbers = draw.choices(range(3), k=draw.randint(1, 4))
        held = copy_of(V0)
        patches = apply(held, *(messages[number] for number in numbers))
        try:
            patches.check()
        except OtherWeightsError:
            patches.undo()
            assert same(held, V0)
        else:
            assert same(held, versions[numbers[-1] + 1])
            accepted += 1
    assert 0 < accepted < DRAWS / 2


def test_no_damaged_message_is_accepted_as_another_one() -> None:
    draw = random.Random(0)
    for _ in range(DRAWS):
        content = bytearray(FIRST)
        match draw.randrange(3):
            case 0:
                content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
            case 1:
                del content[draw.randrange(len(content)) :]
            case _:
                at = draw.randrange(len(content))
                content[at : at + 3] = draw.randbytes(draw.randrange(6))
        held = copy_of(V0)
        patches = Patches(held)
        try:
            patches.apply(decode_message(bytes(content)))
            patches.check()
        except RefitError:
            patches.undo()
            assert same(held, V0)
        else:
            # A region that says less, or the name of a dtype: the result is still right.
            assert same(held, V1) or bytes(content) == FIRST


def test_a_message_of_another_version_is_refused_with_the_fix() -> None:
    """Its sums are other ones."""
    older = b"MPDELTA2" + FIRST[8:]
    with pytest.raises(
        RefitError, match=r"MPDELTA2.*use the same version of megatron-policy on both"
    ):
        decode_message(older)


@pytest.mark.parametrize("form", [((3,), torch.float32), None])
def test_a_delta_of_another_model_is_refused(form: tuple | None) -> None:
    held = copy_of(V0)
    del held["embed"]
    if form is not None:
        held["embed"] = torch.zeros(form[0], dtype=form[1])
    with pytest.raises(OtherWeightsError, match="embed"):
        apply(held, FIRST)


@pytest.mark.parametrize(
    ("region", "flat"),
    [
        (Region((2, 3, 4), (12, 4, 1), 5), Region((24,), (1,), 5)),
        (Region((2, 1, 4), (8, 9, 1), 0), Region((2, 4), (8, 1), 0)),
        (Region((4, 2), (1, 4), 0), Region((4, 2), (1, 4), 0)),
        (Region((), (), 7), Region((1,), (1,), 7)),
        (Region((1, 1), (3, 3), 2), Region((1,), (1,), 2)),
    ],
)
def test_a_region_in_fewer_dimensions_has_the_same_elements_in_order(
    region: Region, flat: Region
) -> None:
    assert flatten(region) == flat
    elements = torch.arange(64)
    assert elements.as_strided(*region).flatten().equal(elements.as_strided(*flat).flatten())
