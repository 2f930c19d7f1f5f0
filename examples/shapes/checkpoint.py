"""Makes the checkpoint that a run starts from: a Qwen3-VL, its tokenizer and its processor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    PreTrainedTokenizerBase,
    Qwen2VLImageProcessorPil,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from quickstart.checkpoint import train_tokenizer

from .task import END, KINDS, LAZY, MERGE, MOST, PATCH, SEEN, START

WIDTH, LAYERS, HEADS, GROUPS = 128, 2, 4, 2
TOWER: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_heads": 4,
    "patch_size": PATCH,
    "spatial_merge_size": MERGE,
    "num_position_embeddings": 256,
    "out_hidden_size": WIDTH,
    "deepstack_visual_indexes": [0],
}
INIT = 0.15
"""Standard deviation of new weights: as large as small matrices need it."""
MARKS = {
    "image_token_id": SEEN,
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}


def make_checkpoint(
    path: Path, seed: int
) -> tuple[PreTrainedTokenizerBase, Qwen2VLImageProcessorPil]:
    """Write a Qwen3-VL with random weights to `path`; return its tokenizer and processor."""
    answers = (LAZY, *(f" {count}" for count in range(MOST + 1)))
    texts = [f"how many {kind}s?{answer}" for kind in KINDS for answer in answers]
    tokenizer = train_tokenizer(texts)
    tokenizer.add_special_tokens({"additional_special_tokens": [*MARKS.values()]})
    processor = Qwen2VLImageProcessorPil(patch_size=PATCH, merge_size=MERGE, do_resize=False)
    torch.manual_seed(seed)
    text = {
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPS,
        "head_dim": WIDTH // HEADS,
        "intermediate_size": 2 * WIDTH,
        "vocab_size": len(tokenizer),
        "max_position_embeddings": 128,
        "bos_token_id": None,
        "initializer_range": INIT,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [8, 4, 4],
            "mrope_interleaved": True,
        },
    }
    config = Qwen3VLConfig(
        text_config=text,
        vision_config=TOWER | {"initializer_range": INIT},
        tie_word_embeddings=False,
        **{field: tokenizer.convert_tokens_to_ids(mark) for field, mark in MARKS.items()},
    )
    Qwen3VLForConditionalGeneration(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    processor.save_pretrained(path)
    return tokenizer, processor
