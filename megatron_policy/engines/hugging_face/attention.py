"""This package's causal attention under a name that transformers' models can be given, so that they
compute packed and split sequences.

Shapes: S query positions, K key positions, B rows, N query heads, G key-value groups, H head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megatron_policy.attention.causal import Scores, Sequences, attend
from megatron_policy.errors import ConfigError

NAME = "megatron_policy"
_NOTHING = -1

# What layers pass on that has no effect on the scores, because masks and caches are made elsewhere.
_WITHOUT_EFFECT = """
    position_ids cache_position use_cache output_attentions output_hidden_states
    output_router_logits position_embeddings cu_seq_lens_q cu_seq_lens_k max_length_q
    max_length_k past_key_values past_key_value num_items_in_batch return_dict logits_to_keep
"""

_current: Sequences | None = None
"""Those of the microbatch that is computed. Autograd recomputes layers on threads of its own, so
this belongs to the process.
"""


@contextmanager
def attending(sequences: Sequences | None) -> Iterator[None]:
    """In this context attention is over these sequences; None: each row is one."""
    global _current
    before, _current = _current, sequences
    try:
        yield
    finally:
        _current = before


def register_attention(asked: str) -> str:
    """Make this attention known to transformers; the name under which a model gets what was `asked`
    for.
    """
    if asked != "auto":
        return asked
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)
    return NAME


def _attention(
    module: torch.nn.Module,
    query_BNSH: torch.Tensor,
    key_BGKH: torch.Tensor,
    value_BGKH: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Context `[B, S, N, H]`; see `AttentionInterface` of transformers."""
    unknown = [name for name, value in others.items() if value is not None]
    unknown = [name for name in unknown if name not in _WITHOUT_EFFECT.split()]
    if unknown or is_causal is False or attention_mask is None:
        what = ", ".join(unknown) or "attention that is not causal"
        raise ConfigError(
            f"{type(module).__name__} asks for {what}, which this package's attention does not "
            "have: set attn_implementation (policy.dtensor_cfg or fsdp_cfg) to 'sdpa' or 'eager'"
        )
    if (given := int(attention_mask)) == _NOTHING:
        raise ConfigError(f"{type(module).__name__} has a sliding window of 0 tokens: set one of 1")
    window = given or sliding_window
    query, key, value = (x.permute(2, 0, 1, 3) for x in (query_BNSH, key_BGKH, value_BGKH))
    scores = Scores(
        query_BNSH.size(-1) ** -0.5 if scaling is None else scaling,
        None if window is None else window - 1,
        softcap,
        s_aux,
        dropout,
    )
    context_SBD = attend(query, key, value, scores, _current)
    return context_SBD.unflatten(-1, (query_BNSH.size(1), -1)).transpose(0, 1), None


def _mask(
    *args: Any,
    mask_function: Callable[..., Any],
    local_size: int | None = None,
    **others: Any,
) -> torch.Tensor:
    """In place of a mask, the window of its layers `[1, 1, 1, 1]`, 0 without one, in host memory.
    One that sees nothing is `_NOTHING`: some models make it for layers that they do not have.

    ConfigError unless `mask_function` sees what a causal attention with that window sees.
    """
    window = local_size or 0
    last = 3 * window + 5
    keys = [0, last, last + 1, *((last - window, last - window + 1) if window else ())]
    zero, query, key_K = torch.tensor(0), torch.tensor(last), torch.tensor(keys)
    seen_K = torch.stack([torch.as_tensor(mask_function(zero, zero, query, k)) for k in key_K])
    if local_size == 0 and not seen_K.any():
        return torch.full((1, 1, 1, 1), _NOTHING)
    expected_K = (key_K <= query) & ((key_K > query - window) | (window == 0))
    if not torch.equal(seen_K.cpu().bool(), expected_K):
        raise ConfigError(
            "the model has an attention that is neither causal nor a sliding window: set "
            "attn_implementation (policy.dtensor_cfg or fsdp_cfg) to 'sdpa' or 'eager'"
        )
    return torch.full((1, 1, 1, 1), window)
