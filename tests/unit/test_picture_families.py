"""Families that also see pictures: what surrounds a decoder, and how their configs are read."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches

from megatron_policy.adapters.stacks import is_of_tower
from megatron_policy.adapters.table import is_adaptable, name_module, strip_weight
from megatron_policy.batch import BatchedDataDict
from megatron_policy.convert import convert
from megatron_policy.converters.architecture import Moe, Scoring, TileMedium
from megatron_policy.converters.architecture.media import SeenMedium
from megatron_policy.converters.config_fields import Fields
from megatron_policy.converters.config_fields.rope_fields import take_rope
from megatron_policy.converters.families.shared.pictures import PARAMETERS
from megatron_policy.converters.formats.hf_config import read_config, transformers_config
from megatron_policy.converters.formats.hf_files import HfReader
from megatron_policy.converters.formats.opening import open_model
from megatron_policy.converters.inspection import inspect
from megatron_policy.converters.registry import FAMILIES
from megatron_policy.converters.rows import Role, TowerQkv, fill_shard
from megatron_policy.converters.table import Entry, Table, bind
from megatron_policy.errors import BatchError, ConfigError, ConversionError
from megatron_policy.training.checks import check_batch
from tests.checkpoints import config_of, make_checkpoint
from tests.picture_models import (
    CLIPS,
    IMAGE,
    MEDIA,
    MORE,
    ROPE,
    SOUNDS,
    STILL,
    TILED,
    TINY,
    TOKENS,
    list_tokens,
    load_model,
    make_model,
    make_rows,
    stack_experts,
)

PUBLISHED: dict[str, tuple[str, list[int], dict[str, Any]]] = {
    "Qwen2.5-VL-7B": (
        "qwen2_5_vl",
        [16, 24, 24],
        {
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "max_position_embeddings": 128000,
            "max_window_layers": 28,
            "num_attention_heads": 28,
            "num_hidden_layers": 28,
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-06,
            "rope_theta": 1000000.0,
            "sliding_window": 32768,
            "tie_word_embeddings": False,
            "use_sliding_window": False,
            "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
            "vocab_size": 152064,
            "vision_config": {
                "depth": 32,
                "hidden_act": "silu",
                "hidden_size": 1280,
                "intermediate_size": 3420,
                "num_heads": 16,
                "in_chans": 3,
                "out_hidden_size": 3584,
                "patch_size": 14,
                "spatial_merge_size": 2,
                "spatial_patch_size": 14,
                "window_size": 112,
                "fullatt_block_indexes": [7, 15, 23, 31],
                "tokens_per_second": 2,
                "temporal_patch_size": 2,
            },
        },
    ),
    "Qwen3.5-27B": (
        "qwen3_5",
        [11, 11, 10],
        {
            "text_config": {
                "attention_bias": False,
                "attention_dropout": 0.0,
                "attn_output_gate": True,
                "dtype": "bfloat16",
                "eos_token_id": 248044,
                "full_attention_interval": 4,
                "head_dim": 256,
                "hidden_act": "silu",
                "hidden_size": 5120,
                "initializer_range": 0.02,
                "intermediate_size": 17408,
                "linear_conv_kernel_dim": 4,
                "linear_key_head_dim": 128,
                "linear_num_key_heads": 16,
                "linear_num_value_heads": 48,
                "linear_value_head_dim": 128,
                "mamba_ssm_dtype": "float32",
                "max_position_embeddings": 262144,
                "model_type": "qwen3_5_text",
                "mtp_num_hidden_layers": 1,
                "mtp_use_dedicated_embeddings": False,
                "num_attention_heads": 24,
                "num_hidden_layers": 64,
                "num_key_value_heads": 4,
                "rms_norm_eps": 1e-06,
                "rope_parameters": {
                    "mrope_interleaved": True,
                    "mrope_section": [11, 11, 10],
                    "partial_rotary_factor": 0.25,
                    "rope_theta": 10000000,
                    "rope_type": "default",
                },
                "use_cache": True,
                "vocab_size": 248320,
            },
            "tie_word_embeddings": False,
            "vision_config": {
                "deepstack_visual_indexes": [],
                "depth": 27,
                "hidden_act": "gelu_pytorch_tanh",
                "hidden_size": 1152,
                "in_channels": 3,
                "initializer_range": 0.02,
                "intermediate_size": 4304,
                "model_type": "qwen3_5",
                "num_heads": 16,
                "num_position_embeddings": 2304,
                "out_hidden_size": 5120,
                "patch_size": 16,
                "spatial_merge_size": 2,
                "temporal_patch_size": 2,
            },
        },
    ),
}
"""How many pairs of a head each position turns, and the config as its makers published it, that of
Qwen2.5-VL with the decoder's fields at the top.
"""


SINGLE = ("gemma3", "llava", *TILED)
"""Families with a token for each patch."""


@pytest.fixture(scope="module", params=TINY)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Path:
    path = tmp_path_factory.mktemp("pictures") / "hf"
    return make_model(path, request.param, torch.bfloat16)


def bound(path: Path) -> Table:
    return bind(read_config(path))


@pytest.mark.parametrize("family", sorted(TINY))
def test_adapters_can_be_on_every_linear_layer_of_a_tower(tmp_path: Path, family: str) -> None:
    path = make_model(tmp_path, family)
    table = open_model(path).table
    names = {
        name_module(entry.hf[0], table)
        for entry in table.entries
        if is_of_tower(entry) and is_adaptable(entry)
    }
    linears = {
        name
        for name, module in load_model(path).named_modules()
        if type(module) is torch.nn.Linear
        and not re.search("language_model|text_model|lm_head", name)
    }
    # Of others files have the names of their makers.
    assert names == (set() if family in ("kimi_k25", "nemotron_h_omni") else linears)


def test_names_and_shapes_are_those_of_transformers(checkpoint: Path) -> None:
    table = bound(checkpoint)
    with HfReader(checkpoint) as reader:
        assert table.hf_shapes() == reader.shapes
        table.check_hf(reader.shapes, reader.dtypes)
        inspected = inspect(
            read_config(checkpoint),
            json.loads((checkpoint / "config.json").read_text()),
            reader.shapes,
            reader.dtypes,
        )
    assert inspected.problems == () and inspected.unmatched == ()
    shell = table.architecture.shell
    keys = STILL.get(table.family, MEDIA + SOUNDS * (table.family in CLIPS))
    assert shell is not None and {*keys} <= {*table.architecture.attachments}
    seen = [medium for medium in shell.media if isinstance(medium, SeenMedium)]
    assert all(medium.merged == (1 if table.family in SINGLE else 4) for medium in seen)
    assert shell.deep == (2 if table.family.startswith(("qwen3_vl", "qwen3_omni")) else 0)
    of_shell = [e for e in table.entries if e.megatron.startswith("embedding.shell.")]
    assert len(of_shell) == len(shell.tensors)
    for entry in of_shell:
        (shape,) = entry.row.hf_shapes(table.architecture)
        assert (entry.row.role is Role.MATRIX) == (len(shape) > 1), entry.megatron


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes_have_the_tensors_that_transformers_builds(
    tmp_path: Path, name: str
) -> None:
    family, sections, fields = PUBLISHED[name]
    file = {"model_type": family, "architectures": list(FAMILIES[family].hf_architectures)}
    (tmp_path / "config.json").write_text(json.dumps(file | TOKENS | fields))
    table = bound(tmp_path)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(tmp_path))
    held = {n: tuple(t.shape) for n, t in model.state_dict().items()}
    if family == "qwen2_5_vl":
        held = {
            n.replace("model.language_model.", "model.").replace("model.visual.", "visual."): shape
            for n, shape in held.items()
        }
    assert table.hf_shapes() == held
    assert table.architecture.positions == table.architecture.max_position_embeddings
    assert [*map(table.architecture.ropes[0].axes.count, range(3))] == sections


def test_what_a_class_always_does_is_read_as_that(tmp_path: Path) -> None:
    found = bound(make_model(tmp_path, "qwen3_vl_moe")).architecture
    assert not found.tied, "what the decoder's own section says of it does not count"
    assert found.find_part(Moe).scoring is Scoring.SOFTMAX_OF_CHOSEN
    assert found.expert_layers == (0, 2, 3)
    assert found.ropes[0].axes == (0, 1, 2, 0)


def test_layers_that_predict_further_tokens_know_no_pictures(tmp_path: Path) -> None:
    config = read_config(make_model(tmp_path, "qwen3_5"))
    assert bind(config).architecture.attachments == MEDIA
    assert bind(config, mtp_layers=1).architecture.attachments == ()


def shard_of(path: Path, table: Table, entry: Entry, rank: int) -> torch.Tensor:
    """What a rank of two has of a parameter."""
    arch = table.architecture
    shard = torch.full(entry.row.local_shape(arch, 2), torch.nan)
    with HfReader(path) as reader:
        fill_shard(entry.row, arch, shard, [reader.part(n) for n in entry.hf], rank, 2)
    return shard


@pytest.mark.parametrize(
    ("width", "release"),
    [(24, "4.57.1"), (24, None), (24, "5.3.0"), (16, None), (32, None), (32, "5.3.0")],
)
def test_experts_are_the_same_in_the_order_of_either_release(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int, release: str | None
) -> None:
    """Whatever config.json says of the release: where one of two tensors of experts has the same
    shape in both orders, the other one has not.
    """
    config = TINY["qwen3_vl_moe"]
    text = config["text_config"] | {"moe_intermediate_size": width}
    monkeypatch.setitem(TINY, "qwen3_vl_moe", config | {"text_config": text})
    newer = make_model(tmp_path / "newer", "qwen3_vl_moe")
    shutil.copytree(newer, older := tmp_path / "older")
    weights = load_file(newer / "model.safetensors")
    stacks = [name for name in weights if ".experts." in name]
    turned = {name: weights[name].transpose(1, 2).contiguous() for name in stacks}
    save_file(weights | turned, older / "model.safetensors", {"format": "pt"})
    for path in (newer, older):
        fields = json.loads((path / "config.json").read_text())
        fields.pop("transformers_version")
        said = {} if release is None else {"transformers_version": release}
        (path / "config.json").write_text(json.dumps(fields | said))
    shapes = {name: tuple(tensor.shape) for name, tensor in (weights | turned).items()}
    dtypes = dict.fromkeys(shapes, torch.float32)
    if release == "4.57.1":
        bound(older).check_hf(shapes, dtypes)
    else:  # without these shapes
        order = r"misshapen: .*_proj .* in the order that transformers_version of config.json says"
        with pytest.raises(ConversionError, match=order):
            bound(older).check_hf(shapes, dtypes)
    one, same = open_model(newer).table, open_model(older).table
    same.check_hf(shapes, dtypes)
    for entry, other in zip(one.entries, same.entries, strict=True):
        assert entry.megatron == other.megatron
        for rank in (0, 1):
            shards = shard_of(newer, one, entry, rank), shard_of(older, same, other, rank)
            assert torch.equal(*shards), entry.megatron
    convert(older, tmp_path / "mcore", "mcore")
    convert(tmp_path / "mcore", tmp_path / "back", "hf")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert all(torch.equal(back[name], tensor) for name, tensor in turned.items())


def test_experts_in_one_tensor_are_read_as_those_in_tensors_of_their_own(tmp_path: Path) -> None:
    apart = make_model(tmp_path / "apart", "qwen3_5_moe")
    shutil.copytree(apart, stacked := tmp_path / "stacked")
    stack_experts(stacked)
    one, other = open_model(apart).table, open_model(stacked).table
    assert other.architecture == one.architecture
    with HfReader(stacked) as reader:
        assert other.hf_shapes() == reader.shapes
    for entry, same in zip(one.entries, other.entries, strict=True):
        assert entry.megatron == same.megatron
        for rank in range(2) if entry.expert is not None else ():
            shards = shard_of(apart, one, entry, rank), shard_of(stacked, other, same, rank)
            assert torch.equal(*shards), entry.megatron


def test_a_text_model_out_of_a_published_one_keeps_its_names(tmp_path: Path) -> None:
    whole = make_model(tmp_path / "whole", "qwen3_5", torch.bfloat16)
    path = tmp_path / "text"
    AutoModelForCausalLM.from_pretrained(whole).save_pretrained(path)
    weights = load_file(path / "model.safetensors")
    assert "model.language_model.norm.weight" in weights
    assert read_config(path)["model_type"] == "qwen3_5_text"
    convert(path, tmp_path / "mcore", "mcore")
    convert(tmp_path / "mcore", tmp_path / "back", "hf")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in weights.items())


@pytest.mark.parametrize(
    ("sections", "how", "axes"),
    [([2, 1, 1], "apart", (0, 0, 1, 2)), ([4, 2, 2], "alternating", (0, 1, 2, 0, 1, 2, 0, 0))],
)
def test_pairs_are_turned_by_the_positions_that_the_sections_say(
    sections: list[int], how: Any, axes: tuple[int, ...]
) -> None:
    rope = {"rope_theta": 1e4, "mrope_section": sections}
    fields = Fields({"rope_parameters": rope, "max_position_embeddings": 64})
    assert take_rope(fields, threefold=how).axes == axes


def test_a_decoder_alone_is_refused_by_name() -> None:
    with pytest.raises(ConversionError, match="it is the decoder of a qwen3_vl alone; use the who"):
        bind({"model_type": "qwen3_vl_text"})


def test_a_checkpoint_of_text_alone_is_refused_by_name(checkpoint: Path, tmp_path: Path) -> None:
    entries = bound(checkpoint).entries
    of_towers = {name for e in entries if e.megatron.startswith(PARAMETERS) for name in e.hf}
    weights = load_file(checkpoint / "model.safetensors")
    shutil.copytree(checkpoint, tmp_path / "hf")
    text = {name: tensor for name, tensor in weights.items() if name not in of_towers}
    save_file(text, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConversionError, match="missing: ") as caught:
        convert(tmp_path / "hf", tmp_path / "mcore", "mcore")
    missing = {*re.findall(r"missing: (\S+)", str(caught.value))}
    assert missing and missing <= of_towers


def test_pictures_that_do_not_fit_a_family_are_refused_with_their_row(checkpoint: Path) -> None:
    """Row 1 has one picture."""
    table = bound(checkpoint)
    rows, shell = make_rows(table.family), table.architecture.shell
    assert shell is not None
    (medium,) = (each for each in shell.media if each.values == "pixel_values")
    ids, lengths, pixels = (rows[k] for k in ("input_ids", "input_lengths", medium.values))
    at = int((ids[1] == IMAGE).nonzero()[0])
    replaced, cut = ids.clone(), lengths.clone()
    replaced[1, at], cut[1] = 5, at + 1

    def change(key: str, value: torch.Tensor | None) -> dict[str, Any]:
        return {key: [value if row == 1 else each for row, each in enumerate(rows[key])]}

    sizes = medium.keys[-1]
    without = {k: own for key in medium.keys for k, own in change(key, None).items()}
    wrong = pixels[1][..., :-1] if sizes == medium.values else 0 * rows[sizes][1]
    counted = r"row 1 has \d+ tokens 120.* make"
    check_batch(rows, 128, shell.attachments, shell)
    for changes, said in (
        ({"input_ids": replaced}, counted),
        ({"input_lengths": cut}, rf"{counted} .* do not cut a row within a picture"),
        (change(medium.values, torch.cat([pixels[1], pixels[1]])), "row 1"),
        (without, rf"{counted} 0"),
        (change(sizes, wrong), rf"'{sizes}' has .* in row 1"),
    ):
        with pytest.raises(BatchError, match=said):
            check_batch(BatchedDataDict(rows | changes), 128, shell.attachments, shell)


@pytest.mark.parametrize(
    ("family", "section", "changes", "said"),
    [
        ("qwen2_5_vl", "", {"text_only": True}, "text_only = True: unknown field"),
        ("qwen2_5_vl", "text_config", {"gate": 1}, "text_config.gate = 1: unknown field"),
        (
            "qwen2_5_vl",
            "text_config",
            {"rope_parameters": ROPE | {"mrope_interleaved": True}},
            "mrope_interleaved = True: the model's class turns pairs so; it can be False",
        ),
        (
            "qwen3_5",
            "text_config",
            {"attn_output_gate": False},
            "text_config.attn_output_gate = False: attention has gates",
        ),
        ("qwen3_5", "vision_config", {"depth": 10**6}, "depth is 1000000, and no model has more"),
        (
            "qwen3_vl",
            "text_config",
            {"rope_parameters": {"rope_theta": 1e4, "mrope_section": [2, 2]}},
            "mrope_section = [2, 2]: must be a list of three",
        ),
        (
            "qwen3_vl",
            "text_config",
            {"rope_parameters": {"rope_theta": 1e4, "mrope_section": [2, 2, 2]}},
            "mrope_section must name the position of each of 4 rotated pairs (it names 6)",
        ),
    ],
)
def test_values_that_cannot_be_honoured_are_refused_by_name(
    tmp_path: Path, family: str, section: str, changes: dict[str, Any], said: str
) -> None:
    fields = {"model_type": family, **TINY[family], **TOKENS}
    if section:
        fields[section] = fields[section] | changes
    else:
        fields |= changes
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises((ConfigError, ConversionError)) as caught:
        bound(tmp_path)
    assert said in str(caught.value)


@pytest.mark.parametrize("family", TINY)
def test_placeholders_are_tokens_of_the_vocabulary_and_differ(tmp_path: Path, family: str) -> None:
    config_of(family, **TINY[family] | TOKENS).save_pretrained(tmp_path)
    own = json.loads((tmp_path / "config.json").read_text())
    image = next(name for name in ("image_token_id", "image_token_index") if name in own)
    size = own["text_config"]["vocab_size"]
    changes = {image: (size, f"{image} = {size}: the vocabulary has {size} tokens")}
    if family not in ONE_PLACEHOLDER:
        video = image.replace("image", "video")
        said = f"{video} = {IMAGE}: {image} is the same token"
        changes[video] = (IMAGE, said)
    for name, (token, said) in changes.items():
        (tmp_path / "config.json").write_text(json.dumps(own | {name: token}))
        with pytest.raises(ConversionError, match=re.escape(said)):
            bound(tmp_path)


ONE_PLACEHOLDER = {
    *(family for family in STILL if family != "llava_onevision"),
    *("glm4v", "glm4v_moe"),
}
"""Families that see pictures alone, or whose videos have the placeholder of pictures."""


@pytest.mark.parametrize("family", ["internvl", "mistral3", "qwen2_vl", "smolvlm"])
def test_what_the_decoders_section_says_of_tying_counts_where_the_whole_says_nothing(
    tmp_path: Path, family: str
) -> None:
    path = make_checkpoint(tmp_path, family)
    config = json.loads((path / "config.json").read_text())
    assert not config.pop("tie_word_embeddings")
    for tied in (False, True):
        config["text_config"]["tie_word_embeddings"] = tied
        (path / "config.json").write_text(json.dumps(config))
        assert bound(path).architecture.tied is tied
        assert transformers_config(path).tie_word_embeddings is tied


TEXT_OF_4_54 = {
    **dict.fromkeys(("vision_start_token_id", "vision_end_token_id", "vision_token_id"), 7),
    **dict.fromkeys(("image_token_id", "video_token_id")),
}
"""What transformers 4.54 repeats in the decoder's section."""
OF_SMOLVLM = (
    {"pad_token_id": 128002, "use_reentrant_checkpointing": False, "vocab_size": 131},
    {
        "_flash_attn_2_enabled": True,
        "is_llama_config": True,
        "neftune_noise_alpha": 0.0,
        "perceiver_config": {"resampler_depth": 6},
        "pixel_shuffle_factor": 4,
        "qk_layer_norms": False,
        "rope_interleaved": False,
        "use_resampler": False,
    },
)
"""What published SmolVLM has besides, and its decoder's section."""


