"""A pickle from elsewhere: it is read as data, or refused, and changes nothing that is real."""

from __future__ import annotations

import collections
import pathlib
import pickle
import pickletools
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import filesystem, metadata, planner

from megatron_policy.converters.formats import dist_metadata
from megatron_policy.converters.formats.dist_metadata import METADATA, read_metadata
from megatron_policy.converters.formats.unpickled import Made, Name, unpickled
from megatron_policy.errors import ConversionError

DATA = "__0_0.distcp"
REAL = (
    *(each for each in vars(metadata).values() if isinstance(each, type)),
    *(each for each in vars(planner).values() if isinstance(each, type)),
    *(each for each in vars(pathlib).values() if isinstance(each, type)),
    filesystem._StorageInfo,
    torch.Size,
    collections.OrderedDict,
    type(torch.float32),
    type(torch.strided),
)
"""Classes that the tree before handed to a pickle, and what they are made of."""


def state_of_the_real() -> list[tuple[type, dict[str, Any]]]:
    # What pickling a class's objects, as these tests do, notes of it is left out.
    return [
        (each, {name: value for name, value in vars(each).items() if name != "__slotnames__"})
        for each in dict.fromkeys(REAL)
    ]


@pytest.fixture(autouse=True)
def nothing_real_changes() -> Any:
    before = state_of_the_real()
    yield
    after = state_of_the_real()
    for (kind, held), (_, now) in zip(before, after, strict=True):
        for name in set(now) - set(held):  # the next test is not to suffer
            delattr(kind, name)
    assert after == before


def anything(name: Name) -> bool:
    return True


def described(tensors: int = 2, chunks: int = 3) -> metadata.Metadata:
    """Of some tensors of float32, in rows, and of an object; with all that may stand beside."""
    held: dict[str, Any] = {"rng_state/shard_0_1": metadata.BytesStorageMetadata()}
    places = {metadata.MetadataIndex("rng_state/shard_0_1"): filesystem._StorageInfo(DATA, 0, 9)}
    for number in range(tensors):
        boxes = [
            metadata.ChunkStorageMetadata(torch.Size((2 * row, 0)), torch.Size((2, 4)))
            for row in range(chunks)
        ]
        held[f"w{number}"] = metadata.TensorStorageMetadata(
            metadata.TensorProperties(dtype=torch.float32), torch.Size((2 * chunks, 4)), boxes
        )
        for index, box in enumerate(boxes):
            at = metadata.MetadataIndex(f"w{number}", box.offsets, index)
            places[at] = filesystem._StorageInfo(DATA, 40 * len(places), 40)
    beside = metadata.StorageMeta(checkpoint_id=Path("/a/b"), save_id="c", modules=["d"])
    return metadata.Metadata(held, {"w0": ("w0", 1)}, places, beside)


def in_directory(root: Path, content: bytes) -> Path:
    (root / METADATA).write_bytes(content)
    (root / DATA).write_bytes(bytes(4000))
    return root


def refusal(root: Path, content: bytes) -> str:
    with pytest.raises(ConversionError) as caught:
        read_metadata(in_directory(root, content))
    assert str(root) in str(caught.value) and len(str(caught.value)) < 500
    return str(caught.value)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_what_torch_writes_is_read_in_every_protocol(tmp_path: Path, protocol: int) -> None:
    keys, objects = read_metadata(in_directory(tmp_path, pickle.dumps(described(), protocol)))
    assert list(keys) == ["w0", "w1"] and objects == {
        "rng_state/shard_0_1": (tmp_path / DATA, 0, 9)
    }
    assert (keys["w1"].dtype, keys["w1"].shape) == (torch.float32, (6, 4))
    assert keys["w1"].chunks == tuple(((row, 0), (2, 4)) for row in (0, 2, 4))
    assert keys["w1"].records == tuple((tmp_path / DATA, 40 * n, 40) for n in (4, 5, 6))


