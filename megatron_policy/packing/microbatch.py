"""Cuts a batch into microbatches: rows as the loss sees them, and the layout of their tokens in
what a rank computes.

Shapes: B rows of a microbatch, S positions of its widest, L layers with experts, K experts that a
token takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from megatron_policy.batch import BatchedDataDict
from megatron_policy.converters.architecture import Shell
from megatron_policy.device import to_device
from megatron_policy.packing.multiples import NARROWEST, Multiples
from megatron_policy.packing.tokens import Blocks, TokenLayout, packed_layout, padded_layout

ROUTED_EXPERTS = "routed_experts"
"""The key of the experts that each token takes, in data whose routers are to take them again."""
TEMPERATURE = "temperature"
"""The key of each row's temperature `[B]`, in data that do not take the policy's."""
PATCHES = "picture_patches"
"""The key of the patches of each row's pictures `[B]`, in data that were checked for a model that
sees them.
"""


@dataclass(frozen=True)
class HostRows:
    """Rows and the layout of their tokens in host memory: what indices and sizes are made from, so
    that the host does not wait for the device.
    """

    data: BatchedDataDict
    layout: TokenLayout


@dataclass(frozen=True)
class Microbatch:
    """Rows and the layout of their tokens, on the device, and the same on the host. `text_length`
    is the width of the caller's batch, which some rotary embeddings depend on. A dummy only keeps
    ranks synchronised: its results are dropped. `rows` are the numbers of its rows in the data they
    were cut from. `shares`, fp32 `[B]`, are what its rows weigh in a mean over the global batch;
    None if nothing is averaged.
    """

    data: BatchedDataDict
    layout: TokenLayout
    host: HostRows
    text_length: int
    dummy: bool = False
    rows: tuple[int, ...] = ()
    shares: torch.Tensor | None = None

    @property
    def tokens_BS(self) -> torch.Tensor:
        tokens: torch.Tensor = self.data["input_ids"]
        return tokens

    @property
    def routed_experts_BSLK(self) -> torch.Tensor | None:
        """The experts that each token takes in each layer with experts (L), or -1 in all K places
        where the router chooses; None if it always does.
        """
        experts: torch.Tensor | None = self.data.get(ROUTED_EXPERTS)
        return experts

    def attached(self, key: str, rows: Iterable[int] | None = None) -> list[torch.Tensor | None]:
        """What its rows, or those with the numbers `rows`, carry under `key`, one of the
        architecture's `attachments`, on the device; None for each row that has nothing there. It
        is copied to the device at every call: only the stage that reads it has it there.
        """
        given = self.host.data.get(key, [None] * self.layout.rows)
        wanted = given if rows is None else [given[row] for row in rows]
        return [None if each is None else to_device(each) for each in wanted]

    @property
    def temperatures(self) -> list[tuple[float, torch.Tensor]]:
        """The temperatures that rows have, each with those rows, bool `[B]` on the host; empty if
        all have the policy's.
        """
        given_B = self.host.data.get(TEMPERATURE)
        if given_B is None:
            return []
        return [(value, given_B == value) for value in given_B.unique().tolist()]

    @property
    def at_policy_temperature(self) -> Microbatch:
        """The same, whose rows have the policy's temperature."""
        kept = {key: value for key, value in self.host.data.items() if key != TEMPERATURE}
        return replace(self, host=replace(self.host, data=BatchedDataDict(kept)))

    @property
    def packed(self) -> bool:
        """Whether several rows are concatenated into one."""
        return self.layout.sources_CTR.size(2) != self.layout.rows


def padded_microbatch(
    data: BatchedDataDict, text_length: int, width: int, multiples: Multiples
) -> Microbatch:
    """All rows of `data` in parallel, cut to `width` positions."""
    data = cut(data, max(width, NARROWEST))
    rows, width = data["input_ids"].shape
    layout = padded_layout(rows, width, multiples.row, multiples.context_ranks)
    return _microbatch(data, layout, text_length)


