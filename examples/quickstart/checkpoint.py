"""Makes the checkpoint that a run starts from."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from tokenizers.decoders import ByteLevel
from transformers import (
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

PAD, END = "<pad>", "<end>"
HIDDEN, LAYERS, HEADS, GROUPS, FFN = 128, 2, 4, 2, 256


def make_checkpoint(path: Path, texts: Iterable[str], seed: int, end: str = END) -> Path:
    """Write a Qwen2 with random weights and a tokenizer for `texts`; return `path`."""
    tokenizer = train_tokenizer(texts, end)
    torch.manual_seed(seed)
    config = Qwen2Config(
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        intermediate_size=FFN,
        vocab_size=len(tokenizer),
        max_position_embeddings=128,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    Qwen2ForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def train_tokenizer(texts: Iterable[str], end: str = END) -> PreTrainedTokenizerBase:
    """A byte-pair tokenizer for the words of `texts`, with tokens for padding and the end."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=512, special_tokens=[PAD, end], show_progress=False)
    inner.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token=PAD, eos_token=end)
