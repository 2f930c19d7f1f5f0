"""Nemotron Omni: checkpoints as its makers publish them, and what rows cannot have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from megatron_policy.convert import convert, verify
from megatron_policy.converters.architecture import FilmMedium, Shell
from megatron_policy.converters.formats.hf_config import read_config
from megatron_policy.converters.formats.hf_files import HfReader
from megatron_policy.converters.formats.opening import open_model
from megatron_policy.converters.inspection import inspect
from megatron_policy.errors import BatchError, ConversionError
from megatron_policy.refit.hf_directory import CopiedTensors
from megatron_policy.training.checks import check_batch
from tests.checkpoints import make_checkpoint
from tests.picture_models import (
    IMAGE,
    OMNI_SEES_VIDEOS,
    SOUND,
    drop_constants,
    make_model,
    make_rows,
)

FAMILY = "nemotron_h_omni"
MAKERS = {
    "image_token_id": "img_context_token_id",
    "audio_token_id": "sound_context_token_id",
    "text_config": "llm_config",
    "audio_config": "sound_config",
    "vision_hidden_size": "vit_hidden_size",
}
"""Fields of transformers' class, and what published files call them."""
BESIDE: dict[str, Any] = {
    "sound_encoder.encoder.feature_extractor.featurizer.fb": torch.randn(1, 8, 5),
    "sound_encoder.encoder.layers.1.conv.norm.num_batches_tracked": torch.tensor(7),
    "vision_model.radio_model.input_conditioner.norm_mean": torch.randn(3, 1, 1),
    "vision_model.radio_model.summary_idxs": torch.tensor([0, 1]),
}


def publish(path: Path) -> dict[str, torch.Tensor]:
    """A checkpoint as published; returns its tensors."""
    drop_constants(make_model(path, FAMILY, torch.bfloat16))
    weights = load_file(path / "model.safetensors")
    save_file(weights | BESIDE, path / "model.safetensors", {"format": "pt"})
    fields = json.loads((path / "config.json").read_text())
    own = {MAKERS.get(name, name): value for name, value in fields.items()}
    kind = "NemotronH_Nano_Omni_Reasoning_V3"
    own |= {"model_type": kind, "architectures": [kind], "max_sequence_length": 131072}
    own |= {"auto_map": {"AutoModel": "modeling.Model"}, "ps_version": "v2"}
    (path / "config.json").write_text(json.dumps(own))
    return weights | BESIDE


def test_published_checkpoints_come_back_bit_for_bit_and_keep_what_is_beside(
    tmp_path: Path,
) -> None:
    weights = publish(tmp_path / "hf")
    opened = open_model(tmp_path / "hf")
    table = opened.table
    assert table.family == FAMILY and {*table.carried()} & weights.keys() == BESIDE.keys()
    with HfReader(tmp_path / "hf") as reader:
        table.check_hf(reader.shapes, reader.dtypes)
        written = json.loads((tmp_path / "hf" / "config.json").read_text())
        seen = inspect(opened.fields, written, reader.shapes, reader.dtypes)
        copied = CopiedTensors.of(str(tmp_path / "hf"), table, {*reader.shapes}, 2**20)
    assert seen.problems == () and {each.name for each in seen.ignored} == BESIDE.keys()
    assert {each.name for file in copied.plan.files for each in file.tensors} == BESIDE.keys()
    convert(tmp_path / "hf", tmp_path / "mcore", "mcore")
    convert(tmp_path / "mcore", tmp_path / "back", "hf")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == weights.keys() - BESIDE.keys()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in back.items())
    assert verify(tmp_path / "hf", tmp_path / "mcore").equal
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == written


