"""Every family against real transformers models: names, shapes, and the bits both ways."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megatron_policy.converters.formats.hf_config import read_config
from megatron_policy.converters.formats.hf_files import HfReader
from megatron_policy.converters.rows import (
    Whole,
    fill_parts,
    fill_shard,
    pack,
    shard,
    unpack,
    unshard,
)
from megatron_policy.converters.rows.expert_rows import StackedWhole
from megatron_policy.converters.table import Entry, Table, bind
from megatron_policy.errors import ConfigError
from tests.checkpoints import make_checkpoint, skip_under_older
from tests.families import DENSE, PUBLISHED, SAMPLES, draw_experts
from tests.samples import Fields

DRAWS = 4
VOCAB = 150
"""Which four ranks have to pad."""
REPLICATED = (Whole, StackedWhole)


@pytest.fixture(scope="module", params=SAMPLES)
def models(request, tmp_path_factory) -> list[Path]:
    """Checkpoints of a family in several files: all variants of a dense one, in bf16, and random
    ones with experts, in bf16 or fp32 in turn but for the routers' correction biases.
    """
    family = request.param
    folder = tmp_path_factory.mktemp(family)
    kinds: list[Fields] = [
        {"vocab": VOCAB, "layers": 3, **sizes} for sizes in SAMPLES[family].variants.values()
    ]
    if family not in DENSE:
        kinds = [draw_experts(family, seed) for seed in range(DRAWS)]
    dtypes = (torch.bfloat16, torch.bfloat16 if family in DENSE else torch.float32)
    more: Fields = {"max_shard_size": "40KB", "tokenizer": False}
    return [
        make_checkpoint(folder / str(number), family, dtype=dtypes[number % 2], **more, **kind)
        for number, kind in enumerate(kinds)
    ]


def test_the_table_lists_exactly_the_tensors_of_the_checkpoint(models: list[Path]) -> None:
    for path in models:
        table = bind(read_config(path))
        with HfReader(path) as reader:
            assert table.hf_shapes() == reader.shapes
            table.check_hf(reader.shapes, reader.dtypes)


def fill_shards(table: Table, entry: Entry, reader: HfReader, size: int) -> list[torch.Tensor]:
    """The entry's shards in fp32, each element of which must be written."""
    shards = []
    for rank in range(size):
        shards.append(torch.full(entry.row.local_shape(table.architecture, size), torch.nan))
        parts = [reader.part(name) for name in entry.hf]
        fill_shard(entry.row, table.architecture, shards[-1], parts, rank, size)
    return shards


def test_every_element_comes_back_bit_for_bit_from_shards_of_every_size(models: list[Path]) -> None:
    for path in models:
        table = bind(read_config(path))
        with HfReader(path) as reader:
            for size in (1, 2) if table.architecture.moe else (1, 2, 4):
                back = {
                    name: torch.full_like(reader.tensor(name), torch.nan) for name in reader.shapes
                }
                for entry in table.exported():
                    for rank, piece in enumerate(fill_shards(table, entry, reader, size)):
                        whole = isinstance(entry.row, REPLICATED)
                        where = (0, 1) if whole else (rank, size)
                        parts = [back[name] for name in entry.hf]
                        fill_parts(entry.row, table.architecture, parts, piece, *where)
                for name, tensor in back.items():
                    assert torch.equal(tensor, reader.tensor(name)), (path, name, size)


def test_unpack_inverts_pack_and_unshard_shard_for_every_row(models: list[Path]) -> None:
    for path in models:
        table = bind(read_config(path))
        arch = table.architecture
        for entry in table.entries:
            parts = [torch.randn(shape) for shape in entry.row.hf_shapes(arch)]
            whole = pack(entry.row, arch, parts)
            assert torch.equal(pack(entry.row, arch, unpack(entry.row, arch, whole)), whole)
            if not isinstance(entry.row, REPLICATED):
                halves = [shard(entry.row, arch, whole, rank, 2) for rank in (0, 1)]
                assert torch.equal(unshard(entry.row, arch, halves), whole)


WIDE = ("router.expert_bias", ".A_log", ".mixer.D", ".out_norm.weight")


def test_only_correction_biases_and_what_states_are_made_of_keep_their_dtype(
    models: list[Path],
) -> None:
    """Of these correction biases have no gradients."""
    for path in models:
        table = bind(read_config(path))
        wide = WIDE + (".dt_bias",) * (table.family == "kimi_linear")
        for entry in table.entries:
            assert entry.row.keeps_dtype is entry.megatron.endswith(wide)
            assert not (entry.row.learnt and entry.megatron.endswith("router.expert_bias"))


def test_the_ranks_read_each_byte_once_and_what_they_all_hold_once_each(models: list[Path]) -> None:
    tp = 2
    for path in models:
        table, read, everywhere = bind(read_config(path)), 0, 0
        arch = table.architecture
        entries = table.entries_of(range(arch.num_layers), first=True, last=True)
        for rank in range(tp):
            with HfReader(path) as reader:
                for entry in entries:
                    before, size = reader.bytes_read, reader.dtypes[entry.hf[0]].itemsize
                    piece = torch.empty(entry.row.local_shape(arch, tp))
                    parts = [reader.part(name) for name in entry.hf]
                    fill_shard(entry.row, arch, piece, parts, rank, tp)
                    padding = entry.row.pad_rows(arch, rank, tp)
                    held = piece.numel() - padding * (piece[0].numel() if padding else 0)
                    assert reader.bytes_read - before == held * size, (path, entry.megatron)
                    read += held * size
                    everywhere += held * size * (rank > 0 and isinstance(entry.row, REPLICATED))
        with HfReader(path) as reader:
            stored = sum(reader.tensor(name).nbytes for name in table.hf_shapes())
        assert read == stored + everywhere, path


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_gives_the_number_of_parameters_the_model_has(
    tmp_path: Path, name: str
) -> None:
    parameters, config = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    try:
        fields = read_config(tmp_path)
    except ConfigError as error:
        assert "install a newer transformers" in str(error)
        skip_under_older(str(error))
    shapes = bind(fields).hf_shapes()
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) == parameters
