"""What every layout must reproduce: the Hugging Face model in one process, trained with torch's own
AdamW.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from megatron_policy.batch import BatchedDataDict
from tests.losses import loss_mask, token_nll

LR, WEIGHT_DECAY, CLIP = 1e-2, 0.1, 0.5
# A key bias shifts all scores of a query alike, so its gradient is exactly zero in theory and
# rounding noise in practice; with Adam's usual epsilon the update would be the noise's sign times
# the learning rate.
EPS = 1e-3
BETAS = (0.9, 0.999)


@dataclass(frozen=True)
class Trained:
    """Losses and gradient norms of each step, and the weights afterwards under their Hugging Face
    names.
    """

    losses: list[float]
    grad_norms: list[float]
    weights: dict[str, torch.Tensor]


def load_hf(path: Path | str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, attn_implementation="eager"
    ).eval()


def make_batch(rows: int, length: int, vocab: int, seed: int = 0) -> BatchedDataDict:
    """Right-padded sequences of unequal length with holes in the token mask and some samples left
    out.
    """
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, length + 1, (rows,), generator=random)
    lengths[0] = length
    inside = torch.arange(length) < lengths.unsqueeze(1)
    tokens = torch.randint(1, vocab, (rows, length), generator=random)
    holes = torch.rand(rows, length, generator=random) < 0.8
    sample_mask = (torch.rand(rows, generator=random) < 0.8).float()
    sample_mask[0] = 1.0
    return BatchedDataDict(
        {
            "input_ids": torch.where(inside, tokens, 0),
            "input_lengths": lengths,
            "token_mask": (inside & holes).long(),
            "sample_mask": sample_mask,
        }
    )


def hf_logprobs(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    """Next-token log-probabilities `[B, S - 1]`."""
    logits = model(tokens).logits[:, :-1].float()
    return logits.log_softmax(-1).gather(-1, tokens[:, 1:].unsqueeze(-1)).squeeze(-1)


def token_level(model: PreTrainedModel, data: BatchedDataDict) -> torch.Tensor:
    return token_nll(hf_logprobs(model, data["input_ids"]), data, loss_mask(data).sum())


def logit_level(model: PreTrainedModel, data: BatchedDataDict) -> torch.Tensor:
    logprobs = model(data["input_ids"]).logits[:, :-1].float().log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return (entropy * loss_mask(data)).sum() / loss_mask(data).sum()


def _decays(name: str, weight: torch.Tensor) -> bool:
    """Matrices do; biases do not, not even those of all experts in one tensor."""
    return weight.dim() > 1 and not name.endswith("bias")


def train(
    path: Path | str,
    data: BatchedDataDict,
    global_batch_size: int,
    loss_of: Callable[[PreTrainedModel, BatchedDataDict], torch.Tensor],
    dtype: torch.dtype = torch.float32,
    lr: float = LR,
) -> Trained:
    """One step per global batch, fp32 main weights, biases and norms not decayed, gradients clipped
    to CLIP.
    """
    model = load_hf(path, dtype)
    live = dict(model.named_parameters())
    main = {name: p.detach().float().clone() for name, p in live.items()}
    optimizer = torch.optim.AdamW(
        [
            {"params": [m for n, m in main.items() if _decays(n, m)], "weight_decay": WEIGHT_DECAY},
            {"params": [m for n, m in main.items() if not _decays(n, m)], "weight_decay": 0.0},
        ],
        lr=lr,
        betas=BETAS,
        eps=EPS,
    )
    losses, norms = [], []
    for index in range(data.size // global_batch_size):
        model.zero_grad()
        loss = loss_of(model, data.get_batch(index, global_batch_size))
        loss.backward()
        for name, parameter in live.items():
            main[name].grad = parameter.grad.float()
        norms.append(float(torch.nn.utils.clip_grad_norm_(main.values(), CLIP)))
        losses.append(loss.item())
        optimizer.step()
        with torch.no_grad():
            for name, parameter in live.items():
                parameter.copy_(main[name])
    weights = {name: p.detach().clone() for name, p in live.items()}
    return Trained(losses, norms, weights)
