"""What is learnt, and by which policy: a small Qwen2 with random weights learns to count."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging as transformers_logging

from megatron_policy import BatchedDataDict, LossInputType, LossType

VOCAB, LENGTH, ROWS = 32, 16, 16
PROMPT = [5, 6, 7]
LEARNING_RATE = 1e-3


def make_checkpoint(path: Path, seed: int = 0) -> Path:
    """Write a Qwen2 with random weights, in fp32; return `path`."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=128,
        vocab_size=VOCAB,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        initializer_range=0.1,
    )
    transformers_logging.disable_progress_bar()
    Qwen2ForCausalLM(config).save_pretrained(path)
    return path


def policy_section(path: Path, tp: int = 1, pp: int = 1) -> dict[str, Any]:
    """The policy's configuration."""
    return {
        "model_name": str(path),
        "precision": "float32",
        "train_global_batch_size": ROWS,
        "train_micro_batch_size": ROWS,
        "logprob_batch_size": ROWS,
        "max_total_sequence_length": LENGTH,
        "megatron_cfg": {
            "enabled": True,
            "tensor_model_parallel_size": tp,
            "pipeline_model_parallel_size": pp,
            "optimizer": {
                "lr": LEARNING_RATE,
                "min_lr": LEARNING_RATE,
                "weight_decay": 0.0,
                # Two thirds of the weights: refits of what has changed leave them out.
                "param_groups": [{"names": ["*.mlp.*"], "freeze": True}],
            },
        },
    }


def counting(seed: int) -> BatchedDataDict:
    """Rows that count up from a random number, wrapping around after the last."""
    generator = torch.Generator().manual_seed(seed)
    first_B1 = torch.randint(VOCAB, (ROWS, 1), generator=generator)
    tokens_BS = (first_B1 + torch.arange(LENGTH)) % VOCAB
    return BatchedDataDict(
        input_ids=tokens_BS,
        token_mask=torch.ones(ROWS, LENGTH),
        sample_mask=torch.ones(ROWS),
    )


@dataclass(frozen=True)
class NextNumberLoss:
    """Mean negative log-probability of the tokens."""

    loss_type: ClassVar[LossType] = LossType.TOKEN_LEVEL
    input_type: ClassVar[LossInputType] = LossInputType.LOGPROB

    def __call__(
        self,
        data: Mapping[str, Tensor],
        global_valid_seqs: Tensor,
        global_valid_toks: Tensor,
        next_token_logprobs: Tensor,
    ) -> tuple[Tensor, dict[str, float]]:
        mask = data["token_mask"][:, 1:] * data["sample_mask"].unsqueeze(-1)
        loss = -(next_token_logprobs * mask).sum() / global_valid_toks
        return loss, {"loss": loss.item()}
