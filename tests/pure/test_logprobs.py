"""Log-probabilities from logits: a chunk at a time as all at once."""

from __future__ import annotations

import pytest
import torch

from megatron_policy.lm_head.logprobs import vocab_parallel_logprobs
from tests.pure.test_fused import ALONE, Watch


def logits_and_targets(rows: int, length: int, vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    logits_BSV = 3 * torch.randn(rows, length + 1, vocab, generator=random)
    # Losses leave the last position out, and what is left is not contiguous.
    return logits_BSV[:, :-1], torch.randint(vocab, (rows, length), generator=random)


@pytest.mark.parametrize("chunk", [1, 5, 1000])
@pytest.mark.parametrize("shape", [(1, 17), (3, 17), (4, 0)])
def test_chunks_give_log_softmax_and_its_gradient(shape: tuple[int, int], chunk: int) -> None:
    """1e-5: fp32 sums of 40 terms in another order."""
    logits_BSV, targets_BS = logits_and_targets(*shape, 40)
    weights_BS = torch.linspace(-1, 1, targets_BS.numel()).view(shape)
    found = []
    for of in ("ours", "torch"):
        leaf_BSV = logits_BSV.clone().requires_grad_()
        if of == "ours":
            logprobs_BS = vocab_parallel_logprobs(leaf_BSV, targets_BS, 0, ALONE, chunk)
        else:
            everything = leaf_BSV.log_softmax(-1)
            logprobs_BS = everything.gather(-1, targets_BS.unsqueeze(-1)).squeeze(-1)
        (logprobs_BS * weights_BS).sum().backward()
        found.append((logprobs_BS.detach(), leaf_BSV.grad))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("chunk", [8, 64])
def test_reading_holds_a_chunk_beyond_the_logits(chunk: int) -> None:
    logits_BSV, targets_BS = logits_and_targets(2, 64, 500)
    with Watch(logits_BSV) as watch, torch.no_grad():
        vocab_parallel_logprobs(logits_BSV, targets_BS, 0, ALONE, chunk)
    assert watch.largest == chunk * 500