@pytest.mark.parametrize(
    ("family", "top", "text"),
    [
        ("qwen2_vl", {"vision_token_id": 7}, {}),
        ("qwen2_5_vl", {"vision_token_id": 7}, TEXT_OF_4_54),
        ("glm4v", {}, {"attention_bias": True}),
        ("llava", {"ignore_index": -100, "vocab_size": 256}, {}),
        ("llava_next", {"ignore_index": -100, "use_image_newline_parameter": True}, {}),
        ("idefics3", *OF_SMOLVLM),
        ("smolvlm", *OF_SMOLVLM),
    ],
)
def test_fields_of_published_files_that_change_nothing_are_no_hindrance(
    tmp_path: Path, family: str, top: dict[str, Any], text: dict[str, Any]
) -> None:
    plain = make_checkpoint(tmp_path / "plain", family)
    config = json.loads((plain / "config.json").read_text())
    (tmp_path / "further").mkdir()
    more = config | top | {"text_config": config["text_config"] | text}
    (tmp_path / "further" / "config.json").write_text(json.dumps(more))
    assert bound(tmp_path / "further").architecture == bound(plain).architecture


MAKERS = (("vision_tower.", "vision_tower.vision_model."),)
OF_MODULES = ("gemma3", "internvl", "llava", "mistral3", "qwen2_vl", "qwen2_5_vl", *TILED)


