"""Measures, in the pass of a step, how far its log-probabilities are from those of the engine that
sampled the rows, where these are in the data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_policy.config.sections import RolloutMismatchConfig
from megatron_policy.converters.architecture import ScalarHead
from megatron_policy.coordination.agreement import gather_numbers
from megatron_policy.errors import BatchError
from megatron_policy.lm_head.output import Output
from megatron_policy.lm_head.rollout_mismatch import (
    ROLLOUT_KEYS,
    RolloutMismatch,
    join_parts,
    make_empty_part,
    measure_part,
)
from megatron_policy.packing.microbatch import counted


@dataclass(frozen=True)
class MicrobatchMismatch:
    """What is measured of one microbatch, whose rows have the engine's log-probabilities under
    `key`, as soon as training's are known: a loss can change them afterwards.
    """

    config: RolloutMismatchConfig
    output: Output
    key: str
    parts: list[torch.Tensor] = field(default_factory=list)

    def watch(self, logprobs_BS: torch.Tensor) -> None:
        """Compare training's log-probabilities `[B, S - 1]`."""
        data = self.output.microbatch.data
        # Token 0 is sampled after nothing that the model has read.
        train_BS, counted_BS = (F.pad(each, (1, 0)) for each in (logprobs_BS, counted(data)[:, 1:]))
        bound, by_position = self.config.bound, self.config.by_position
        self.parts.append(
            measure_part(train_BS, data[self.key], counted_BS, bound, by_position=by_position)
        )

    def read(self) -> torch.Tensor:
        """The microbatch's part, on its device. Of a loss that was given no log-probabilities they
        are computed now, by one more pass over the head.
        """
        if not self.parts:
            wanted_BS = counted(self.output.microbatch.host.data)
            with torch.no_grad():
                self.output.next_token_scores(wanted_BS, watch=self.watch)
        return self.parts[0]


@dataclass(frozen=True)
class MismatchMeter:
    """What one call of training finds, of as many microbatches as are added."""

    config: RolloutMismatchConfig
    parts: list[Sequence[float]] = field(default_factory=list)

    def of_microbatch(self, output: Output) -> MicrobatchMismatch | None:
        """What measures a microbatch; None without the engine's log-probabilities, or if the
        configuration compares nothing.
        """
        key = find_rollout_key(output.microbatch.data)
        if key is None or not self.config.enabled or output.head.scalar is not None:
            return None
        return MicrobatchMismatch(self.config, output, key)

    def add(self, part: Sequence[float] | None) -> None:
        """Add a joined part, if there is one."""
        if part is not None:
            self.parts.append(part)

    def over_ranks(self, group: dist.ProcessGroup) -> RolloutMismatch:
        """That of all ranks of the data-parallel `group`; one of them has a part."""
        own = join_parts([make_empty_part(by_position=self.config.by_position), *self.parts])
        parts = [part for (part,) in gather_numbers([own], group)]
        return RolloutMismatch.joined(parts, self.config.bound)


def join_on_host(parts: Sequence[torch.Tensor | None]) -> list[float] | None:
    """The parts of a rank's microbatches as one, read from the device at once."""
    made = [part for part in parts if part is not None]
    return join_parts(torch.stack(made).tolist()) if made else None


def find_rollout_key(data: Mapping[str, Any]) -> str | None:
    """The key under which these data have the engine's log-probabilities, if they have any."""
    return next((key for key in ROLLOUT_KEYS if key in data), None)


def check_rollouts(
    data: Mapping[str, Any], config: RolloutMismatchConfig, head: ScalarHead | None
) -> None:
    """BatchError unless the engine's log-probabilities, where there are any and training compares
    with them, are one for each token. A scalar head has none to compare.
    """
    key = find_rollout_key(data)
    if key is None or not config.enabled or head is not None:
        return
    given, wanted = data[key], tuple(data["input_ids"].shape)
    plain = isinstance(given, torch.Tensor)
    if not plain or tuple(given.shape) != wanted or not given.is_floating_point():
        has = f"{given.dtype} {tuple(given.shape)}" if plain else f"a {type(given).__name__}"
        raise BatchError(
            f"{key!r} is {has}: training compares it with its own log-probabilities, so it must be "
            f"floating point {list(wanted)}, that of token t at position t and anything where "
            "token_mask is 0; pass it under another name if it is something else"
        )
