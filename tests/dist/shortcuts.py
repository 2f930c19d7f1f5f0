"""What tests of ranks do again and again, in few words: ask a policy, hear it refuse, and cut its
batches by tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from megatron_policy.policy import MegatronPolicy
from tests.dist.cases import UNUSED, open_policy


def packed(tokens: int = 40, **more: Any) -> dict[str, Any]:
    """The section of a policy whose rows are packed, so many tokens at a time."""
    return {"sequence_packing": _budget(tokens) | more}


def dynamic(tokens: int = 40, **more: Any) -> dict[str, Any]:
    """The same for dynamic batches."""
    return {"dynamic_batching": _budget(tokens) | more}


def _budget(tokens: int) -> dict[str, Any]:
    return {"enabled": True, "train_mb_tokens": tokens, "logprob_mb_tokens": tokens}


def answer(config: dict[str, Any], call: Callable[[MegatronPolicy], Any], **parts: Any) -> Any:
    """What a call of a policy returns on this rank; `parts` are those that it has beside none."""
    with open_policy(config, **UNUSED | parts) as policy:
        return call(policy)


def refusal(
    config: dict[str, Any],
    kind: type[Exception],
    call: Callable[[MegatronPolicy], Any] = lambda policy: None,
    **parts: Any,
) -> str:
    """What opening a policy, or a call of it, says on this rank, which has to raise `kind`."""
    with pytest.raises(kind) as error, open_policy(config, **parts) as policy:
        call(policy)
    return str(error.value)


answer_trainable = partial(answer, init_optimizer=True)
"""As `answer`, of a policy with its optimizer."""
