"""Tiny random models that also see pictures or hear sound, and rows for them: of text alone, of one
picture, of two, of videos, and of clips of sound, in rows of different lengths.

Shapes: B rows, S positions.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForImageTextToText,
    LlavaNextModel,
    LlavaOnevisionModel,
)
from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches

from megatron_policy.batch import BatchedDataDict
from megatron_policy.converters.architecture import join_rows
from tests.checkpoints import IS_OLDER, check_decoder, config_of, save_as_published
from tests.families import kimi_k25, nemotron_h, nemotron_h_omni
from tests.families.deepseek_v3 import LATENT_FIELDS
from tests.families.qwen3_next import RANGES

Fields = dict[str, Any]
IMAGE, VIDEO, START, END = 120, 121, 122, 123
SOUND, SOUND_START, SOUND_END = 124, 125, 126
VOCAB, MERGE = 128, 2
TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}
HEARD = {
    "audio_token_id": SOUND,
    "audio_start_token_id": SOUND_START,
    "audio_end_token_id": SOUND_END,
}
TEXT: Fields = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "initializer_range": 0.1,
}
VISION: Fields = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "in_channels": 3,
    "patch_size": 2,
    "temporal_patch_size": 2,
    "spatial_merge_size": MERGE,
    "out_hidden_size": TEXT["hidden_size"],
    "initializer_range": 0.1,
}
WINDOWED = {"window_size": 8, "fullatt_block_indexes": [1], "tokens_per_second": 2}
PLACED = {"num_position_embeddings": 64}
DEEP = PLACED | {"deepstack_visual_indexes": [0, 1]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
ROPE: Fields = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
INTERLEAVED = {"head_dim": 8, "rope_parameters": ROPE | {"mrope_interleaved": True}}
PARTIAL = ROPE | {"mrope_interleaved": True, "partial_rotary_factor": 0.5}
GATED: Fields = {
    "head_dim": 16,
    "rms_norm_eps": 1e-3,  # as tests/families/qwen3_next.py says why
    "rope_parameters": PARTIAL,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
OLDER = {name: value for name, value in VISION.items() if not name.endswith("hidden_size")}
TOWER: Fields = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "initializer_range": 0.1,
}
CANVASES = [[8, 16], [16, 8], [16, 16], [16, 24]]
LLAMA = TEXT | {"tie_word_embeddings": False}
HALF = {"head_dim": 16, "rope_parameters": ROPE | {"partial_rotary_factor": 0.5}}
SIGMOID: Fields = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
}
IDEFICS: Fields = {
    "text_config": LLAMA | {"model_type": "llama"},
    "vision_config": TOWER | {"image_size": 8, "patch_size": 2},
    "scale_factor": MERGE,
    "image_token_id": IMAGE,
}
LATENT = LATENT_FIELDS | {"n_group": 1, "topk_group": 1}
BINS = 8
LISTENING: Fields = {
    "d_model": 16,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "num_mel_bins": BINS,
    "output_dim": TEXT["hidden_size"],
    "n_window": 8,
    "initializer_range": 0.1,
}
CONVOLVED = {"n_window": 50, "n_window_infer": 100, "downsample_hidden_size": 4}
TINY: dict[str, Fields] = {
    "gemma3": {
        "text_config": TEXT
        | {
            "head_dim": 8,
            "query_pre_attn_scalar": 12,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "sliding_window": 5,  # shorter than a picture
        },
        "vision_config": TOWER
        | {"model_type": "siglip_vision_model", "image_size": 8, "patch_size": 2}
        | {"vision_use_head": False},
        "mm_tokens_per_image": 16,
        "image_token_index": IMAGE,
        "boi_token_index": START,
        "eoi_token_index": END,
    },
    "glm4v": {
        "text_config": TEXT | HALF | {"num_attention_heads": 2},
        "vision_config": VISION | {"image_size": 16},
        "tie_word_embeddings": False,
    },
    "glm4v_moe": {
        "text_config": TEXT | HALF | SIGMOID,
        "vision_config": VISION | {"image_size": 16},
        "tie_word_embeddings": False,
    },
    "idefics3": IDEFICS,
    "internvl": {
        "text_config": TEXT | {"model_type": "qwen2"},
        "vision_config": TOWER
        | {
            "model_type": "internvl_vision",
            "attention_bias": True,
            "image_size": [8, 8],
            "patch_size": [2, 2],
            "use_qk_norm": True,
        },
        "downsample_ratio": 1 / MERGE,
        "image_token_id": IMAGE,
        "tie_word_embeddings": True,
    },
    "llava": {
        "text_config": LLAMA | {"model_type": "llama"},
        "vision_config": TOWER
        | {"model_type": "clip_vision_model", "image_size": 8, "patch_size": 4},
        "image_token_index": IMAGE,
    },
    "kimi_k25": {
        "text_config": TEXT | SIGMOID | LATENT | {"model_type": "kimi_k2"},
        "vision_config": kimi_k25.TINY,
        "projection_hidden_size": kimi_k25.TINY["hidden_size"],
        "tie_word_embeddings": False,
    },
    "llava_next": {
        "text_config": LLAMA | {"model_type": "mistral", "sliding_window": None},
        "vision_config": TOWER
        | {"model_type": "clip_vision_model", "image_size": 8, "patch_size": 4},
        "image_grid_pinpoints": CANVASES,
        "image_token_index": IMAGE,
    },
    "llava_onevision": {
        "text_config": LLAMA | {"model_type": "qwen2"},
        "vision_config": TOWER
        | {"model_type": "siglip_vision_model", "image_size": 8, "patch_size": 4}
        | {"vision_use_head": False},
        "image_grid_pinpoints": CANVASES,
        "image_token_index": IMAGE,
        "video_token_index": VIDEO,
        "vision_aspect_ratio": "anyres_max_3",
    },
    "mistral3": {
        "text_config": LLAMA | {"model_type": "mistral", "head_dim": 8, "sliding_window": None},
        "vision_config": TOWER
        | {"model_type": "pixtral", "image_size": 32, "patch_size": 2, "head_dim": 8},
        "spatial_merge_size": MERGE,
        "image_token_index": IMAGE,
    },
    "nemotron_h_omni": {
        "text_config": TEXT
        | nemotron_h.PARTS
        | nemotron_h.SAMPLES.take_turns(4)
        | {"model_type": "nemotron_h", "head_dim": 8, "layer_norm_epsilon": 1e-3},
        "vision_config": nemotron_h_omni.VISION,
        "audio_config": nemotron_h_omni.AUDIO,
        "audio_token_id": SOUND,
        **nemotron_h_omni.WIDTHS,
    },
    "qwen2_vl": {
        "text_config": TEXT | {"rope_parameters": ROPE},
        "vision_config": {name: OLDER[name] for name in OLDER if name != "intermediate_size"}
        | {"embed_dim": 16, "hidden_size": TEXT["hidden_size"]},
        "tie_word_embeddings": False,
    },
    "qwen2_5_omni_thinker": {
        "text_config": TEXT | {"rope_parameters": ROPE},
        "vision_config": VISION | WINDOWED,
        "audio_config": LISTENING,
        "tie_word_embeddings": False,
        **HEARD,
    },
    "qwen2_5_vl": {
        "text_config": TEXT | {"rope_parameters": ROPE},
        "vision_config": VISION | WINDOWED,
        "tie_word_embeddings": True,
    },
    "qwen3_5": {
        "text_config": TEXT | GATED,
        "vision_config": VISION | PLACED,
        "tie_word_embeddings": False,
    },
    "qwen3_5_moe": {
        "text_config": TEXT | GATED | EXPERTS | {"shared_expert_intermediate_size": 24},
        "vision_config": VISION | PLACED,
        "tie_word_embeddings": False,
    },
    "qwen3_omni_moe_thinker": {
        "text_config": TEXT | INTERLEAVED | EXPERTS | {"mlp_only_layers": [1]},
        "vision_config": VISION | DEEP,
        "audio_config": LISTENING | CONVOLVED,
        "tie_word_embeddings": False,
        **HEARD,
    },
    "qwen3_vl": {
        "text_config": TEXT | INTERLEAVED,
        "vision_config": VISION | DEEP,
        "tie_word_embeddings": False,
    },
    "qwen3_vl_moe": {
        "text_config": TEXT | INTERLEAVED | EXPERTS | {"mlp_only_layers": [1]},
        "vision_config": VISION | DEEP,
        "tie_word_embeddings": False,
    },
    "smolvlm": IDEFICS,
}
PATCH = VISION["in_channels"] * VISION["temporal_patch_size"] * VISION["patch_size"] ** 2
MEDIA = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw")
SOUNDS = ("video_second_per_grid", "input_features", "feature_attention_mask")
OF_OMNI = ("image_grid_hw", "input_features_mask")
SECONDS = ("second_per_grid_ts", "video_second_per_grid")
KEYS = (*MEDIA, "batch_num_images", "image_sizes", SECONDS[0], *SOUNDS, *OF_OMNI)
FIXED = dict.fromkeys(("idefics3", "internvl", "llava", "smolvlm"), 4) | {"gemma3": 16}
"""Families whose pictures are all of 8 x 8 pixels, and how many tokens one makes."""
BY_ROW = ("idefics3", "smolvlm")
"""Families whose classes take the pictures of each row apart."""
WHOLE = {
    **dict.fromkeys(FIXED, ("pixel_values",)),
    "llava_next": ("pixel_values", "image_sizes"),
    "llava_onevision": (
        *("pixel_values", "batch_num_images", "image_sizes", "pixel_values_videos"),
    ),
    "mistral3": ("pixel_values", "image_sizes"),
    # Of videos alone it reads whole frames.
    "nemotron_h_omni": (
        *("pixel_values", "image_grid_hw", "pixel_values_videos"),
        *("input_features", "input_features_mask"),
    ),
}
"""Families that read other keys than `MEDIA`, most of them whole pictures, and what they read."""
TILED = {"llava_next": LlavaNextModel, "llava_onevision": LlavaOnevisionModel}
"""Families that see pictures in tiles of 8 x 8 pixels, and their classes."""
TILE = (8, 8)
MORE: dict[str, Fields] = {
    "llava_next": {"vision_feature_select_strategy": "default"},
    "llava_onevision": {"vision_aspect_ratio": "anyres_max_3"},
}
STILL = WHOLE | {"kimi_k25": MEDIA[:2]}
"""Families that read no videos, and what they read."""
try:
    from transformers.models.nemotron_h_omni import modeling_nemotron_h_omni
except ModuleNotFoundError:
    assert IS_OLDER
    OMNI_SEES_VIDEOS = False
else:
    _omni = modeling_nemotron_h_omni.NemotronH_Omni_Reasoning_V3
    OMNI_SEES_VIDEOS = "tuple(" in inspect.getsource(_omni.get_video_features)
"""Whether this release of transformers has the class, which does not fail at them."""
BY_FRAME = (
    *("glm4v", "glm4v_moe", "nemotron_h_omni", "qwen3_5", "qwen3_5_moe", "qwen3_vl"),
    "qwen3_vl_moe",
)
"""Families with other tokens between the frames of a video."""
IMAGES: tuple[Sequence[tuple[int, int, int]], ...] = (
    *((), [(1, 4, 6)], [(1, 4, 6)], ()),
    *([(1, 4, 4), (1, 6, 4)], [(1, 4, 4)], [(1, 4, 8)], ()),
)
VIDEOS: dict[int, tuple[int, int, int]] = {3: (2, 4, 4), 5: (3, 2, 4)}
CLIPS: dict[str, dict[int, tuple[tuple[int, int], ...]]] = {
    "nemotron_h_omni": {0: ((23, 3),), 1: ((8, 2), (40, 6)), 6: ((16, 3),)},
    "qwen2_5_omni_thinker": {0: ((23, 6),), 1: ((9, 2), (40, 10)), 6: ((12, 3),)},
    "qwen3_omni_moe_thinker": {0: ((140, 18),), 1: ((9, 2), (30, 4)), 6: ((12, 2),)},
}
"""Of families that hear sound, the frames and the tokens of the clips that a row has: several
chunks, or fewer than one.
"""


def list_tokens(family: str) -> dict[str, int]:
    """The fields of the whole model's config that name tokens."""
    if family == "nemotron_h_omni":
        return {"image_token_id": IMAGE}
    if family in WHOLE:
        return {}
    if family in ("glm4v", "glm4v_moe"):
        return {"image_token_id": IMAGE, "image_start_token_id": START, "image_end_token_id": END}
    return {name: TOKENS[name] for name in TOKENS if family not in STILL or "video" not in name}


