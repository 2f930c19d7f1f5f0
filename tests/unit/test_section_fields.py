"""Fields of a config's sections for towers: read by transformers' class of the section, known to
mean nothing, or refused by name.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_policy.converters.families.shared.pictures import UNREAD
from megatron_policy.converters.formats.hf_config import read_config
from megatron_policy.converters.registry import FAMILIES
from megatron_policy.errors import ConversionError
from tests.families import PUBLISHED, SAMPLES
from tests.unit.test_family_configs import architecture, config_file, edited

SURROUNDED = sorted(name for name, family in FAMILIES.items() if family.surrounded)
PUBLISHED_BESIDE: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {"in_chans": 3, "spatial_patch_size": 2, "tokens_per_second": 2},
    "qwen3_omni_moe_thinker": {
        "add_cross_attention": False,
        "apply_vit_abs_pos_embed": True,
        "early_stopping": False,
        "image_size": 768,
        "use_bfloat16": False,
    },
    "qwen3_5": {"deepstack_visual_indexes": []},
    "smolvlm": {"max_image_size": {"longest_edge": 512}, "use_base_siglip": False},
    "mistral3": {"is_composition": True, "rope_theta": 10000.0},
    "nemotron_h_omni": {"args": {"amp": True}, "version": "radio_v2.5-h", "max_resolution": 2048},
    "kimi_k25": {"merge_type": "sd2_tpool", "vt_hidden_size": 16, "text_hidden_size": 7168},
}
"""What published checkpoints have in vision_config beside what its class declares."""
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "qwen2_5_vl": ({"in_chans": 4}, "in_chans = 4: transformers reads in_channels, which is 3"),
    "qwen3_5": ({"deepstack_visual_indexes": [1]}, "deepstack_visual_indexes = [1]: its class"),
    "kimi_k25": ({"merge_type": "mean"}, "merge_type = 'mean': its class computes with 'sd2_tpool"),
}


def with_section(path: Path, family: str, section: str, **fields: Any) -> Path:
    """A config of the family with these fields put into a section of its file."""
    config = json.loads((config_file(path, family) / "config.json").read_text())
    return edited(path, family, **{section: config[section] | fields})


def test_each_family_that_sees_or_hears_is_covered() -> None:
    assert set(SURROUNDED) <= set(SAMPLES) and len(SURROUNDED) >= 20


@pytest.mark.parametrize("family", SURROUNDED)
def test_an_unknown_field_of_a_tower_is_refused_with_its_section(
    tmp_path: Path, family: str
) -> None:
    written = json.loads((config_file(tmp_path / "as it is", family) / "config.json").read_text())
    sections = [name for name in ("vision_config", "audio_config") if written.get(name)]
    assert sections
    for name in sections:
        path = with_section(tmp_path / name, family, name, use_magic=True)
        with pytest.raises(ConversionError) as caught:
            architecture(path)
        assert f"{name}.use_magic = True: unknown field" in str(caught.value)


@pytest.mark.parametrize("family", PUBLISHED_BESIDE)
def test_what_published_checkpoints_have_without_meaning_is_taken(
    tmp_path: Path, family: str
) -> None:
    path = with_section(tmp_path, family, "vision_config", **PUBLISHED_BESIDE[family])
    assert architecture(path).shell is not None


@pytest.mark.parametrize("family", REFUSED)
def test_it_is_refused_where_it_contradicts_what_is_computed(tmp_path: Path, family: str) -> None:
    fields, said = REFUSED[family]
    with pytest.raises(ConversionError) as caught:
        architecture(with_section(tmp_path, family, "vision_config", **fields))
    assert f"vision_config.{said}" in str(caught.value)


def test_makers_names_of_sections_are_read_too(tmp_path: Path) -> None:
    path = config_file(tmp_path, "nemotron_h_omni")
    config = json.loads((path / "config.json").read_text())
    config["sound_config"] = config.pop("audio_config") | {"use_magic": True}
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConversionError, match=r"sound_config.use_magic = True: unknown field"):
        architecture(path)


@pytest.mark.parametrize(
    "model", [name for name, (_, config) in PUBLISHED.items() if "vision_config" in config]
)
def test_no_published_config_is_refused(tmp_path: Path, model: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[model][1]))
    assert read_config(tmp_path)[UNREAD] == {}
