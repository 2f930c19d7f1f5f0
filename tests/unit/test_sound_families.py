"""Families that hear sound: how many tokens clips make, checkpoints in which they are one model of
several, and what is refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from megatron_policy.convert import convert, verify
from megatron_policy.converters.architecture import Shell, SoundMedium
from megatron_policy.converters.formats.hf_config import read_config
from megatron_policy.converters.formats.hf_files import HfReader
from megatron_policy.converters.formats.hf_overrides import with_overrides
from megatron_policy.converters.formats.opening import open_model
from megatron_policy.converters.inspection import inspect
from megatron_policy.converters.registry import FAMILIES
from megatron_policy.converters.table import bind
from megatron_policy.errors import BatchError, ConversionError
from megatron_policy.refit.hf_directory import CopiedTensors
from megatron_policy.training.checks import check_batch
from tests.picture_models import CLIPS, SOUND, SOUND_START, make_model, make_rows

WHOLES = {
    "qwen2_5_omni_thinker": ("qwen2_5_omni", "Qwen2_5OmniModel", "token2wav"),
    "qwen3_omni_moe_thinker": (
        "qwen3_omni_moe",
        "Qwen3OmniMoeForConditionalGeneration",
        "code2wav",
    ),
}
"""By family: the model_type and the class that published checkpoints name, and what the names of
tensors that make waves of what the talker says begin with.
"""


def publish(path: Path, family: str) -> dict[str, torch.Tensor]:
    """A checkpoint as published, of a thinker and of what speaks; returns its tensors."""
    kind, architecture, waves = WHOLES[family]
    make_model(path, family, torch.bfloat16)
    weights = load_file(path / "model.safetensors")
    whole = {f"thinker.{name}": tensor for name, tensor in weights.items()}
    whole["talker.model.layers.0.mlp.gate_proj.weight"] = torch.randn(3, 2).bfloat16()
    whole[f"{waves}.ups.0.weight"] = torch.randn(4)
    save_file(whole, path / "model.safetensors", {"format": "pt"})
    thinker = json.loads((path / "config.json").read_text())
    top = {name: thinker.pop(name) for name in ("dtype", "transformers_version")}
    own = {"architectures": ["Qwen2OmniNaViTThinkerForConditionalGeneration"], "init_std": 0.02}
    parts = {"thinker_config": thinker | own, "talker_config": {"vocab_size": 8}}
    fields = {"model_type": kind, "architectures": [architecture], "enable_talker": True}
    (path / "config.json").write_text(json.dumps(fields | top | parts))
    return whole


@pytest.fixture(scope="module", params=WHOLES)
def family(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


def test_published_checkpoints_are_read_as_their_thinker_and_keep_what_speaks(
    tmp_path: Path, family: str
) -> None:
    weights = publish(tmp_path / "whole", family)
    opened = open_model(tmp_path / "whole")
    table = opened.table
    beside = {name for name in weights if not name.startswith("thinker.")}
    assert table.family == family and {*table.carried()} == beside
    with HfReader(tmp_path / "whole") as reader:
        table.check_hf(reader.shapes, reader.dtypes)
        written = json.loads((tmp_path / "whole" / "config.json").read_text())
        seen = inspect(opened.fields, written, reader.shapes, reader.dtypes)
        assert seen.problems == () and {each.name for each in seen.ignored} == beside
        copied = CopiedTensors.of(str(tmp_path / "whole"), table, {*reader.shapes}, 2**20)
    assert {each.name for file in copied.plan.files for each in file.tensors} == beside
    convert(tmp_path / "whole", tmp_path / "mcore", "mcore")
    convert(tmp_path / "mcore", tmp_path / "back", "hf")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == weights.keys() - beside
    assert all(torch.equal(tensor, weights[name]) for name, tensor in back.items())
    assert verify(tmp_path / "whole", tmp_path / "mcore").equal
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == written


def test_a_thinker_alone_is_the_same_model(tmp_path: Path, family: str) -> None:
    publish(tmp_path / "whole", family)
    make_model(tmp_path / "alone", family, torch.bfloat16)
    whole, alone = (open_model(tmp_path / name).table for name in ("whole", "alone"))
    shells = [each.architecture.shell for each in (whole, alone)]
    assert [shell.prefix for shell in shells if shell is not None] == ["thinker.", ""]
    for entry, other in zip(whole.entries, alone.entries, strict=True):
        assert entry.megatron == other.megatron
        assert entry.hf == tuple(f"thinker.{name}" for name in other.hf)


def test_overrides_are_those_of_the_thinker(tmp_path: Path, family: str) -> None:
    publish(tmp_path, family)
    given = {"position_id_per_seconds": 7}
    assert read_config(tmp_path, given)["position_id_per_seconds"] == 7
    written = json.loads(with_overrides((tmp_path / "config.json").read_bytes(), given))
    assert written["thinker_config"]["position_id_per_seconds"] == 7
    assert "position_id_per_seconds" not in written


def test_what_only_speaks_or_only_reads_is_refused_by_name(tmp_path: Path, family: str) -> None:
    kind = WHOLES[family][0]
    for part, said in (("text", "decoder"), ("talker", "talker")):
        with pytest.raises(ConversionError, match=f"it is the {said} of a .* use its thinker"):
            bind({"model_type": f"{kind}_{part}"})
    path = make_model(tmp_path / "hf", family)
    weights = load_file(path / "model.safetensors")
    text = {name: each for name, each in weights.items() if not name.startswith("audio_tower.")}
    save_file(text, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConversionError, match=r"missing: audio_tower\."):
        convert(path, tmp_path / "mcore", "mcore")


def shell_of(family: str, path: Path) -> Shell:
    found = open_model(make_model(path, family)).table.architecture.shell
    assert found is not None
    return found


@pytest.mark.parametrize("family", CLIPS)
@pytest.mark.parametrize("frames", [3, 8, 15, 16, 17, 99, 100, 101, 108, 200, 263])
def test_clips_take_as_many_places_as_a_tower_makes_features(
    tmp_path: Path, family: str, frames: int
) -> None:
    shell = shell_of(family, tmp_path)
    (medium,) = (each for each in shell.media if isinstance(each, SoundMedium))
    clip = medium.make_clip(frames, torch.randn)
    model = AutoModelForImageTextToText.from_pretrained(tmp_path)
    features = model.get_audio_features(**clip)
    found = features.last_hidden_state if family in WHOLES else features.pooler_output
    assert medium.count_tokens(clip) == len(found)


def change(rows: Any, key: str, row: int, value: Any) -> dict[str, Any]:
    return {key: [value if at == row else each for at, each in enumerate(rows[key])]}


def refuse(rows: Any, shell: Shell, said: str, **changes: Any) -> None:
    with pytest.raises(BatchError, match=said):
        check_batch(type(rows)({**rows, **changes}), 128, shell.attachments, shell)


def test_sound_that_does_not_fit_is_named_with_its_row(tmp_path: Path, family: str) -> None:
    shell, rows = shell_of(family, tmp_path), make_rows(family)
    check_batch(rows, 128, shell.attachments, shell)
    heard, mask = rows["input_features"][1], rows["feature_attention_mask"][1]
    ids, lengths = rows["input_ids"], rows["input_lengths"]
    without = change(rows, "feature_attention_mask", 1, None)
    refuse(rows, shell, "row 1 has 'input_features' without 'feature_attention_mask'", **without)
    wrong = change(rows, "input_features", 1, heard.mT)
    refuse(rows, shell, r"has shape \[2, .* in row 1: pass \[clips, 8, frames\]", **wrong)
    swapped = change(rows, "feature_attention_mask", 1, mask.flip(1))
    refuse(rows, shell, "in row 1: pass 1 for the first frames of each clip", **swapped)
    longer = change(rows, "feature_attention_mask", 1, torch.ones_like(mask))
    refuse(rows, shell, "row 1 has .* tokens 124.* 'feature_attention_mask' make", **longer)
    other = change(rows, "feature_attention_mask", 1, mask.flip(0))
    refuse(rows, shell, "row 1 has tokens 124 in groups of .* make groups of", **other)
    short = change(rows, "feature_attention_mask", 1, mask * 0)
    refuse(rows, shell, "clip 0 of row 1 is too short for a token", **short)
    cut = int((ids[0] == SOUND).nonzero().max())
    less = {"input_lengths": torch.where(torch.arange(8) == 0, cut, lengths)}
    refuse(rows, shell, "row 0 has .* do not cut a row within a picture or a clip", **less)
    behind = {"input_lengths": torch.where(torch.arange(8) == 0, cut + 1, lengths)}
    refuse(rows, shell, "row 0 .* are not between token 125 and another one", **behind)
    unmarked = {"input_ids": ids.masked_fill(ids == SOUND_START, 5)}
    refuse(rows, shell, "row 0 .* are not between token 125 .*use_audio_in_video", **unmarked)
    late = change(rows, "video_second_per_grid", 3, torch.zeros(1))
    refuse(rows, shell, "'video_second_per_grid' has .* in row 3: pass a positive number", **late)
    refuse(rows, shell, "'use_audio_in_video', which is not read", use_audio_in_video=[True] * 8)


def test_families_that_hear_have_rows_with_sound() -> None:
    assert {name for name in FAMILIES if "omni" in name} == CLIPS.keys()
