"""A sharded transformers model with its own cache of keys and values.

Shapes: B rows, T positions of prompt and continuation, S positions of one forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from megatron_policy.engines.hugging_face.decoder import Decoder
from megatron_policy.engines.hugging_face.head import FusedHead, OwnHead


@dataclass
class CachedDecoder:
    """See `CachedModel`."""

    decoder: Decoder
    head: FusedHead | OwnHead
    cache: Any
    read: int = 0

    @classmethod
    def new(cls, decoder: Decoder, head: FusedHead | OwnHead) -> CachedDecoder:
        """With an empty cache, which grows."""
        from transformers import DynamicCache

        return cls(decoder, head, DynamicCache(config=decoder.model.config))

    def logits_after(self, tokens_BT: torch.Tensor, position: int) -> torch.Tensor:
        """See `CachedModel`; all ranks that share weights call it together."""
        unread_BS = tokens_BT[:, self.read : position]
        positions_S = torch.arange(self.read, position, device=tokens_BT.device)
        self.read = position
        logits_BV: torch.Tensor = self.decoder(
            unread_BS, positions_S.expand_as(unread_BS), self.head.next_logits, self.cache
        )
        return logits_BV
