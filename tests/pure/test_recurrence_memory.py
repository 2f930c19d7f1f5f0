"""What recurrences keep for the backward pass, and hold at once, is what they say.

Shapes: N tokens, H heads, G key heads or groups, K key and V value channels, L places of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_policy.recurrence.chunks import Chunks, sequences_of
from megatron_policy.recurrence.convolution import Windows, convolve, gated_convolve
from megatron_policy.recurrence.delta_rule import delta_rule
from megatron_policy.recurrence.gates import (
    gate_then_normalise,
    normalise_then_gate,
)
from megatron_policy.recurrence.state_space import state_space

H, G, K, V, L, TOGETHER = 4, 2, 16, 8, 32, 8
STATE = 4 * H * K * V


def kept_bytes(run: Callable[[], Any]) -> int:
    """Of the storages of all tensors that are saved for the backward pass, each counted once."""
    storages: dict[int, tuple[int, torch.Tensor]] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes(), x
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        run()
    return sum(size for size, _ in storages.values())


def bf16(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16).requires_grad_()


def delta_inputs(tokens: int, *channels: int) -> list[torch.Tensor]:
    g = -torch.rand(tokens, H, *channels)
    beta = torch.rand(tokens, H)
    others = [g.requires_grad_(), beta.requires_grad_()]
    return [bf16(tokens, G, K), bf16(tokens, G, K), bf16(tokens, H, V), *others]


def space_inputs(tokens: int) -> list[torch.Tensor]:
    dt, head = torch.rand(tokens, H).requires_grad_(), torch.rand(H).requires_grad_()
    return [bf16(tokens, H, V), dt, head, bf16(tokens, G, K), bf16(tokens, G, K), head]


DELTA = 2 * (2 * G * K + H * V) + 4 * H
KEPT: dict[str, tuple[Any, Callable[[int], list[torch.Tensor]], int]] = {
    "delta rule": (delta_rule, delta_inputs, DELTA + 4 * H),
    "by channel": (delta_rule, lambda tokens: delta_inputs(tokens, K), DELTA + 4 * H * K),
    "state space": (state_space, space_inputs, 2 * (2 * G * K + H * V) + 4 * H),
}


@pytest.mark.parametrize("name", KEPT)
def test_a_scan_keeps_its_inputs_and_a_state_for_each_slab(name: str) -> None:
    """Of every token what it came with, in the dtype it came in: nothing is kept in fp32 beside
    what came in fp32. Of every eighth chunk of a sequence a state, since eight are computed
    together; not of the first one, which begins with zeros.
    """
    compute, make, per_token = KEPT[name]
    tokens = 40 * L
    inputs, chunks = make(tokens), Chunks.of(sequences_of((tokens,)), L, TOGETHER)
    found = kept_bytes(lambda: compute(*inputs, chunks))
    of_heads = 0 if name != "state space" else 4 * H
    assert found == tokens * per_token + (40 // TOGETHER - 1) * STATE + of_heads


@pytest.mark.parametrize("name", KEPT)
def test_a_chunk_never_costs_more_than_one_state(name: str) -> None:
    """However many sequences there are beside each other."""
    compute, make, per_token = KEPT[name]
    lengths = (4 * L,) * 20
    tokens = sum(lengths)
    inputs, chunks = make(tokens), Chunks.of(sequences_of(lengths), L, TOGETHER)
    found = kept_bytes(lambda: compute(*inputs, chunks))
    assert found - tokens * per_token - 4 * H <= 3 * len(lengths) * STATE


@pytest.mark.parametrize("name", KEPT)
def test_nothing_is_kept_where_nothing_is_differentiated(name: str) -> None:
    compute, make, _ = KEPT[name]
    inputs, chunks = make(5 * L), Chunks.of(sequences_of((5 * L,)), L, 1)
    with torch.no_grad():
        assert kept_bytes(lambda: compute(*inputs, chunks)) == 0


class Largest(TorchDispatchMode):
    """The most elements of any tensor that is computed in the context."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.untyped_storage().nbytes() // x.itemsize)
        return out


@pytest.mark.parametrize("name", KEPT)
@pytest.mark.parametrize("sequences", [1, 20])
def test_what_is_held_at_once_is_bounded_by_a_slab(name: str, sequences: int) -> None:
    """A tensor is at most as large as an input, or what one slab's chunks make: decays between all
    pairs of their places, of a part of the places where channels have their own.
    """
    compute, make, _ = KEPT[name]
    lengths = (5 * TOGETHER * L // sequences,) * sequences
    inputs, chunks = make(sum(lengths)), Chunks.of(sequences_of(lengths), L, TOGETHER)
    places = TOGETHER * H * L
    bound = max(places * L, places * 16 * K if name == "by channel" else 0)
    inputs_at_most = max(x.numel() for x in inputs) + H * K
    with Largest() as largest:
        out, last = compute(*inputs, chunks)
        (out.float().sum() + last.sum()).backward()
    assert largest.elements <= max(bound, inputs_at_most, sequences * H * K * V)


def test_a_convolution_keeps_its_input() -> None:
    x, weight, windows = bf16(100, 24), bf16(24, 4), Windows.of(sequences_of((60, 40)), 4)
    past = 2 * 3 * 24 * 2
    assert kept_bytes(lambda: convolve(x, weight, None, windows)) == 2 * 24 * (100 + 4) + past
    before, after = bf16(100, 24), bf16(100, 24)
    found = kept_bytes(lambda: gated_convolve(before, after, x, weight, None, windows))
    assert found == 2 * 24 * (3 * 100 + 4)


def test_a_gated_norm_keeps_what_is_normalised_and_the_gate() -> None:
    y, gate, weight = bf16(100, H, V), bf16(100, H, V), bf16(V)
    for compute in (normalise_then_gate, gate_then_normalise):
        assert kept_bytes(lambda c=compute: c(y, gate, weight, 1e-6)) == 2 * (200 * H * V + V)
