"""Quantised checkpoints read as bfloat16: what transformers makes of them, bit for bit."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from typer.testing import CliRunner

from megatron_policy.cli import app
from megatron_policy.convert import convert, plan_conversion, verify
from megatron_policy.converters.config_fields.quantisation import Scheme
from megatron_policy.converters.files.raw_files import RawFiles
from megatron_policy.converters.formats import dequantising, hf_files
from megatron_policy.converters.formats import side_files as side_module
from megatron_policy.converters.formats.dequantising import ByteMatrix, Fetch, QuantisedTensor
from megatron_policy.converters.formats.hf_files import HfReader
from megatron_policy.converters.formats.side_files import side_files
from megatron_policy.errors import ConversionError
from megatron_policy.formats.tensors import FileTensors
from tests.quantised import (
    Tensors,
    dequantised_by_transformers,
    edited,
    fp8_by_transformers,
    mxfp4_by_transformers,
    quantise_fp8,
    quantise_mxfp4,
)

MIB = 2**20
Checkpoint = Callable[..., Path]
SMALL = {"layers": 2, "dtype": "bfloat16", "tokenizer": False}
UP = "model.layers.0.mlp.up_proj.weight"
STACK = "model.layers.1.mlp.experts.down_proj"


@pytest.fixture(scope="module")
def quantised(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The quantised checkpoints by family; all but gpt-oss in fp8, with cut blocks."""
    folder = tmp_path_factory.mktemp("quantised")
    made = {"gpt_oss": quantise_mxfp4(checkpoint("gpt_oss", **SMALL), folder / "gpt_oss")}
    made["deepseek_v3"] = quantise_fp8(checkpoint("deepseek_v3", **SMALL), folder / "deepseek_v3")
    skipped = {"modules_to_not_convert": ["gate", "lm_head"], "fmt": "float8_e4m3fn"}
    made["minimax_m2"] = quantise_fp8(
        checkpoint("minimax_m2", **SMALL), folder / "minimax_m2", (48, 32), **skipped
    )
    made["qwen3"] = quantise_fp8(
        checkpoint("qwen3", hidden=192, ffn=320, **SMALL), folder / "qwen3", (128, 128)
    )
    return made


FAMILIES = ("deepseek_v3", "minimax_m2", "qwen3", "gpt_oss")