def make_model(path: Path, family: str, dtype: torch.dtype = torch.float32) -> Path:
    """A checkpoint with nothing in it trivial."""
    config = config_of(family, **TINY[family], **list_tokens(family))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        check_decoder(model)
        with torch.no_grad():
            for name, parameter in (*model.named_parameters(), *model.named_buffers()):
                if not parameter.is_floating_point():
                    continue
                if name.endswith("bias") or not parameter.any():
                    parameter.normal_(0.0, 0.1)
                elif name.endswith("running_var") or (
                    parameter.ndim == 1 and isinstance(parameter, torch.nn.Parameter)
                ):
                    parameter.uniform_(0.5, 1.5)
                if family.startswith("qwen3_5") and ".language_model." in name:
                    for part, between in RANGES.items():
                        if part in name:
                            parameter.uniform_(*between)
    save_as_published(model.to(dtype), path)
    return path


def stack_experts(path: Path) -> Path:
    """Write all experts of a layer in two tensors, as published Qwen3.5 has them."""
    weights = load_file(path / "model.safetensors")
    for start in {name.rpartition(".0.")[0] for name in weights if ".experts.0." in name}:
        gate, up, down = (
            torch.stack([weights.pop(f"{start}.{e}.{name}_proj.weight") for e in range(4)])
            for name in ("gate", "up", "down")
        )
        weights |= {f"{start}.gate_up_proj": torch.cat([gate, up], 1), f"{start}.down_proj": down}
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path