def test_members_of_enums_paths_and_ordered_dicts_are_read_however_they_are_pickled(
    tmp_path: Path,
) -> None:
    class Older(pickle.Pickler):
        """As Python 3.11 pickles members of enums, and 3.13 paths."""

        def reducer_override(self, value: Any) -> Any:
            if isinstance(value, metadata._MEM_FORMAT_ENCODING):
                return getattr, (type(value), value.name)
            return NotImplemented

    held = described()
    held.planner_data = collections.OrderedDict(held.planner_data)
    with (tmp_path / "made").open("wb") as file:
        Older(file, 4).dump(held)
    content = (tmp_path / "made").read_bytes()
    assert b"getattr" in content
    keys, _ = read_metadata(in_directory(tmp_path, content))
    assert list(keys) == ["w0", "w1"]


def test_objects_and_classes_stay_names_and_plain_values_what_they_are() -> None:
    value = {"a": [1, -2, 2**40, 1.5, True, None, b"x", ("ä", ())], "b": {}}
    assert unpickled(pickle.dumps(value, 4), anything) == value
    made = unpickled(pickle.dumps(Path("/a/b"), 4), anything)
    assert isinstance(made, Made) and made.by.module.startswith("pathlib")
    assert unpickled(pickle.dumps(torch.float32), anything) == Name("torch", "float32")


def named(module: str, name: str) -> bytes:
    return b"c" + f"{module}\n{name}\n".encode()


def text(value: str) -> bytes:
    return pickle.SHORT_BINUNICODE + bytes([len(value)]) + value.encode()


CHECKPOINT = "torch.distributed.checkpoint"
TARGETS = [
    (f"{CHECKPOINT}.metadata", "Metadata"),
    (f"{CHECKPOINT}.metadata", "TensorProperties"),
    (f"{CHECKPOINT}.metadata", "_MEM_FORMAT_ENCODING"),
    (f"{CHECKPOINT}.filesystem", "_StorageInfo"),
    (f"{CHECKPOINT}.planner", "SavePlan"),
    ("pathlib", "PurePath"),
    ("pathlib", "Path"),
]


@pytest.mark.parametrize(("module", "name"), TARGETS)
@pytest.mark.parametrize("kept", [False, True], ids=["refused", "valid"])
def test_no_pickle_sets_an_attribute_of_a_class_it_names(
    tmp_path: Path, module: str, name: str, kept: bool
) -> None:
    """The fixture looks; a valid rest would let the file pass for a checkpoint."""
    slots = pickle.EMPTY_DICT + text("polluted") + text("yes") + pickle.SETITEM
    evil = named(module, name) + pickle.NONE + slots + pickle.TUPLE2 + pickle.BUILD + pickle.POP
    rest = pickle.dumps(described(), 2)[2:] if kept else pickle.NONE + pickle.STOP
    assert "unreadable" in refusal(tmp_path, pickle.PROTO + b"\2" + evil + rest)


def test_what_a_pickle_names_from_elsewhere_is_named_and_refused(tmp_path: Path) -> None:
    for module, name in [("os", "system"), ("builtins", "eval"), ("torch", "load"), ("a.b", "c")]:
        assert f"references {module}.{name}" in refusal(tmp_path, named(module, name) + b".")


def nested(depth: int) -> bytes:
    """A tuple of two tuples, the same twice, of two tuples, and so on."""
    return pickle.EMPTY_TUPLE + (pickle.BINPUT + b"\0" + pickle.BINGET + b"\0\x86") * depth