def test_makers_names_describe_the_model_that_transformers_saves(tmp_path: Path) -> None:
    publish(tmp_path / "makers")
    make_model(tmp_path / "own", FAMILY, torch.bfloat16)
    makers, own = (open_model(tmp_path / name).table for name in ("makers", "own"))
    kept = [each for each in own.entries if not each.megatron.endswith("lambda1")]
    assert [each.hf for each in makers.entries] == [each.hf for each in kept]
    assert len(own.entries) - len(kept) == 2 * 2, "of two layers"
    assert read_config(tmp_path / "makers")["model_type"] == FAMILY


def test_parts_of_one_tensor_on_file_are_those_of_transformers(tmp_path: Path) -> None:
    path = make_model(tmp_path / "hf", FAMILY)
    model = AutoModelForImageTextToText.from_pretrained(path)
    convert(path, tmp_path / "mcore", "mcore")
    convert(tmp_path / "mcore", tmp_path / "back", "hf")
    back = AutoModelForImageTextToText.from_pretrained(tmp_path / "back").state_dict()
    assert all(torch.equal(back[name], each) for name, each in model.state_dict().items())


@pytest.mark.parametrize(
    ("prefix", "said"),
    [
        (
            "vision_model.",
            r"missing: vision_model\.radio_model\.model\.blocks\.0\.attn\.proj\.bias",
        ),
        ("sound_encoder.", r"missing: sound_encoder\.encoder\.layers\.0"),
        ("mlp1.", r"missing: mlp1\.0\.weight"),
        ("language_model.", r"missing: language_model\.backbone\.embeddings\.weight"),
    ],
)
def test_a_checkpoint_without_a_part_is_refused_by_name(
    tmp_path: Path, prefix: str, said: str
) -> None:
    path = make_model(tmp_path / "hf", FAMILY)
    weights = load_file(path / "model.safetensors")
    rest = {name: each for name, each in weights.items() if not name.startswith(prefix)}
    save_file(rest, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConversionError, match=said):
        convert(path, tmp_path / "mcore", "mcore")


def test_a_text_models_checkpoint_is_refused(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "text", "nemotron_h")
    whole = make_model(tmp_path / "whole", FAMILY)
    (path / "config.json").write_bytes((whole / "config.json").read_bytes())
    with pytest.raises(ConversionError, match=r"unexpected: backbone\.embeddings\.weight"):
        convert(path, tmp_path / "mcore", "mcore")


def test_a_model_without_ears_is_read(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "hf", FAMILY, audio_config=None)
    shell = open_model(path).table.architecture.shell
    assert shell is not None and shell.sounds == []
    convert(path, tmp_path / "mcore", "mcore")
    assert verify(path, tmp_path / "mcore").equal


def shell_of(path: Path) -> Shell:
    found = open_model(make_model(path, FAMILY)).table.architecture.shell
    assert found is not None
    return found


def change(rows: Any, key: str, row: int, value: Any) -> dict[str, Any]:
    return {key: [value if at == row else each for at, each in enumerate(rows[key])]}


def refuse(rows: Any, shell: Shell, said: str, **changes: Any) -> None:
    with pytest.raises(BatchError, match=said):
        check_batch(type(rows)({**rows, **changes}), 128, shell.attachments, shell)