def drop_constants(path: Path) -> Path:
    """Leave out of a Nemotron Omni's files what published ones have not: factors of its tower,
    which are then what its config says.
    """
    weights = load_file(path / "model.safetensors")
    weights = {name: each for name, each in weights.items() if not name.endswith("lambda1")}
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config["vision_config"] |= {"layerscale_value": 0.6}
    (path / "config.json").write_text(json.dumps(config))
    return path


def load_model(path: Path | str, dtype: torch.dtype = torch.float32) -> Any:
    """The checkpoint's model, whose attention and experts are plain torch in every dtype."""
    model = AutoModelForImageTextToText.from_pretrained(
        path, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    )
    return model.eval()


def make_rows(family: str, repeats: int = 1) -> BatchedDataDict:
    """Rows with what `MEDIA` are of each, tokens whose counts differ, and masks. The second and the
    third of eight rows have the same picture. Rows of families that hear sound have clips too, and
    videos the seconds between their frames. Videos are frame by frame between other tokens for
    the families that have them so, else all frames together.
    """
    random = torch.Generator().manual_seed(7)

    def words(count: int) -> list[int]:
        return torch.randint(3, 100, (count,), generator=random).tolist()

    tokens: list[list[int]] = []
    found: dict[str, list[Any]] = {key: [] for key in KEYS}
    for row in range(len(IMAGES) * repeats):
        images, videos = IMAGES[row % 8], [VIDEOS[row % 8]] if row % 8 in VIDEOS else []
        videos = videos if "pixel_values_videos" in STILL.get(family, MEDIA) else []
        videos = [] if family == "nemotron_h_omni" and not OMNI_SEES_VIDEOS else videos
        film = VIDEO
        # Placeholders of videos can be those of pictures.
        if family.startswith(("glm", "nemotron")) and videos:
            images, film = (), IMAGE
        clips = CLIPS.get(family, {}).get(row % 8, ())
        ids = words(2 + row % 3)
        alone = family == "llava_onevision" and len(images) > 1
        cuts = [_cut(family, grid, alone) for grid in images]
        for _, count in cuts:
            ids += [START, *[IMAGE] * count, END, *words(2)]
        for _, count in clips:
            ids += [SOUND_START, *[SOUND] * count, SOUND_END, *words(1)]
        for grid in videos:
            apart = grid[0] if family in BY_FRAME else 1
            # Of a frame in one tile there is one feature, and one ends a video.
            count = grid[0] + 1 if family in TILED else _patches(grid) // MERGE**2 // apart
            for _ in range(apart):
                ids += [START, *[film] * count, END, *words(1)]
        tokens.append(ids + words(4 + row % 5))
        for key, grids in (("pixel_values", images), ("pixel_values_videos", videos)):
            patch = (3, 2, 2) if family == "kimi_k25" else (PATCH,)
            shapes: list[tuple[int, ...]] = [(_patches(grid), *patch) for grid in grids]
            sizes = [_measure(family, grid) for grid in grids]
            if family in TILED:
                shapes = [(1, tiles, 3, *TILE) for tiles, _ in cuts]
                if key == "pixel_values_videos":
                    shapes = [(1, grid[0], 3, *TILE) for grid in grids]
            elif family == "nemotron_h_omni":
                shapes = [(_patches(grid), 12) for grid in grids]
                if key == "pixel_values_videos":  # two frames are read together
                    shapes = [
                        (1, grid[0], 6, *size) for grid, size in zip(grids, sizes, strict=True)
                    ]
            elif family in WHOLE:
                shapes = [(1, 3, *size) for size in sizes]
            pixels = [torch.randn(shape, generator=random) for shape in shapes]
            found[key].append(join_rows(pixels) if grids else None)
        if row % 8 == 2:
            found["pixel_values"][-1] = found["pixel_values"][-2].clone()
        given = {
            "batch_num_images": [len(images)] if images else [],
            "image_grid_thw": images,
            "image_grid_hw": [grid[1:] for grid in images],
            "image_sizes": [_measure(family, grid) for grid in images],
            "video_grid_thw": videos,
            **dict.fromkeys(SECONDS, [0.3 + 0.1 * (row % 8)] * len(videos)),
        }
        further = SOUNDS * (family in CLIPS) + SECONDS[:1] * (family == "qwen2_5_vl")
        for key, value in given.items():
            read = key in WHOLE.get(family, MEDIA + further)
            found[key].append(torch.tensor(value) if value and read else None)
        frames_N = torch.tensor([frames for frames, _ in clips])
        mask_NF = (torch.arange(max(frames_N, default=0) + 3) < frames_N.unsqueeze(1)).long()
        heard = torch.randn(len(clips), BINS, mask_NF.size(1), generator=random)
        masked = "feature_attention_mask"
        if family == "nemotron_h_omni":
            heard, masked = heard.mT.contiguous(), "input_features_mask"
        for key, value in (("input_features", heard), (masked, mask_NF)):
            found[key].append(value if clips else None)
    lengths = torch.tensor([*map(len, tokens)])
    ids_BS = torch.zeros(len(tokens), int(lengths.max()), dtype=torch.long)
    for row, own in enumerate(tokens):
        ids_BS[row, : len(own)] = torch.tensor(own)
    inside = torch.arange(ids_BS.size(1)) < lengths.unsqueeze(1)
    return BatchedDataDict(
        {
            **{key: rows for key, rows in found.items() if any(row is not None for row in rows)},
            "input_ids": ids_BS,
            "input_lengths": lengths,
            "token_mask": (inside & (ids_BS < IMAGE)).long() * (torch.arange(ids_BS.size(1)) > 0),
            "sample_mask": torch.ones(len(tokens)),
        }
    )


