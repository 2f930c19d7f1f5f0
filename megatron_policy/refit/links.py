"""What a refit from shards to shards moves over each link of a machine, and how long that takes at
least. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

NVLINK, NETWORK = "NVLink", "network"
"""Between ranks of a node, and between those of different nodes."""


class Machine(NamedTuple):
    """Nodes of GPUs, each of which has one rank. Trainers fill nodes in the order of their ranks,
    and then the engine's ranks do, from a new node on unless the `shared` one has GPUs left.

    Each GPU sends, and at the same time receives, so many bytes per second over `nvlink` within its
    node, and over the `network` beyond.
    """

    gpus_per_node: int
    nvlink: float
    network: float
    shared: bool = False

    def node_of(self, rank: int) -> int:
        """The node of a trainer."""
        return rank // self.gpus_per_node

    def engine_node_of(self, rank: int, trainers: int) -> int:
        """The node of an engine rank."""
        full = -(-trainers // self.gpus_per_node) * self.gpus_per_node
        return self.node_of((trainers if self.shared else full) + rank)


class LinkLoad(NamedTuple):
    """What connects a rank or a node to others, in one direction, and what goes over it."""

    owner: str
    kind: str
    sends: bool
    nbytes: int


@dataclass(frozen=True)
class LinkTraffic:
    """A refit over a machine's links."""

    machine: Machine
    trainers: int
    engine_ranks: int
    pairs: Mapping[tuple[int, int], float]
    """Bytes from each trainer to each engine rank, of those that exchange any."""

    @property
    def rounds(self) -> int:
        """The rounds in which anything is sent, of as many as there are engine ranks: in round r
        trainer s sends to engine rank (s + r) % engine_ranks.
        """
        return len({(target - source) % self.engine_ranks for source, target in self.pairs})

    @cached_property
    def totals(self) -> Mapping[str, int]:
        """Bytes over all links of each kind."""
        return {
            kind: round(sum(n for pair, n in self.pairs.items() if self._kind(*pair) == kind))
            for kind in (NVLINK, NETWORK)
        }

    @cached_property
    def busiest(self) -> Mapping[str, tuple[LinkLoad, LinkLoad]]:
        """Of each kind that is used, the rank that sends most, and the one that receives most."""
        return {
            kind: (
                self._find_busiest("trainer rank", kind, True),
                self._find_busiest("engine rank", kind, False),
            )
            for kind, nbytes in self.totals.items()
            if nbytes
        }

    @cached_property
    def busiest_nodes(self) -> tuple[LinkLoad, LinkLoad] | None:
        """The node that sends most to others, and the one that receives most; None if none does."""
        if not self.totals[NETWORK]:
            return None
        return (
            self._find_busiest("node", NETWORK, True),
            self._find_busiest("node", NETWORK, False),
        )

    @property
    def bottleneck(self) -> LinkLoad:
        """The rank's link that needs the longest."""
        return max((link for both in self.busiest.values() for link in both), key=self.bound_time)

    def bound_time(self, link: LinkLoad) -> float:
        """The seconds that a rank's link needs at least."""
        return link.nbytes / self.rate(link.kind)

    def rate(self, kind: str) -> float:
        """Bytes per second of a rank's link of that kind."""
        return self.machine.nvlink if kind == NVLINK else self.machine.network

    def _kind(self, source: int, target: int) -> str:
        sender, receiver = self._nodes(source, target)
        return NVLINK if sender == receiver else NETWORK

    def _nodes(self, source: int, target: int) -> tuple[int, int]:
        machine = self.machine
        return machine.node_of(source), machine.engine_node_of(target, self.trainers)

    def _find_busiest(self, owners: str, kind: str, sends: bool) -> LinkLoad:
        """Of these owners, the one over whose link of that kind, and in that direction, most goes;
        of several the first.
        """
        sums: dict[int, float] = {}
        for number, nbytes in self._ends(owners == "node", kind, sends):
            sums[number] = sums.get(number, 0.0) + nbytes
        nbytes, first = max((round(nbytes), -number) for number, nbytes in sums.items())
        return LinkLoad(f"{owners} {-first}", kind, sends, nbytes)

    def _ends(self, of_nodes: bool, kind: str, sends: bool) -> Iterator[tuple[int, float]]:
        """One end of each pair that uses links of that kind, with its bytes."""
        for pair, nbytes in self.pairs.items():
            if self._kind(*pair) == kind:
                yield (self._nodes(*pair) if of_nodes else pair)[not sends], nbytes
