"""What vLLM reads pictures with, for tiny models: processors, which are transformers' own classes,
and tokenizers that know their tokens; and prompts with pictures.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast

from megatron_policy.batch import BatchedDataDict
from megatron_policy.converters.architecture import join_rows
from tests.picture_models import (
    END,
    IMAGE,
    MEDIA,
    SOUND_END,
    SOUND_START,
    START,
    VIDEO,
    WHOLE,
)

Fields = dict[str, Any]


@dataclass(frozen=True)
class Seeing:
    """What a family's checkpoint has for pictures."""

    parts: Fields
    """Its `processor_config.json`."""
    words: dict[int, str]
    """What its tokenizer calls tokens."""
    config: Fields
    """Fields of `config.json` that name them."""
    picture: tuple[int, ...] = (IMAGE,)
    """What stands for a picture in a prompt."""
    named: dict[str, int] = field(default_factory=dict)
    """Tokens that the tokenizer has as attributes."""
    size: tuple[int, int] = (0, 0)
    """Of all its pictures, if they have one size."""


PATCHES = {"patch_size": 2, "temporal_patch_size": 2, "merge_size": 2}
PATCHES |= {"size": {"shortest_edge": 64, "longest_edge": 1024}}
MARKS = {START: "<|vision_start|>", END: "<|vision_end|>"}
QWEN = {IMAGE: "<|image_pad|>", VIDEO: "<|video_pad|>"} | MARKS
BOTH = {"image_token_id": IMAGE, "video_token_id": VIDEO}
OF_VISION = {"vision_start_token_id": START, "vision_end_token_id": END}
GLM = {"image_start_token_id": START, "image_end_token_id": END}
GLM |= {"video_start_token_id": SOUND_START, "video_end_token_id": SOUND_END}
GLM_WORDS = {IMAGE: "<|image|>", VIDEO: "<|video|>"}
GLM_WORDS |= {START: "<|begin_of_image|>", END: "<|end_of_image|>"}
GLM_WORDS |= {SOUND_START: "<|begin_of_video|>", SOUND_END: "<|end_of_video|>"}
LINES = {100 + count: "\n" * count for count in range(1, 5)}
INDEX = {"image_token_index": IMAGE}
PLAIN = {IMAGE: "<image>", VIDEO: "<video>"}
SQUARE = {"height": 8, "width": 8}
CROPPED = {"size": {"shortest_edge": 8}, "crop_size": SQUARE}
CANVASES = {"image_grid_pinpoints": [[8, 16], [16, 8], [16, 16]]}
WHOLE_TILE = {"size": {"longest_edge": 8}, "max_image_size": {"longest_edge": 8}}
OF_CLIP = {"patch_size": 4, "num_additional_image_tokens": 1}
OF_CLIP |= {"vision_feature_select_strategy": "default"}


def join_parts(processor: str, image: Fields, video: Fields | None = None, **more: Any) -> Fields:
    """The `processor_config.json` of a processor of that class."""
    parts = {"processor_class": processor, "image_processor": image} | more
    return parts | ({"video_processor": video} if video else {})


def take_patches(processor: str, image: str, video: str) -> Fields:
    """The same of one that cuts pictures of many sizes into patches."""
    return join_parts(
        processor,
        {"image_processor_type": image} | PATCHES,
        {"video_processor_type": video} | PATCHES,
    )


def see_as_qwen(processor: str, video: str) -> Seeing:
    """One of Qwen's models."""
    parts = take_patches(processor, "Qwen2VLImageProcessor", video)
    return Seeing(parts, QWEN, BOTH | OF_VISION, (START, IMAGE, END))


