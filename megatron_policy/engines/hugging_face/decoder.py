"""The root module that FSDP shards: a transformers model whose forward pass ends in what is made of
its hidden states, while the weights of its head are there.

Shapes: T positions that this context-parallel rank computes, R rows of them, D model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megatron_policy.engines.composite import DEEP, DEEP_AT
from megatron_policy.errors import ConfigError
from megatron_policy.interfaces.embedder import Entering

Embed = Callable[[torch.Tensor], Entering]
"""From tokens `[R, T]` to what the model's code is to take for their embedding, and what it is to
add to the outputs of its first layers.
"""
Finish = Callable[[torch.Tensor], torch.Tensor]
"""From hidden states `[T, R, D]` to what a forward pass returns."""


class Decoder(torch.nn.Module):
    """A causal language model of transformers without its logits."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    @property
    def base(self) -> Any:
        """The module that makes hidden states: what the model makes logits of. ConfigError if the
        model's class has none apart from its head.
        """
        base = self.model.get_decoder()
        if base is None or base is self.model:
            raise ConfigError(
                f"{type(self.model).__name__} has no decoder apart from its head, so its hidden "
                "states cannot be read: this model cannot be trained here"
            )
        return base

    def forward(
        self,
        tokens_RT: torch.Tensor,
        positions: torch.Tensor,
        embed: Embed,
        finish: Finish,
        cache: Any = None,
    ) -> torch.Tensor:
        """What `finish` makes of the hidden states. Tokens have one position each, `[R, T]`, or
        three, `[3, R, T]`. `cache` is one of transformers, or None.

        The model is given the tokens, not their embedding: some read them in other places too.
        """
        entering = embed(tokens_RT)
        deep = {}
        if entering.deep:
            # The features at all tokens that the mask names, one after another.
            features = [each_RTD.flatten(0, 1) for each_RTD in entering.deep]
            everywhere_RT = torch.ones_like(entering.hidden[..., 0], dtype=torch.bool)
            deep = {DEEP: features, DEEP_AT: everywhere_RT}
        with _computing(self.model.get_input_embeddings(), lambda _: entering.hidden):
            output = self.base(
                input_ids=tokens_RT,
                position_ids=positions,
                # Without one, transformers looks for packed sequences, and waits for the device.
                attention_mask=None if cache is not None else torch.ones_like(tokens_RT),
                past_key_values=cache,
                use_cache=cache is not None,
                **deep,
            )
        return finish(output.last_hidden_state.transpose(0, 1))

    @property
    def layers(self) -> list[torch.nn.Module]:
        """The layers of the decoder, in order: of the lists of modules, the one with most."""
        lists = [m for m in self.base.modules() if isinstance(m, torch.nn.ModuleList)]
        inner = {id(m) for each in lists for m in each.modules() if m is not each}
        outer = [list(each) for each in lists if id(each) not in inner]
        return max(outer, key=len)


@contextmanager
def _computing(
    module: torch.nn.Module, forward: Callable[[torch.Tensor], torch.Tensor]
) -> Iterator[None]:
    """In this context `module` computes `forward` in place of what it computes itself."""
    own = vars(module).pop("forward", None)
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if own is not None:
            module.forward = own