def packed_microbatch(
    data: BatchedDataDict, text_length: int, lengths: Sequence[int], multiples: Multiples
) -> Microbatch:
    """All rows of `data` concatenated; the first `lengths[i]` positions of each count."""
    data = cut(data, max(*lengths, NARROWEST))
    width = data["input_ids"].size(1)
    layout = packed_layout(
        lengths, width, multiples.sequence, multiples.row, multiples.context_ranks
    )
    return _microbatch(data, layout, text_length)


def empty_microbatch(text_length: int, multiples: Multiples) -> Microbatch:
    """A dummy without rows: the fewest positions that the layout can split."""
    data = BatchedDataDict({"input_ids": torch.zeros(0, 1, dtype=torch.long)})
    layout = packed_layout([], 1, multiples.sequence, multiples.row, multiples.context_ranks)
    return replace(_microbatch(data, layout, text_length), dummy=True)


def numbered(microbatches: Sequence[Microbatch], rows: Sequence[int]) -> list[Microbatch]:
    """The microbatches with each row number i replaced by `rows[i]`."""
    return [replace(each, rows=tuple(rows[row] for row in each.rows)) for each in microbatches]


def cut(data: BatchedDataDict, width: int) -> BatchedDataDict:
    """Cut values whose dimension 1 is the sequence to the first `width` positions."""
    full = data["input_ids"].size(1)
    return BatchedDataDict(
        {
            key: value[:, :width]
            if isinstance(value, torch.Tensor) and value.ndim > 1 and value.size(1) == full
            else value
            for key, value in data.items()
        }
    )


def _microbatch(data: BatchedDataDict, layout: TokenLayout, text_length: int) -> Microbatch:
    """On the device, by copies that nobody waits for if the caller's data are in host memory."""
    host = HostRows(BatchedDataDict(data).to("cpu"), layout)
    moved = {k: to_device(v) if isinstance(v, torch.Tensor) else v for k, v in data.items()}
    return Microbatch(BatchedDataDict(moved), layout.moved(to_device), host, text_length)


def count_patches(data: BatchedDataDict) -> list[int]:
    """The patches of each row's pictures, in data that were checked."""
    counts: list[int] = data[PATCHES].tolist() if PATCHES in data else [0] * data.size
    return counts


def inside(data: BatchedDataDict) -> torch.Tensor:
    """Bool `[B, S]`: where there is text; everywhere without `input_lengths`."""
    tokens_BS = data["input_ids"]
    lengths_B: torch.Tensor | None = data.get("input_lengths")
    if lengths_B is None:
        return torch.ones_like(tokens_BS, dtype=torch.bool)
    positions_S = torch.arange(tokens_BS.size(1), device=tokens_BS.device)
    return positions_S < lengths_B.to(tokens_BS.device).unsqueeze(1)


def routed(data: BatchedDataDict) -> torch.Tensor:
    """Bool `[B, S]`: the tokens that count where experts are balanced: all text, prompts included,
    of rows whose `sample_mask` is not 0.
    """
    rows_B1: torch.Tensor = (data["sample_mask"] != 0).unsqueeze(-1)
    return inside(data) & rows_B1


def counted(data: BatchedDataDict) -> torch.Tensor:
    """Bool `[B, S]`: the tokens that count, by `sample_mask` and `token_mask`, if there is one."""
    rows_B1: torch.Tensor = (data["sample_mask"] != 0).unsqueeze(-1)
    tokens_BS = data["token_mask"] != 0 if "token_mask" in data else inside(data)
    return tokens_BS & rows_B1


def find_blocks(shell: Shell | None, data: BatchedDataDict) -> Blocks:
    """The runs of tokens of each row, in host memory, that see each other in both directions: those
    of a picture, where the model's do; none at all if no row has one.
    """
    if shell is None or not shell.both_ways:
        return ()
    found = []
    for types_S in shell.find_types(data, inside(data)):
        types, counts = torch.unique_consecutive(types_S, return_counts=True)
        stops = counts.cumsum(0).tolist()
        runs = zip(types.tolist(), counts.tolist(), stops, strict=True)
        found.append([range(stop - count, stop) for kind, count, stop in runs if kind])
    return found if any(found) else ()