def same(one: Tensor, other: Tensor) -> bool:
    """Whether dtype, shape and bits are equal; a NaN equals a NaN of any bits."""
    alike = (one.dtype, one.shape) == (other.dtype, other.shape)
    return alike and torch.allclose(one.double(), other.double(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_reading_and_conversion_both_ways_give_what_transformers_makes_of_it(
    quantised: dict[str, Path], tmp_path: Path, family: str
) -> None:
    source, expected = quantised[family], dequantised_by_transformers(quantised[family])
    convert(source, tmp_path / "mcore", "mcore", max_memory=MIB)
    convert(tmp_path / "mcore", tmp_path / "hf", "hf")
    for path in (source, tmp_path / "hf"):
        with HfReader(path) as reader:
            assert reader.shapes == {name: tuple(t.shape) for name, t in expected.items()}
            assert reader.dtypes == {name: t.dtype for name, t in expected.items()}
            for name, tensor in expected.items():
                assert torch.equal(reader.tensor(name), tensor), (path, name)
    for other in (tmp_path / "mcore", tmp_path / "hf"):
        assert verify(source, other, max_memory=MIB).equal
    before, after = (
        json.loads((path / "config.json").read_text()) for path in (source, tmp_path / "hf")
    )
    assert before.pop("quantization_config") and before == after


def test_verify_finds_a_scale_that_differs(quantised: dict[str, Path], tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        tensors[f"{UP}_scale_inv"][1, 2] *= 2

    other = edited(quantised["deepseek_v3"], tmp_path / "other", change)
    found = verify(quantised["deepseek_v3"], other)
    assert found.summary == {"values": 1}
    assert "first at [16, 32]" in found.differences[0].message


def fp8_of(rows: int, columns: int, block: tuple[int, int], seed: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(seed)
    payload = torch.randint(0, 256, (rows, columns), dtype=torch.uint8, generator=made)
    blocks = [-(-n // each) for n, each in zip((rows, columns), block, strict=True)]
    return payload.view(torch.float8_e4m3fn), torch.randn(blocks, generator=made).exp()


def in_memory(
    payload: Tensor, scales: Tensor, scheme: Scheme, shape: tuple[int, ...]
) -> tuple[QuantisedTensor, Fetch, list[int]]:
    """A quantised tensor of two matrices in memory, what fetches from them, and how many bytes
    it has fetched each time.
    """
    raw = {"payload": payload.view(torch.uint8), "scales": scales.view(torch.uint8)}
    dtypes = {"payload": payload.dtype, "scales": scales.dtype}
    matrices = [ByteMatrix(n, Path(), 0, *t.shape, dtypes[n]) for n, t in raw.items()]
    fetched: list[int] = []

    def fetch(matrix: ByteMatrix, rows: range, columns: range) -> Tensor:
        found = raw[matrix.name][rows.start : rows.stop : rows.step, columns.start : columns.stop]
        assert found.shape == (len(rows), len(columns))
        fetched.append(found.nbytes)
        return found

    return QuantisedTensor(shape, scheme, *matrices), fetch, fetched


def copied(
    tensor: QuantisedTensor, view: tuple[int, ...], index: tuple[slice, ...], fetch: Fetch
) -> Tensor:
    """The elements as they arrive in the middle of wider memory, which stays as it was."""
    taken = torch.empty(view, device="meta")[index].shape
    wide = torch.full((*taken[:-1], taken[-1] + 3), 7.0)
    tensor.copy_to(wide[..., 1:-2], view, index, fetch)
    assert (wide[..., 0] == 7).all() and (wide[..., -2:] == 7).all()
    plain = torch.empty(taken, dtype=torch.bfloat16)
    tensor.copy_to(plain, view, index, fetch)
    assert same(plain, wide[..., 1:-2].bfloat16()) and same(plain.float(), wide[..., 1:-2])
    return plain


SLICES = st.builds(
    lambda first, count, step: slice(first, first + count, step),
    st.integers(0, 30),
    st.integers(1, 40),
    st.integers(1, 3),
)


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 40), st.integers(1, 40), st.integers(1, 12), st.integers(1, 12), SLICES, SLICES
)
def test_every_slice_of_fp8_is_that_of_the_whole(
    rows: int, columns: int, high: int, wide: int, first: slice, second: slice
) -> None:
    payload, scales = fp8_of(rows, columns, (high, wide), seed=rows * columns)
    whole = fp8_by_transformers(payload, scales, (high, wide))
    scheme = Scheme("fp8", (high, wide))
    tensor, fetch, _ = in_memory(payload, scales, scheme, (rows, columns))
    index = (first, second)
    assert same(tensor.take((rows, columns), index, fetch), whole[index])
    assert same(tensor.take((rows, columns), (), fetch), whole)
    split = (1, *((2, rows // 2) if rows % 2 == 0 else (rows,)), columns, 1)
    # The second takes separate runs of rows where there are two parts of them.
    for inner in ((slice(None), slice(0, 1), first), (slice(None), slice(None), first)):
        assert same(tensor.take(split, inner, fetch), whole.view(split)[inner])
        assert same(copied(tensor, split, inner, fetch), whole.view(split)[inner])
    assert same(copied(tensor, (rows, columns), index, fetch), whole[index])
    assert same(tensor.take((columns, rows), (second,), fetch), whole.view(columns, rows)[second])


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 3), st.integers(1, 9), st.integers(1, 3), SLICES, SLICES, st.integers(0, 9))
def test_every_slice_of_mxfp4_is_that_of_the_whole(
    experts: int, rows: int, blocks: int, first: slice, second: slice, seed: int
) -> None:
    made = torch.Generator().manual_seed(seed)
    packed = torch.randint(0, 256, (experts, rows, blocks, 16), dtype=torch.uint8, generator=made)
    # 255 is not a number in e8m0: what transformers makes of it depends on the element.
    scales = torch.randint(0, 255, (experts, rows, blocks), dtype=torch.uint8, generator=made)
    whole = mxfp4_by_transformers(packed, scales)
    shape = tuple(whole.shape)
    tensor, fetch, _ = in_memory(
        packed.view(experts * rows, -1), scales.view(experts * rows, -1), MXFP4, shape
    )
    for index in ((slice(experts - 1, experts), first, second), (slice(None), second), ()):
        assert same(tensor.take(shape, index, fetch), whole[index])
        assert same(copied(tensor, shape, index, fetch), whole[index])
    flat, last = whole.reshape(-1), whole.numel()
    begin = first.start % last
    values = torch.empty(min(last - begin, first.stop * 7), dtype=torch.bfloat16)
    tensor.read(begin, values, fetch)
    assert same(values, flat[begin : begin + len(values)])


MXFP4 = Scheme("mxfp4", (1, 32))


def test_a_number_of_any_byte_and_any_scale_is_that_of_transformers() -> None:
    packed = torch.arange(256, dtype=torch.uint8).view(1, 16, 1, 16).repeat(1, 1, 255, 1)
    scales = torch.arange(255, dtype=torch.uint8).repeat(1, 16, 1)
    whole = mxfp4_by_transformers(packed, scales)
    tensor, fetch, _ = in_memory(
        packed.view(16, -1), scales.view(16, -1), MXFP4, tuple(whole.shape)
    )
    found = tensor.take(tensor.shape, (), fetch)
    assert torch.equal(found.contiguous().view(torch.int16), whole.view(torch.int16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scales_can_be_any_plain_float(dtype: torch.dtype) -> None:
    payload, scales = fp8_of(20, 24, (8, 8), seed=0)
    whole = fp8_by_transformers(payload, scales.to(dtype), (8, 8))
    tensor, fetch, _ = in_memory(payload, scales.to(dtype), Scheme("fp8", (8, 8)), (20, 24))
    assert same(tensor.take((20, 24), (), fetch), whole)


def test_every_e8m0_scale_is_its_power_of_two_and_the_last_code_no_number() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(256, 1)
    payload = torch.ones(256, 4).to(torch.float8_e4m3fn)
    scales = codes.view(torch.float8_e8m0fnu)
    tensor, fetch, _ = in_memory(payload, scales, Scheme("fp8", (1, 4)), (256, 4))
    found = tensor.take((256, 4), (), fetch)
    wanted = torch.tensor([2.0 ** (code - 127) for code in range(255)] + [torch.nan])
    assert same(found, wanted.view(256, 1).expand(256, 4).bfloat16())
    assert same(found[:, :1].float(), scales.float())


def test_scales_of_a_checkpoint_can_be_e8m0(quantised: dict[str, Path], tmp_path: Path) -> None:
    def to_powers(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith("_scale_inv")]:
            tensors[name] = tensors[name].to(torch.float8_e8m0fnu)

    path = edited(quantised["qwen3"], tmp_path / "e8m0", to_powers)
    wanted = edited(
        path,
        tmp_path / "float32",
        lambda tensors: tensors.update(
            {n: t.float() for n, t in tensors.items() if n.endswith("_scale_inv")}
        ),
    )
    with HfReader(path) as found, HfReader(wanted) as expected:
        for name in expected.shapes:
            assert torch.equal(found.tensor(name), expected.tensor(name)), name
    convert(path, tmp_path / "mcore", "mcore")


def test_chunks_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dequantising, "CHUNK", 50)
    payload, scales = fp8_of(37, 24, (5, 7), seed=1)
    tensor, fetch, fetched = in_memory(payload, scales, Scheme("fp8", (5, 7)), (37, 24))
    whole = fp8_by_transformers(payload, scales, (5, 7))
    assert same(tensor.take((37, 24), (slice(3, None, 2),), fetch), whole[3::2])
    assert max(fetched[1:]) <= 50 < sum(fetched)


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss"])
def test_ranges_of_files_are_those_of_the_mapped_tensor(
    quantised: dict[str, Path], family: str
) -> None:
    root = quantised[family]
    tensors = hf_files.quantised_in(root, hf_files.inventory(root))
    with RawFiles() as files, HfReader(root) as reader:
        source = FileTensors({}, files, tensors)
        for name in tensors:
            flat = reader.tensor(name).reshape(-1)
            for first, count in ((0, len(flat)), (len(flat) // 3, 71), (len(flat) - 1, 1)):
                values = torch.empty(count, dtype=torch.bfloat16)
                source.read(name, first, values, torch.empty(0, dtype=torch.uint8))
                assert torch.equal(values, flat[first : first + count]), name


def drop(name: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.__delitem__(name)


def put(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: change(tensors[name])})


def both(tensors: Tensors) -> None:
    tensors[STACK] = torch.zeros(1)


SCALES = f"{UP}_scale_inv"
DAMAGE = {
    "no scales": ("deepseek_v3", drop(SCALES), f"has no scales: no file has {SCALES}"),
    "no payload": ("deepseek_v3", drop(UP), f"{SCALES} in "),
    "plain payload": ("deepseek_v3", put(UP, Tensor.float), "is float32, and must be float8_e4m3"),
    "e5m2": ("deepseek_v3", put(UP, lambda t: t.float().to(torch.float8_e5m2)), "is float8_e5m2"),
    "few scales": ("deepseek_v3", put(SCALES, lambda t: t[1:]), "has the shape [7, 4], not [8, 4]"),
    "scale dtype": ("deepseek_v3", put(SCALES, Tensor.byte), "is uint8, and must be float32"),
    "a vector": ("deepseek_v3", put(UP, Tensor.flatten), "only matrices have block scales"),
    "no blocks": ("gpt_oss", drop(f"{STACK}_blocks"), f"{STACK}_scales in "),
    "no block scales": ("gpt_oss", drop(f"{STACK}_scales"), f"no file has {STACK}_scales"),
    "block shape": ("gpt_oss", put(f"{STACK}_blocks", lambda t: t[..., :8]), "blocks, 16]"),
    "block dtype": ("gpt_oss", put(f"{STACK}_blocks", Tensor.char), "is int8, and must be uint8"),
    "block scales": ("gpt_oss", put(f"{STACK}_scales", lambda t: t[:, 1:]), "has the shape [4, 63"),
    "twice": ("gpt_oss", both, f"{STACK} in "),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_payload_and_scales_that_do_not_fit_are_named_with_their_file(
    quantised: dict[str, Path], tmp_path: Path, damage: str
) -> None:
    family, change, said = DAMAGE[damage]
    path = edited(quantised[family], tmp_path / "bad", change)
    with pytest.raises(ConversionError) as caught:
        HfReader(path)
    assert said in str(caught.value), str(caught.value)
    assert str(path / "model.safetensors") in str(caught.value)
    with pytest.raises(ConversionError):
        convert(path, tmp_path / "mcore", "mcore")
    assert not (tmp_path / "mcore").exists()


def test_a_plain_checkpoint_whose_config_says_quantised_is_refused(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    section = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    path = edited(
        checkpoint("qwen3", **SMALL), tmp_path / "c", fields={"quantization_config": section}
    )
    with pytest.raises(ConversionError, match="no tensor is; remove quantization_config"):
        HfReader(path)


def test_quantised_tensors_without_a_config_that_says_how_are_refused(
    quantised: dict[str, Path], tmp_path: Path
) -> None:
    for family, said in (("deepseek_v3", "fp8"), ("gpt_oss", "mxfp4")):
        path = edited(quantised[family], tmp_path / family, fields={"quantization_config": None})
        with pytest.raises(ConversionError, match="put it back as published") as caught:
            convert(path, tmp_path / "mcore", "mcore")
        assert f"is quantised to {said}" in str(caught.value)


def test_the_plan_counts_stored_bytes_and_says_what_is_lost(
    quantised: dict[str, Path], tmp_path: Path
) -> None:
    path = quantised["qwen3"]
    plan = plan_conversion(path, tmp_path / "mcore", "mcore")
    extents = [at for held in hf_files.inventory(path).values() for at in held.values()]
    assert plan.bytes_read == sum(at.end - at.start for at in extents)
    assert any(
        line == "dequantises 14 tensors from fp8 in blocks of 128 x 128 to bfloat16; "
        "config.json loses its quantization_config"
        for line in plan.describe()
    )


def test_copies_of_the_config_lose_the_quantisation_and_that_is_said_once(
    quantised: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    path = quantised["gpt_oss"]
    side_module._tell.cache_clear()
    with caplog.at_level(logging.WARNING):
        first, second = side_files(path), side_files(path)
    assert first == second and len(caplog.records) == 1
    assert "leave quantization_config out" in caplog.text
    before = json.loads((path / "config.json").read_text())
    assert before.pop("quantization_config") and json.loads(first.changed["config.json"]) == before


def test_the_commands_say_what_was_dequantised(quantised: dict[str, Path], tmp_path: Path) -> None:
    source, target = str(quantised["gpt_oss"]), str(tmp_path / "mcore")
    done = CliRunner().invoke(app, ["convert", source, target, "--to", "mcore"])
    assert done.exit_code == 0, done.stderr
    assert "dequantised 4 tensors from mxfp4 in blocks of 1 x 32 to bfloat16" in done.stdout
    assert "config.json is without its quantization_config" in done.stdout
    equal = CliRunner().invoke(app, ["verify", source, target])
    assert equal.exit_code == 0 and "equal: " in equal.stdout