@pytest.mark.parametrize(
    ("family", "names"),
    [
        *((family, MAKERS) for family in ("gemma3", "llava", *TILED)),
        *((family, FAMILIES[family].paths) for family in OF_MODULES),
        ("llava", (*MAKERS, *FAMILIES["llava"].paths)),
    ],
)
def test_names_of_makers_and_of_other_releases_are_those_of_transformers(
    tmp_path: Path, family: str, names: tuple[tuple[str, str], ...]
) -> None:
    own = make_model(tmp_path / "own", family)
    shutil.copytree(own, made := tmp_path / "made")
    named = load_file(own / "model.safetensors")
    for part, other in names:
        named = {
            other + name.removeprefix(part) if name.startswith(part) else name: tensor
            for name, tensor in named.items()
        }
    save_file(named, made / "model.safetensors", {"format": "pt"})
    model, report = AutoModelForImageTextToText.from_pretrained(made, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    ours = AutoModelForImageTextToText.from_pretrained(own).state_dict()
    assert all(torch.equal(ours[name], tensor) for name, tensor in model.state_dict().items())
    table = open_model(made).table
    of_decoder = [e.hf for e in table.entries if not e.megatron.startswith(PARAMETERS)]
    paths = {name_module(name, table) for names in of_decoder for name in names}
    assert paths <= {strip_weight(name) for name in ours}
    convert(made, tmp_path / "mcore", "mcore")
    convert(tmp_path / "mcore", tmp_path / "back", "hf")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == named.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in named.items())