BOMBS = {
    "a hash that takes forever": pickle.EMPTY_DICT + nested(80) + pickle.NONE + pickle.SETITEM,
    "a set of the same": b"\x8f(" + nested(80) + b"\x90",
    "an integer of a gigabyte": pickle.LONG4 + struct.pack("<i", 2**30),
    "an integer of ten bytes": pickle.LONG1 + b"\x0a" + b"\x7f" * 10,
    "a text longer than the file": pickle.BINUNICODE8 + struct.pack("<Q", 2**62),
    "bytes longer than the file": pickle.BINBYTES8 + struct.pack("<Q", 2**62),
    "a list in itself": b"]q\0h\0a",
    "tuples in tuples": pickle.EMPTY_TUPLE + pickle.TUPLE1 * 100_000,
    "lists in lists": pickle.EMPTY_LIST * 50_000 + pickle.APPEND * 49_999,
    "marks alone": pickle.MARK * 100_000,
    "names without an end": b"c" * 100_000,
    "nothing": b"",
    "a memo entry far away": pickle.NONE + pickle.LONG_BINPUT + b"\xff\xff\xff\x7f",
    "an extension's code": b"\x82\1",
    "a persistent id": pickle.NONE + pickle.BINPERSID,
    "a call of a call": named("torch", "Size") + b")R" + b")R",
    "an instance of nothing": pickle.NONE + b")\x81",
    "a state twice": named("torch", "Size") + b")\x81}b}b",
    "more off the stack than on it": pickle.TUPLE3,
    "an uneven dict": pickle.EMPTY_DICT + pickle.MARK + pickle.NONE + pickle.SETITEMS,
}


@pytest.mark.parametrize("content", BOMBS.values(), ids=BOMBS)
def test_a_pickle_that_is_made_to_hurt_is_refused_with_its_file(
    tmp_path: Path, content: bytes
) -> None:
    assert METADATA in refusal(tmp_path, b"\x80\4" + content + pickle.STOP)


def test_chunks_that_stand_for_many_tensors_are_not_walked_for_each(tmp_path: Path) -> None:
    """5,000 tensors share one list of 5,000 chunks: all would be 25 million."""
    held = described(tensors=1, chunks=5_000)
    first = held.state_dict_metadata["w0"]
    held.state_dict_metadata |= {f"x{number}": first for number in range(5_000)}
    assert "more chunks than records" in refusal(tmp_path, pickle.dumps(held))


def test_a_chunk_larger_than_its_record_is_refused_before_memory_is_asked_for(
    tmp_path: Path,
) -> None:
    held = described(tensors=1, chunks=1)
    box = metadata.ChunkStorageMetadata(torch.Size((0, 0)), torch.Size((2**40, 2**20)))
    whole = metadata.TensorStorageMetadata(
        metadata.TensorProperties(dtype=torch.float32), box.sizes, [box]
    )
    held.state_dict_metadata["w0"] = whole
    assert "does not fit into its 40 bytes" in refusal(tmp_path, pickle.dumps(held))


@pytest.mark.parametrize(
    "change",
    [
        lambda held: setattr(held, "storage_data", None),
        lambda held: setattr(held, "state_dict_metadata", []),
        lambda held: held.storage_data.clear(),
        lambda held: setattr(held.state_dict_metadata["w0"], "chunks", None),
        lambda held: setattr(held.state_dict_metadata["w0"], "chunks", ["x"]),
        lambda held: setattr(held.state_dict_metadata["w0"], "size", 7),
        lambda held: setattr(held.state_dict_metadata["w0"], "size", (1,) * 100_000),
        lambda held: setattr(held.state_dict_metadata["w0"], "properties", None),
        lambda held: setattr(held.state_dict_metadata["w0"].properties, "dtype", "float32"),
        lambda held: setattr(held.state_dict_metadata["w0"].chunks[0], "sizes", (2,)),
        lambda held: setattr(held.state_dict_metadata["w0"].chunks[0], "offsets", (-2, 0)),
        lambda held: setattr(next(iter(held.storage_data.values())), "offset", -1),
        lambda held: setattr(next(iter(held.storage_data.values())), "length", 2.5),
        lambda held: setattr(next(iter(held.storage_data.values())), "relative_path", None),
    ],
)
def test_a_field_of_another_kind_is_refused_with_its_file(
    tmp_path: Path, change: Callable[[metadata.Metadata], object]
) -> None:
    held = described()
    change(held)
    assert METADATA in refusal(tmp_path, pickle.dumps(held))


