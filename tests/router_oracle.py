"""transformers' Qwen3 MoE with routers that are recorded, or made to take given experts.

Shapes: B rows, S positions, T tokens, L layers with experts, E experts, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from transformers import PreTrainedModel


def routers(model: PreTrainedModel) -> list[torch.nn.Module]:
    """The modules that choose experts, layer by layer."""
    return [m for m in model.modules() if type(m).__name__ == "Qwen3MoeTopKRouter"]


@contextmanager
def recording(model: PreTrainedModel, into: list[torch.Tensor]) -> Iterator[None]:
    """Append what each router chooses, `[T, K]`."""
    with ExitStack() as stack:
        for router in routers(model):
            handle = router.register_forward_hook(lambda _, __, out: into.append(out[2]))
            stack.callback(handle.remove)
        yield


@contextmanager
def forced(model: PreTrainedModel, chosen_BSLK: torch.Tensor) -> Iterator[None]:
    """Have routers take these experts; their own where these are negative."""

    def forward_of(router: Any, taken_TK: torch.Tensor) -> Any:
        own = router.forward

        def forward(hidden: torch.Tensor) -> Any:
            logits_TE = hidden.reshape(-1, hidden.size(-1)) @ router.weight.T
            own_TK = own(hidden)[2]
            chosen_TK = own_TK.where(taken_TK < 0, taken_TK)
            exp_TE = (logits_TE - logits_TE.amax(-1, keepdim=True).detach()).exp()
            exp_TK = exp_TE.gather(-1, chosen_TK)
            return logits_TE, exp_TK / exp_TK.sum(-1, keepdim=True), chosen_TK

        return forward

    with ExitStack() as stack:
        for layer, router in enumerate(routers(model)):
            taken_TK = chosen_BSLK[:, :, layer].flatten(0, 1).long()
            stack.enter_context(patch.object(router, "forward", forward_of(router, taken_TK)))
        yield