@pytest.mark.parametrize("family", sorted(TINY))
@pytest.mark.parametrize("section", [{}, {"vision_config": None}])
def test_a_config_without_the_section_of_its_tower_is_refused_by_name(
    tmp_path: Path, family: str, section: dict[str, Any]
) -> None:
    config_of(family, **TINY[family], **list_tokens(family)).save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    del fields["vision_config"]
    (tmp_path / "config.json").write_text(json.dumps(fields | section))
    with pytest.raises(ConversionError, match=r"config.json has no vision_config, which this"):
        read_config(tmp_path)


@pytest.mark.parametrize("heads", [3, 16])
def test_heads_that_the_width_of_the_tower_has_not_are_refused(tmp_path: Path, heads: int) -> None:
    config = config_of("kimi_k25", **TINY["kimi_k25"], **list_tokens("kimi_k25"))
    config.vision_config.num_attention_heads = heads
    config.save_pretrained(tmp_path)
    said = rf"vision_config.num_attention_heads = {heads}: hidden_size is 16"
    with pytest.raises(ConversionError, match=said):
        bound(tmp_path)


def test_parts_of_one_tensor_on_file_are_those_of_transformers(tmp_path: Path) -> None:
    path = make_model(tmp_path / "hf", "kimi_k25")
    held = AutoModelForImageTextToText.from_pretrained(path).model.state_dict()
    table = bound(path)
    entries = [entry for entry in table.entries if isinstance(entry.row, TowerQkv)]
    assert len(entries) == 2 * 2 * 3
    for entry in entries:
        own = held[entry.megatron.removeprefix("embedding.shell.")]
        assert all(torch.equal(shard_of(path, table, entry, rank), own) for rank in (0, 1))
    convert(path, tmp_path / "mcore", "mcore")
    convert(tmp_path / "mcore", tmp_path / "back", "hf")
    before, back = (load_file(each / "model.safetensors") for each in (path, tmp_path / "back"))
    assert before.keys() == back.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize(
    ("kind", "strategy"),
    [
        ("clip_vision_model", "default"),
        ("clip_vision_model", "full"),
        ("siglip_vision_model", "full"),
        ("siglip_vision_model", "default"),
    ],
)
def test_pictures_take_as_many_places_as_a_tower_makes_features(
    tmp_path: Path, kind: str, strategy: str
) -> None:
    fields = TINY["llava"] | {"vision_feature_select_strategy": strategy}
    fields |= {"vision_config": fields["vision_config"] | {"model_type": kind}}
    config = config_of("llava", **fields)
    model = AutoModelForImageTextToText.from_config(config)
    model.save_pretrained(tmp_path)
    shell = bound(tmp_path).architecture.shell
    assert shell is not None
    picture = shell.pictures.make_picture((2, 2), torch.randn)
    (features,) = model.model.get_image_features(picture["pixel_values"]).pooler_output
    assert shell.media[0].count_tokens(picture) == len(features)


