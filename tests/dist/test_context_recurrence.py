"""A recurrent layer whose tokens are spread over context-parallel ranks equals that on one rank:
its output, and gradients of its input and of what belongs to heads.

In fp64, where another order of sums leaves 1e-12 of the largest value.

Shapes: T positions of a rank, C ranks, R rows, S positions of all ranks, F columns of a projection.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_policy.device.process_groups import join_process_group
from megatron_policy.packing.tokens import TokenLayout, packed_layout, padded_layout
from megatron_policy.recurrence.chunks import Chunks, sequences_of
from megatron_policy.recurrence.context_parallel import HeadExchange, share_heads
from megatron_policy.recurrence.convolution import Windows, convolve
from megatron_policy.recurrence.delta_rule import delta_rule
from megatron_policy.recurrence.gates import log_decay, time_steps, write_strength
from megatron_policy.recurrence.state_space import state_space

LENGTHS = (1, 3, 40, 17, 0, 16)
KEYS, VALUES = 4, 6


@dataclass(frozen=True)
class Mixer:
    """A gated delta net or Mamba2 up to its gated norm; `groups` are key heads of the first."""

    delta: bool
    heads: int = 4
    groups: int = 4

    @property
    def sections(self) -> list[tuple[int, int]]:
        """Columns that are convolved come first."""
        keys, values = (self.groups, KEYS), (self.heads, VALUES)
        gates = [(self.heads, 1)] * (2 if self.delta else 1)
        return [keys, keys, values, *gates]

    def part(self, ranks: int) -> Mixer:
        return Mixer(self.delta, self.heads // ranks, max(1, self.groups // ranks))

    def parameters(self) -> dict[str, torch.Tensor]:
        random = torch.Generator().manual_seed(5)
        convolved = sum(heads * width for heads, width in self.sections[:3])
        names = {"taps": (convolved, 4), "A_log": (self.heads,), "dt_bias": (self.heads,)}
        names |= {} if self.delta else {"D": (self.heads,)}
        return {n: torch.randn(*s, generator=random).double() for n, s in names.items()}

    def cut(self, parameters: dict[str, torch.Tensor], rank: int, ranks: int) -> Any:
        by_channel = share_heads(self.sections[:3], ranks)[rank]
        by_head = share_heads([(self.heads, 1)], ranks)[rank]
        return {n: x[by_channel if n == "taps" else by_head] for n, x in parameters.items()}

    def run(self, x_NF: torch.Tensor, p: dict[str, torch.Tensor], sequences: Any) -> torch.Tensor:
        widths = [heads * width for heads, width in self.sections]
        seen, others = x_NF.split([sum(widths[:3]), sum(widths[3:])], -1)
        seen, _ = convolve(seen, p["taps"], None, Windows.of(sequences, 4))
        parts = (*seen.split(widths[:3], -1), *others.split(widths[3:], -1))
        heads = [y.unflatten(-1, s) for y, s in zip(parts, self.sections, strict=True)]
        chunks = Chunks.of(sequences, 16)
        if self.delta:
            q, k, v, b, a = heads
            g = log_decay(a.squeeze(-1), p["A_log"], p["dt_bias"])
            return delta_rule(q, k, v, g, write_strength(b.squeeze(-1)), chunks)[0].flatten(1)
        b, c, x, dt = heads
        dt = time_steps(dt.squeeze(-1), p["dt_bias"])
        return state_space(x, dt, p["A_log"], b, c, p["D"], chunks)[0].flatten(1)


MIXERS = {
    "delta net": Mixer(True),
    "delta net with fewer key heads": Mixer(True, heads=8, groups=2),
    "Mamba2": Mixer(False, heads=8),
    "Mamba2 with one group": Mixer(False, groups=1),
}


def layout_of(kind: str, ranks: int) -> TokenLayout:
    if kind == "padded":
        return padded_layout(len(LENGTHS), max(LENGTHS), 2 * ranks, ranks)
    return packed_layout(LENGTHS, max(LENGTHS), 2 * ranks, 6 * ranks, ranks)


def mix(kind: str) -> dict[str, float]:
    """The worst difference of each mixer on this rank, as shares of the largest value."""
    join_process_group(60.0)
    group = dist.group.WORLD
    layout = layout_of(kind, group.size())
    return {name: _worst(mixer, layout, group) for name, mixer in MIXERS.items()}


def _worst(mixer: Mixer, layout: TokenLayout, group: dist.ProcessGroup) -> float:
    rank, ranks, random = group.rank(), group.size(), torch.Generator().manual_seed(6)
    rows = layout.sources_CTR.size(2)
    sequences = sequences_of([s.length for s in layout.segments], rows)
    columns = sum(heads * width for heads, width in mixer.sections)
    x_SRF = torch.randn(layout.full_length, rows, columns, generator=random).double()
    push_SRV = torch.randn(layout.full_length, rows, mixer.heads * VALUES, generator=random)
    push_SRV = push_SRV.double()

    def whole(x: torch.Tensor, p: Any) -> torch.Tensor:
        return mixer.run(x.flatten(0, 1), p, sequences).unflatten(0, (-1, rows))

    def shared(x_TRF: torch.Tensor, p: Any) -> torch.Tensor:
        exchange = HeadExchange(layout.order_CT, group)
        mine = exchange.to_heads(x_TRF, share_heads(mixer.sections, ranks))
        own = mixer.cut(p, rank, ranks)
        y = mixer.part(ranks).run(mine.flatten(0, 1), own, sequences)
        return exchange.to_tokens(y.unflatten(0, (-1, rows)))

    here = layout.columns_CT[rank]
    true, true_x, *true_p = _differentiate(whole, x_SRF, mixer.parameters(), push_SRV)
    found = _differentiate(shared, x_SRF[here], mixer.parameters(), push_SRV[here])
    for grad in found[2:]:
        dist.all_reduce(grad, group=group)
    pairs = zip(found, (true[here], true_x[here], *true_p), strict=True)
    return max(float((one - other).abs().max() / other.abs().max()) for one, other in pairs)


def _differentiate(compute: Any, x: torch.Tensor, p: dict[str, torch.Tensor], push: Any) -> Any:
    x = x.clone().requires_grad_()
    p = {name: value.requires_grad_() for name, value in p.items()}
    out = compute(x, p)
    return [out.detach(), *torch.autograd.grad(out, [x, *p.values()], push)]


@pytest.mark.parametrize(("world", "kind"), list(product((4, 2), ("packed", "padded"))))
def test_ranks_that_exchange_heads_for_tokens_compute_what_one_rank_does(
    ranks, world: int, kind: str
) -> None:
    for worst in ranks.run(world, mix, kind):
        for name, difference in worst.items():
            assert difference < 1e-12, (name, difference)


def test_shares_have_all_heads_and_neighbours_the_same_where_there_are_fewer() -> None:
    found = share_heads([(4, 2), (2, 1), (1, 3)], 4)
    assert found.tolist() == [
        [0, 1, 8, 10, 11, 12],
        [2, 3, 8, 10, 11, 12],
        [4, 5, 9, 10, 11, 12],
        [6, 7, 9, 10, 11, 12],
    ]