QWEN3 = see_as_qwen("Qwen3VLProcessor", "Qwen3VLVideoProcessor")
GLM4V = Seeing(
    take_patches("Glm4vProcessor", "Glm4vImageProcessor", "Glm4vVideoProcessor"),
    GLM_WORDS,
    BOTH | GLM,
    (START, IMAGE, END),
)
SEEING: dict[str, Seeing] = {
    "gemma3": Seeing(
        join_parts(
            "Gemma3Processor",
            {
                "image_processor_type": "Gemma3ImageProcessor",
                "size": {"height": 16, "width": 16},
                "pan_and_scan_max_num_crops": 1,
            },
            image_seq_length=4,
        ),
        {IMAGE: "<image_soft_token>", START: "<start_of_image>", END: "<end_of_image>"} | LINES,
        INDEX | {"boi_token_index": START, "eoi_token_index": END},
        (START,),
        {"image_token": IMAGE, "boi_token": START, "eoi_token": END},
        (16, 16),
    ),
    "glm4v": GLM4V,
    "glm4v_moe": GLM4V,
    "idefics3": Seeing(
        join_parts(
            "Idefics3Processor",
            {"image_processor_type": "Idefics3ImageProcessor", "do_image_splitting": False}
            | WHOLE_TILE,
            image_seq_len=4,
        ),
        PLAIN | {START: "<fake_token_around_image>", END: "<global-img>"},
        {"image_token_id": IMAGE},
        size=(8, 8),
    ),
    "internvl": Seeing(
        join_parts(
            "InternVLProcessor",
            {"image_processor_type": "GotOcr2ImageProcessor", "size": SQUARE},
            {"video_processor_type": "InternVLVideoProcessor", "size": SQUARE},
            image_seq_length=4,
        ),
        {IMAGE: "<IMG_CONTEXT>", VIDEO: "<video>", START: "<img>", END: "</img>"},
        {"image_token_id": IMAGE},
        named={
            "start_image_token": START,
            "end_image_token": END,
            "context_image_token": IMAGE,
            "video_token": VIDEO,
        },
        size=(8, 8),
    ),
    "llava": Seeing(
        join_parts(
            "LlavaProcessor", {"image_processor_type": "CLIPImageProcessor"} | CROPPED, **OF_CLIP
        ),
        PLAIN,
        INDEX,
        size=(8, 8),
    ),
    "llava_next": Seeing(
        join_parts(
            "LlavaNextProcessor",
            {"image_processor_type": "LlavaNextImageProcessor"} | CROPPED | CANVASES,
            **OF_CLIP,
        ),
        PLAIN,
        INDEX,
    ),
    "llava_onevision": Seeing(
        join_parts(
            "LlavaOnevisionProcessor",
            {"image_processor_type": "LlavaOnevisionImageProcessor", "size": SQUARE} | CANVASES,
            {"video_processor_type": "LlavaOnevisionVideoProcessor", "size": SQUARE},
            num_image_tokens=4,
            vision_feature_select_strategy="full",
            vision_aspect_ratio="anyres_max_9",
        ),
        PLAIN,
        INDEX | {"video_token_index": VIDEO},
    ),
    "mistral3": Seeing(
        join_parts(
            "PixtralProcessor",
            {
                "image_processor_type": "PixtralImageProcessor",
                "patch_size": {"height": 2, "width": 2},
                "size": {"longest_edge": 32},
            },
            patch_size=2,
            spatial_merge_size=2,
        ),
        {IMAGE: "[IMG]", START: "[IMG_BREAK]", END: "[IMG_END]"},
        INDEX,
    ),
    "qwen2_vl": see_as_qwen("Qwen2VLProcessor", "Qwen2VLVideoProcessor"),
    "qwen2_5_vl": see_as_qwen("Qwen2_5_VLProcessor", "Qwen2VLVideoProcessor"),
    "qwen3_vl": QWEN3,
    "qwen3_vl_moe": QWEN3,
    "qwen3_5": QWEN3,
    "qwen3_5_moe": QWEN3,
    "smolvlm": Seeing(
        join_parts(
            "SmolVLMProcessor",
            {"image_processor_type": "SmolVLMImageProcessor", "do_image_splitting": False}
            | WHOLE_TILE,
            {"video_processor_type": "SmolVLMVideoProcessor"} | WHOLE_TILE,
            image_seq_len=4,
        ),
        PLAIN | {START: "<fake_token_around_image>", END: "<global-img>"},
        {"image_token_id": IMAGE},
        size=(8, 8),
    ),
}