@pytest.mark.parametrize("family", TILED)
def test_pictures_of_any_size_have_as_many_tiles_and_tokens_as_in_transformers(
    tmp_path: Path, family: str
) -> None:
    tile, canvases = 20, [[20 * rows, 20 * columns] for rows in (1, 2, 3) for columns in (1, 2, 3)]
    fields = TINY[family] | {"image_grid_pinpoints": canvases}
    fields |= {"vision_config": fields["vision_config"] | {"image_size": tile}}
    config = config_of(family, **fields)
    config.save_pretrained(tmp_path)
    shell, random = bound(tmp_path).architecture.shell, Random(7)
    assert shell is not None
    medium = shell.media[0]
    assert isinstance(medium, TileMedium)
    sizes = [(height, width) for height in (1, 20, 40, 99) for width in (1, 3, 20, 60)]
    sizes += [(random.randint(1, 99), random.randint(1, 99)) for _ in range(400)]
    for size in sizes:
        given = {"image_sizes": torch.tensor([size]), "batch_num_images": torch.tensor([1])}
        tiles = image_size_to_num_patches(size, canvases, tile)
        assert medium.list_tiles(given) == [tiles], size
        _, (count,) = TILED[family].pack_image_features(
            SimpleNamespace(config=config),
            [torch.empty(tiles, medium.of_tile, 1)],
            given["image_sizes"],
            image_newline=torch.empty(1),
            **MORE[family],
        )
        assert medium.count_tokens(given) == count, size


def test_a_tower_whose_pictures_differ_in_size_is_refused_by_name(tmp_path: Path) -> None:
    path = make_model(tmp_path, "llava")
    config = json.loads((path / "config.json").read_text())
    config["vision_config"] |= {"model_type": "pixtral"}
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConversionError, match=r"vision_config\.model_type = 'pixtral': it can be"):
        bound(path)