def _patches(grid: Sequence[int]) -> int:
    return grid[0] * grid[1] * grid[2]


def _cut(family: str, grid: Sequence[int], alone: bool) -> tuple[int, int]:
    """In how many tiles a picture is seen, and how many tokens it makes, by transformers' own code
    where that is not plain; `alone` says that it is seen as a whole alone.
    """
    if family not in TILED:
        return 1, FIXED.get(family) or _patches(grid) // MERGE**2
    size, config = _measure(family, grid), config_of(family, **TINY[family])
    of_tile = (TILE[0] // config.vision_config.patch_size) ** 2
    tiles = 1 if alone else image_size_to_num_patches(size, config.image_grid_pinpoints, TILE[0])
    pack = partial(TILED[family].pack_image_features, SimpleNamespace(config=config))
    features, newline = [torch.empty(tiles, of_tile, 1)], torch.empty(1)
    _, (count,) = pack(features, torch.tensor([size]), image_newline=newline, **MORE[family])
    return tiles, int(count)


def _measure(family: str, grid: Sequence[int]) -> tuple[int, int]:
    """The pixels of a picture in height and width."""
    if family in TILED:
        return 3 * grid[1] + 1, 3 * grid[2]
    return (8, 8) if family in FIXED else (2 * grid[1], 2 * grid[2])


def hf_inputs(model: Any, rows: BatchedDataDict, row: int) -> dict[str, Any]:
    """What a model of transformers is called with for one row: it counts positions of padding too.
    Not every tower makes pixels of its dtype.
    """
    own = rows["input_ids"][row : row + 1, : rows["input_lengths"][row]]
    given = ((key, rows[key][row]) for key in KEYS if key in rows)
    media = {key: value for key, value in given if value is not None}
    media |= {key: media[key].to(model.dtype) for key in media if key.startswith("pixel")}
    if model.config.model_type in BY_ROW and media:
        media = {key: value.unsqueeze(0) for key, value in media.items()}
    if model.config.model_type in CLIPS:  # the class makes positions of what a mask names
        return {"input_ids": own, "attention_mask": torch.ones_like(own), **media}
    types = (own == IMAGE).int() + 2 * (own == VIDEO).int()
    if model.config.model_type.startswith("glm") and "pixel_values_videos" in media:
        types = 2 * types
    whole = model.get_base_model() if hasattr(model, "get_base_model") else model  # PEFT's
    read = "mm_token_type_ids" in inspect.signature(whole.forward).parameters
    more = {"mm_token_type_ids": types} if media and read else {}
    if model.config.model_type == "gemma3":
        more = {"token_type_ids": types}
    return {"input_ids": own, **media, **more}


def hf_logprobs(model: Any, rows: BatchedDataDict) -> torch.Tensor:
    """Next-token log-probabilities `[B, S - 1]`, 0 beyond the rows' ends."""
    found = []
    for row, ids_S in enumerate(rows["input_ids"]):
        given = hf_inputs(model, rows, row)
        logits = model(**given, use_cache=False).logits[:, :-1].float()
        scores = logits.log_softmax(-1).gather(-1, given["input_ids"][:, 1:, None])[0, :, 0]
        found.append(torch.nn.functional.pad(scores, (0, len(ids_S) - 1 - len(scores))))
    return torch.stack(found)


def hf_values(model: Any, rows: BatchedDataDict, weight_1D: torch.Tensor) -> torch.Tensor:
    """What a head of one number makes of the hidden states, `[B, S]`, 0 beyond the rows' ends."""
    found = []
    for row, ids_S in enumerate(rows["input_ids"]):
        hidden_1LD = model.model(**hf_inputs(model, rows, row), use_cache=False).last_hidden_state
        values_L = (hidden_1LD @ weight_1D.to(hidden_1LD.dtype).T)[0, :, 0]
        found.append(torch.nn.functional.pad(values_L, (0, len(ids_S) - len(values_L))))
    return torch.stack(found)
