"""The experts that tokens took before, as data carry them: checked, and as routers take them again.

Shapes: B rows, S positions, L layers with experts, K experts that a token takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch

from megatron_policy.batch import BatchedDataDict
from megatron_policy.config import PolicyConfig
from megatron_policy.converters.architecture import Architecture
from megatron_policy.dtypes import holds_integers
from megatron_policy.errors import BatchError
from megatron_policy.packing.microbatch import ROUTED_EXPERTS, inside

NOT_RECORDED = -1
"""In all K places of a token: its router chooses."""


class Replay(Enum):
    """What a computation does with `routed_experts` of its data, if the policy replays experts."""

    REQUIRED = "it replays them, and data without them are refused"
    IF_GIVEN = "it replays them if there are any"
    NEVER = "every router chooses"


@dataclass(frozen=True)
class RouterReplay:
    """Whether a policy replays chosen experts, and what its model can choose: `top_k` of `experts`
    in each of `layers`, the numbers of those with experts of `num_layers`.
    """

    enabled: bool
    experts: int
    top_k: int
    layers: tuple[int, ...]
    num_layers: int

    @classmethod
    def of(cls, config: PolicyConfig, architecture: Architecture) -> RouterReplay:
        """What `config` requests for this model."""
        moe = architecture.moe
        return cls(
            config.router_replay.enabled,
            0 if moe is None else moe.experts,
            0 if moe is None else moe.chosen,
            architecture.expert_layers,
            architecture.num_layers,
        )

    def prepare(self, data: BatchedDataDict, replay: Replay = Replay.REQUIRED) -> BatchedDataDict:
        """`data`, which have passed `check_batch`, with `routed_experts` `[B, S, L, K]` in the
        smallest dtype, NOT_RECORDED beyond `input_lengths`; without them for Replay.NEVER.

        L can be all layers of the model before. BatchError naming row and layer unless every token
        has K different experts of the model in each layer or none in it; also for data without them
        if they are required, and for data with them if the policy replays nothing.
        """
        given = data.get(ROUTED_EXPERTS)
        if given is None:
            if self.enabled and replay is Replay.REQUIRED:
                raise BatchError(
                    f"policy.router_replay.enabled is true, but the data lack {ROUTED_EXPERTS!r}, "
                    f"from row 0, layer {self.layers[0]} on; they have {sorted(data)}. Pass what "
                    "the inference engine or logprobs(return_routed_experts=True) has returned, "
                    "or set it to false"
                )
            return data
        prepared = BatchedDataDict(data)
        if replay is Replay.NEVER:
            del prepared[ROUTED_EXPERTS]
            return prepared
        if not self.enabled:
            raise BatchError(
                f"the data have {ROUTED_EXPERTS!r}, but policy.router_replay.enabled is false: "
                "set it to true to replay these experts, or leave the key out"
            )
        rows, width = data["input_ids"].shape
        columns = self._columns(given, rows, width)
        checked = self.empty(rows, width).to(given.device)
        inside_BS = inside(data).to(given.device)
        # Row by row: comparing needs a wider dtype.
        for row in range(rows):
            own_SLK = given[row][:, columns].long()
            own_SLK[~inside_BS[row]] = NOT_RECORDED
            self._check_row(row, own_SLK)
            checked[row] = own_SLK.to(self.dtype)
        prepared[ROUTED_EXPERTS] = checked
        return prepared

    def check_has_experts(self) -> None:
        """BatchError for a model whose tokens choose nothing."""
        if not self.layers:
            raise BatchError(
                "return_routed_experts asks for the experts of each token, but the model has "
                "none: leave it out"
            )

    def empty(self, rows: int, width: int) -> torch.Tensor:
        """NOT_RECORDED `[B, S, L, K]` in the dtype in which choices are returned."""
        shape = (rows, width, len(self.layers), self.top_k)
        return torch.full(shape, NOT_RECORDED, dtype=self.dtype)

    @property
    def dtype(self) -> torch.dtype:
        """The smallest of int8, int16 and int32 that holds every expert and NOT_RECORDED."""
        dtypes = (torch.int8, torch.int16, torch.int32)
        return next(each for each in dtypes if self.experts - 1 <= torch.iinfo(each).max)

    def _columns(self, given: object, rows: int, width: int) -> Sequence[int]:
        """Where in dimension 2 the layers with experts are; BatchError for a wrong shape."""
        wanted = f"[{rows}, {width}, {len(self.layers)}, {self.top_k}]"
        if not isinstance(given, torch.Tensor):
            raise BatchError(
                f"{ROUTED_EXPERTS!r} is a {type(given).__name__}, wrong from row 0 on: it must be "
                f"a tensor of integers {wanted}"
            )
        shape = tuple(given.shape)
        counts = (len(self.layers), self.num_layers)
        fits = len(shape) == 4 and shape[:2] == (rows, width) and shape[3] == self.top_k
        if not fits or shape[2] not in counts or not holds_integers(given.dtype):
            first = min([*shape[2:3], *counts])
            raise BatchError(
                f"{ROUTED_EXPERTS!r} is {given.dtype} of shape {shape}, wrong in row 0 from layer "
                f"{first if len(shape) == 4 and shape[2] not in counts else 0} on: it must be "
                f"integers {wanted}, {self.top_k} experts for each token in "
                f"each of the {len(self.layers)} layers with experts, or of all {self.num_layers} "
                "layers"
            )
        return range(len(self.layers)) if shape[2] == len(self.layers) else self.layers

    def _check_row(self, row: int, own_SLK: torch.Tensor) -> None:
        recorded_SL1 = (own_SLK != NOT_RECORDED).any(-1, keepdim=True)
        outside_SLK = recorded_SL1 & ((own_SLK < 0) | (own_SLK >= self.experts))
        if outside_SLK.any():
            position, place, slot = outside_SLK.nonzero()[0].tolist()
            raise BatchError(
                f"{ROUTED_EXPERTS!r} has expert {own_SLK[position, place, slot]} in row {row}, "
                f"layer {self.layers[place]}, at position {position}, but the model has "
                f"{self.experts} experts, 0 to {self.experts - 1}. A token without a recorded "
                f"choice has {NOT_RECORDED} in all {self.top_k} places of the layer"
            )
        sorted_SLK = own_SLK.sort(-1).values
        twice_SL = (sorted_SLK[..., 1:] == sorted_SLK[..., :-1]).any(-1) & recorded_SL1.squeeze(-1)
        if twice_SL.any():
            position, place = twice_SL.nonzero()[0].tolist()
            raise BatchError(
                f"{ROUTED_EXPERTS!r} has {own_SLK[position, place].tolist()} in row {row}, layer "
                f"{self.layers[place]}, at position {position}: a token takes {self.top_k} "
                "different experts"
            )
