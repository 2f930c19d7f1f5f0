"""Digests notice every change, manifests every difference; buffers say where tensors stand."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_policy.errors import RefitError
from megatron_policy.refit.buffers import Buffer, BufferSlice
from megatron_policy.refit.digest import DEVICE, HOST, algorithm_for, digest
from megatron_policy.refit.manifest import (
    RefitInfo,
    RefitManifest,
    ServedModel,
    TensorDigest,
    parse_info,
)

ALGORITHMS = (HOST, DEVICE)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@given(
    content=st.binary(min_size=1, max_size=200), place=st.integers(0, 10**6), bit=st.integers(0, 7)
)
def test_a_flipped_bit_changes_the_digest(
    algorithm: str, content: bytes, place: int, bit: int
) -> None:
    memory = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    before = digest(memory, algorithm)
    assert 0 <= before < 2**64
    memory[place % len(content)] ^= 1 << bit
    assert digest(memory, algorithm) != before


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_exchanged_words_lost_zeros_and_lengths_change_the_digest(algorithm: str) -> None:
    words = torch.randint(-(2**62), 2**62, (5000,), generator=torch.Generator().manual_seed(0))
    swapped = words.clone()
    swapped[[3, 4000]] = words[[4000, 3]]
    zeros = [torch.zeros(n, dtype=torch.uint8) for n in range(40)]
    found = {digest(t, algorithm) for t in (words, swapped, words[1:], words[:-1], *zeros)}
    assert len(found) == 4 + len(zeros)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_digest_is_of_the_bytes_and_not_of_where_or_as_what_they_lie(algorithm: str) -> None:
    tensor = torch.randn(37, 11, generator=torch.Generator().manual_seed(1)).bfloat16()
    flat = tensor.reshape(-1).view(torch.uint8)
    moved = torch.empty(flat.numel() + 3, dtype=torch.uint8)[3:].copy_(flat)
    assert digest(tensor, algorithm) == digest(flat, algorithm) == digest(moved, algorithm)


def test_steps_of_the_sum_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = torch.randint(0, 256, (10_007,), dtype=torch.uint8)
    whole = digest(memory, DEVICE)
    monkeypatch.setattr("megatron_policy.refit.digest._STEP", 64)
    assert digest(memory, DEVICE) == whole


def test_host_memory_has_the_fast_digest() -> None:
    assert algorithm_for(torch.zeros(1)) == HOST
    assert algorithm_for(torch.zeros(1, device="meta")) == DEVICE


SENT = {
    "a": TensorDigest((2, 3), torch.bfloat16, 2**64 - 1),
    "b": TensorDigest((), torch.float32, 0),
    "c": TensorDigest((0, 4), torch.int64, 7),
}
MANIFEST = RefitManifest(12, HOST, SENT)


def test_a_manifest_comes_back_and_accepts_what_it_lists() -> None:
    again = RefitManifest.decode(MANIFEST.encode())
    assert again == MANIFEST
    assert list(again.tensors) == list(SENT)
    assert again.total_bytes == 12 + 4
    again.check(dict(SENT))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"a": None}, "1 missing: a"),
        ({"d": TensorDigest((1,), torch.float32, 1)}, "1 not announced: d"),
        (
            {"a": TensorDigest((3, 2), torch.bfloat16, 2**64 - 1)},
            r"a \(bfloat16 \[3, 2\] instead of",
        ),
        ({"a": TensorDigest((2, 3), torch.float16, 2**64 - 1)}, r"a \(float16 \[2, 3\] instead of"),
        ({"b": TensorDigest((), torch.float32, 1)}, "1 with a wrong digest: b"),
    ],
)
def test_a_difference_is_refused_by_name(change: dict[str, TensorDigest | None], said: str) -> None:
    arrived = {name: sent for name, sent in (SENT | change).items() if sent is not None}
    with pytest.raises(RefitError, match=said) as refused:
        MANIFEST.check(arrived)
    assert "step 12" in str(refused.value)


MODEL = ServedModel({"rope_theta": 2.0, "x": None}, {"r": 4, "target_modules": ["a", "b"]})


@pytest.mark.parametrize("model", [ServedModel(), ServedModel({"a": 1}), MODEL], ids=str)
def test_what_engines_have_to_set_up_comes_back_with_the_manifest(model: ServedModel) -> None:
    sent = replace(MANIFEST, model=model)
    assert RefitManifest.decode(sent.encode()).model == model
    assert ServedModel.from_plain(model.plain()) == model
    assert model.differences(model) == []


def test_models_that_differ_are_told_apart_by_their_fields() -> None:
    other = ServedModel({"rope_theta": 3.0}, {"r": 8, "target_modules": ["a", "b"]})
    assert MODEL.differences(other) == [
        "hf_config_overrides.rope_theta is 2.0 instead of 3.0",
        "adapters.r is 4 instead of 8",
    ]
    assert "adapters.r is 4 instead of None" in MODEL.differences(ServedModel())


def test_information_on_a_refit_is_its_forms_and_travels_with_its_model() -> None:
    info = RefitInfo({"a": ((2,), torch.float32)}, MODEL)
    again = pickle.loads(pickle.dumps(info))
    assert again == info == {"a": ((2,), torch.float32)} and again.model == MODEL
    assert parse_info(info).model == MODEL and parse_info(dict(info)).model is None


def _changed(**fields: object) -> bytes:
    return json.dumps(json.loads(MANIFEST.encode()) | fields).encode()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        MANIFEST.encode()[:-1],
        _changed(format=2),
        _changed(total_bytes=15),
        _changed(total_tensors=2),
        _changed(tensors={"a": ["no_dtype", [1], "0"]}),
        _changed(tensors={"a": ["nn", [1], "0"]}),
        _changed(step="x"),
        _changed(model=7),
        _changed(model={"adapters": [4]}),
    ],
)
def test_what_is_no_manifest_is_refused(content: bytes) -> None:
    with pytest.raises(RefitError, match="manifest cannot be read"):
        RefitManifest.decode(content)


def test_a_room_shows_a_tensor_in_its_buffer() -> None:
    buffer = Buffer.on(torch.device("cpu"), 1000)
    assert buffer.memory.numel() == 1024
    buffer.memory.zero_()
    target = BufferSlice(buffer, 512)
    target.tensor((2, 3), torch.float32).fill_(1.0)
    assert target.bytes(24).view(torch.float32).tolist() == [1.0] * 6
    assert not buffer.memory[:512].any()
    assert not buffer.memory[536:].any()
    assert buffer.typed(torch.float32) is buffer.typed(torch.float32)