def add_processor(path: Path, family: str, vocab: int) -> None:
    """Give a checkpoint its processor and tokenizer, and its config their tokens."""
    seeing, file = SEEING[family], path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | seeing.config, indent=2))
    words = [seeing.words.get(number, f"w{number}") for number in range(vocab)]
    inner = Tokenizer(models.WordLevel({w: n for n, w in enumerate(words)}, unk_token="w0"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.add_special_tokens([*seeing.words.values()])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        extra_special_tokens={name: words[number] for name, number in seeing.named.items()},
        **{name: words[n] for n, name in enumerate(("unk_token", "bos_token", "eos_token"))},
        pad_token=words[2],
    )
    tokenizer.save_pretrained(path)
    (path / "processor_config.json").write_text(json.dumps(seeing.parts))


ALONE = ("llava_onevision",)
"""Families of which vLLM cuts several pictures of a row into tiles, which transformers does not."""
SEEDS = {"qwen3_5_moe": 19, "qwen3_5_moe_text": 2}
"""With which the policy takes no other expert in bf16 than transformers does in fp64, and vLLM none
that shows. In 41 of 75 readings with these and other seeds up to 4 of some 200 choices were others,
and log-probabilities up to 1.0 off; from transformers in fp64 with the policy's choices all were
within 0.07, as those of the other readings were from transformers in fp64.
"""


def publish(path: Path, family: str) -> None:
    """Give a checkpoint the names and fields that published ones have, as vLLM wants them."""
    if family in ("gemma3", "llava", "llava_next", "llava_onevision"):
        weights = load_file(path / "model.safetensors")
        named = {
            name.replace("vision_tower.", "vision_tower.vision_model.", 1): tensor
            for name, tensor in weights.items()
        }
        save_file(named, path / "model.safetensors", {"format": "pt"})
    if family == "qwen3_vl_moe":  # as transformers 4 saved them
        weights, file = load_file(path / "model.safetensors"), path / "config.json"
        turned = {
            name: each.mT.contiguous() if ".mlp.experts." in name else each
            for name, each in weights.items()
        }
        save_file(turned, path / "model.safetensors", {"format": "pt"})
        config = json.loads(file.read_text()) | {"transformers_version": "4.57.1"}
        file.write_text(json.dumps(config))
    if family in ("glm4v", "glm4v_moe"):
        config = json.loads((path / "config.json").read_text())
        text = config["text_config"]
        if family == "glm4v":
            text["attention_bias"] = True
        else:
            head_dim = text["hidden_size"] // text["num_attention_heads"]
            text |= {"head_dim": head_dim, "use_qk_norm": False}
        (path / "config.json").write_text(json.dumps(config))


def draw_prompts(family: str) -> list[Any]:
    """Prompts of vLLM: of text alone, of a picture, of two, and of the first one again."""
    seeing, random = SEEING[family], np.random.default_rng(SEEDS.get(family, 7))

    from PIL import Image  # of an extra: not all that imports this file has it

    def draw(height: int, width: int) -> Image.Image:
        shape = (*(seeing.size if any(seeing.size) else (height, width)), 3)
        return Image.fromarray(random.integers(256, size=shape, dtype=np.uint8))

    first = draw(8, 12)
    prompts = []
    both = [draw(16, 16), draw(12, 8)]
    both = both[:1] if family in ALONE else both
    for pictures in ([], [first], both, [first]):
        tokens = random.integers(3, 100, 6).tolist()
        for _ in pictures:
            tokens += [*seeing.picture, *random.integers(3, 100, 3).tolist()]
        prompt = {"prompt_token_ids": tokens, "multi_modal_data": {"image": pictures}}
        prompts.append(prompt if pictures else tokens)
    return prompts


def join_rendered(family: str, rendered: Sequence[tuple[list[int], Fields]]) -> BatchedDataDict:
    """The policy's rows of what vLLM has made of prompts: tokens, and arrays of the pictures."""
    ids = [torch.tensor(tokens) for tokens, _ in rendered]
    ids_BS = pad_sequence(ids, batch_first=True)
    lengths = torch.tensor([len(each) for each in ids])
    inside = torch.arange(ids_BS.size(1)) < lengths.unsqueeze(1)
    found = [_read_media(family, media) for _, media in rendered]
    keys = [key for key in WHOLE.get(family, MEDIA) if any(key in own for own in found)]
    return BatchedDataDict(
        {
            "input_ids": ids_BS,
            "input_lengths": lengths,
            "token_mask": (inside & (ids_BS != IMAGE)).long(),
            "sample_mask": torch.ones(len(ids)),
            **{key: [own.get(key) for own in found] for key in keys},
        }
    )


def _read_media(family: str, media: Fields) -> dict[str, torch.Tensor]:
    """What the policy reads of a row; vLLM has pictures of different sizes in a list."""
    if not media:
        return {}
    own = {
        key: join_rows([torch.from_numpy(each).unsqueeze(0) for each in value])
        if isinstance(value, list)
        else torch.from_numpy(value)
        for key, value in media.items()
    }
    pixels = media["pixel_values"]
    if family == "mistral3":
        own["image_sizes"] = torch.tensor([each.shape[-2:] for each in pixels])
    if family == "llava_onevision":
        own["batch_num_images"] = torch.tensor([len(pixels)])
    return own