def test_a_name_of_a_file_that_no_file_can_have_is_refused(tmp_path: Path) -> None:
    held = described()
    next(iter(held.storage_data.values())).relative_path = "a\0b"
    assert r"'a\x00b', which is not in its directory" in refusal(tmp_path, pickle.dumps(held))


def test_a_tuple_of_shared_tuples_where_a_number_belongs_is_refused(tmp_path: Path) -> None:
    """Written out it would have 2**80 parts."""
    held, value = described(tensors=1, chunks=1), ()
    for _ in range(80):
        value = (value, value)
    next(iter(held.storage_data.values())).length = value
    assert "expected a size or an offset, found a tuple" in refusal(tmp_path, pickle.dumps(held, 4))


def test_tuples_in_tuples_where_a_number_belongs_are_refused(tmp_path: Path) -> None:
    whole = pickle.dumps(described(tensors=1, chunks=1), 4)
    length = whole.rindex(b"\x8c\x06length\x94") + len(b"\x8c\x06length\x94")
    after = next(at for _, _, at in pickletools.genops(whole) if at is not None and at > length)
    deep = pickle.EMPTY_TUPLE + pickle.TUPLE1 * 100_000
    assert whole[2:3] == pickle.FRAME  # whose length would no longer be right
    changed = whole[:2] + whole[11:length] + deep + whole[after:]
    assert "expected a size or an offset, found a tuple" in refusal(tmp_path, changed)


def test_every_change_of_a_real_file_is_refused_or_read(tmp_path: Path) -> None:
    choose = random.Random(9)
    whole = pickle.dumps(described(), 4)
    steps = [bytes([code]) for code in range(256)]
    outcomes: collections.Counter[str] = collections.Counter()
    in_directory(tmp_path, b"")
    for _ in range(1500):
        content = bytearray(whole)
        for _ in range(choose.randrange(1, 4)):
            at = choose.randrange(len(content))
            cut = choose.choice((0, 1, 1, 7))
            content[at : at + cut] = b"".join(choose.choices(steps, k=choose.randrange(3)))
        (tmp_path / METADATA).write_bytes(content)
        try:
            read_metadata(tmp_path)
            outcomes["read"] += 1
        except ConversionError as error:
            assert str(tmp_path) in str(error)
            outcomes["refused"] += 1
    assert min(outcomes.values()) > 20, outcomes


VALUES = (
    b"N", b"\x88", b")", b"]", b"}", b"K\1", b"J\xff\xff\xff\xff", text("dtype"), text("torch"),
    text("Size"), text("offset"), text("state_dict_metadata"), text("__setstate__"),
    *(named(module, name) for module, name in TARGETS), named("torch", "Size"),
    named("torch", "float32"), named("builtins", "getattr"), named("collections", "OrderedDict"),
    named("megatron.core.x", "Y"), b"(", b"h\0", b"h\1",
)  # fmt: skip
ACTIONS = (b"b", b"R", b"\x81", b"\x93", b"s", b"u", b"a", b"e", b"t", b"\x85", b"\x86", b"\x87")
ACTIONS += (b"0", b"q\0", b"q\1", b"\x94", b"1")


def test_every_program_of_pickle_instructions_gives_inert_values_or_a_value_error() -> None:
    choose, read = random.Random(3), 0
    for _ in range(20_000):
        program = b"".join(choose.choices((*VALUES, *ACTIONS), k=choose.randrange(41))) + b"."
        try:
            found = unpickled(program, dist_metadata._belongs)
        except ValueError:
            continue
        read += 1
        assert type(found) in {type(None), bool, int, str, tuple, list, dict, Name, Made}, program
    assert read > 500