def test_what_does_not_fit_is_named_with_its_row(tmp_path: Path) -> None:
    shell, rows = shell_of(tmp_path), make_rows(FAMILY)
    check_batch(rows, 128, shell.attachments, shell)
    ids, lengths = rows["input_ids"], rows["input_lengths"]
    pixels, grids = rows["pixel_values"][1], rows["image_grid_hw"][1]
    without = change(rows, "image_grid_hw", 1, None)
    refuse(rows, shell, "row 1 has 'pixel_values' without 'image_grid_hw'", **without)
    timed = change(rows, "image_grid_hw", 1, torch.tensor([[1, 4, 6]]))
    refuse(rows, shell, r"row 1: pass integers \[pictures, 2\], the patches in height and", **timed)
    odd = change(rows, "image_grid_hw", 1, torch.tensor([[3, 8]]))
    refuse(rows, shell, r"\[\[3, 8\]\] in row 1: .* multiples of 2", **odd)
    fewer = change(rows, "pixel_values", 1, pixels[4:])
    refuse(rows, shell, "20 patches in row 1, but 'image_grid_hw' count 24", **fewer)
    flat = change(rows, "pixel_values", 1, pixels[:, :-1])
    refuse(rows, shell, r"has shape \[24, 11\] in row 1: pass \[patches, 12\]", **flat)
    more = change(rows, "image_grid_hw", 1, torch.cat([grids, grids]))
    more |= change(rows, "pixel_values", 1, torch.cat([pixels, pixels]))
    refuse(rows, shell, r"row 1 has 6 tokens 120.* 'image_grid_hw' make 12", **more)
    less = {"input_lengths": torch.where(torch.arange(8) == 1, int(lengths[1]) - 26, lengths)}
    refuse(rows, shell, "row 1 has .* do not cut a row within a picture", **less)
    joined = {"input_ids": ids.masked_fill(ids == IMAGE + 3, IMAGE)}
    refuse(rows, shell, "row 1 has .* tokens 120", **joined)


def test_sound_that_does_not_fit_is_named_with_its_row(tmp_path: Path) -> None:
    shell, rows = shell_of(tmp_path), make_rows(FAMILY)
    heard, mask = rows["input_features"][1], rows["input_features_mask"][1]
    turned = change(rows, "input_features", 1, heard.mT)
    refuse(rows, shell, r"has shape \[2, 8, .* in row 1: pass \[clips, frames, 8\]", **turned)
    swapped = change(rows, "input_features_mask", 1, mask.flip(1))
    refuse(rows, shell, "in row 1: pass 1 for the first frames of each clip", **swapped)
    other = change(rows, "input_features_mask", 1, mask.flip(0))
    refuse(rows, shell, r"groups of \[2, 6\], but .* make groups of \[6, 2\]", **other)
    tight = change(rows, "input_features", 1, heard[:, :40])
    tight |= change(rows, "input_features_mask", 1, mask[:, :40])
    refuse(rows, shell, "40 frames in row 1, and a clip of 40: pass 1 more behind", **tight)
    ids, lengths = rows["input_ids"], rows["input_lengths"]
    cut = int((ids[0] == SOUND).nonzero().max())
    less = {"input_lengths": torch.where(torch.arange(8) == 0, cut, lengths)}
    refuse(rows, shell, "row 0 has .* do not cut a row within a picture or a clip", **less)


def test_videos_are_refused_where_the_class_does_not_read_them_whole(tmp_path: Path) -> None:
    path = make_model(tmp_path, FAMILY)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"video_pruning_rate": 0.7}))
    rows = make_rows(FAMILY)
    frames = [torch.randn(1, 2, 6, 8, 8) if row == 3 else None for row in range(8)]
    frames = rows.get("pixel_values_videos", frames)
    for overrides, why in (
        ({}, "leaves out some of their tokens: set .*hf_config_overrides.video_pruning_rate"),
        ({"video_pruning_rate": 0.0}, ""),
    ):
        shell = open_model(path, overrides).table.architecture.shell
        assert shell is not None
        (medium,) = (each for each in shell.media if isinstance(each, FilmMedium))
        given = rows | {"pixel_values_videos": frames}
        said = why if OMNI_SEES_VIDEOS else "transformers .* fails at them: install 5.24"
        if said:
            refuse(given, shell, f"row 3 has 'pixel_values_videos': .*{said}")
        else:
            refuse(given, shell, "row 3 has", **change(given, "pixel_values_videos", 3, None))
            check_batch(given, 128, shell.attachments, shell)
            tall = change(given, "pixel_values_videos", 3, torch.randn(1, 2, 6, 6, 8))
            refuse(given, shell, "row 3: pass videos as .* multiples of 4", **tall)
        assert medium.count_tokens({"pixel_values_videos": frames[3]}) == 2 * 4
