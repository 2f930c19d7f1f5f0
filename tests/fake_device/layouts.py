"""The layouts of the sweep: every kind of parallelism, alone and together, on 8 to 1,024 ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Layout:
    """Sizes of the axes, on `world` ranks; what is left is data parallel.

    `layers` is the number of layers of each chunk. `packed`: whether training's microbatches are.
    `score`: whether a rank that trains also scores, padded. `optimizer`: whether gradient buffers
    and optimizer are made.
    """

    name: str
    world: int
    tp: int = 1
    sp: bool = False
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    packed: bool = False
    score: bool = True
    layers: int = 2
    optimizer: bool = False

    def with_axes(self, **axes: int) -> Layout:
        """The same on as many ranks, with other sizes of axes."""
        return replace(self, **axes)  # type: ignore[arg-type]

    @property
    def all_layers(self) -> int:
        return self.layers * self.pp * self.vpp

    @property
    def ranks(self) -> tuple[int, ...]:
        """Those that are built: the last one, or two of the first, a middle and the last stage, on
        different places of the other axes.
        """
        stage, last = self.world // self.pp, self.world - 1
        middle = stage * (self.pp // 2) + stage // 2
        known = {"pp": (0, middle), "vpp": (0, last), "all": (middle, last)}
        return known.get(self.name, (last,))

    @property
    def microbatches(self) -> int:
        """As few as the schedule takes."""
        return self.pp if self.vpp > 1 else 1

    def section(self) -> dict[str, Any]:
        return {
            "enabled": True,
            "tensor_model_parallel_size": self.tp,
            "sequence_parallel": self.sp and self.tp > 1,
            "pipeline_model_parallel_size": self.pp,
            "virtual_pipeline_model_parallel_size": self.vpp,
            "context_parallel_size": self.cp,
            "expert_model_parallel_size": self.ep,
            "expert_tensor_parallel_size": self.etp,
        }


DENSE = (
    Layout("dp", 8, optimizer=True),
    Layout("tp", 8, tp=8, score=False),
    Layout("sp", 16, tp=8, sp=True, packed=True),
    Layout("pp", 64, tp=4, pp=8, layers=1),
    Layout("vpp", 32, tp=2, pp=2, vpp=2, packed=True, layers=1),
    Layout("cp", 64, cp=4, tp=2, packed=True),
    Layout("all", 1024, tp=8, sp=True, pp=8, cp=4, packed=True, layers=1),
)
EXPERTS = (
    Layout("dp", 8, ep=8, optimizer=True),
    Layout("tp", 16, tp=8, sp=True, ep=16, score=False),
    Layout("sp", 64, tp=8, sp=True, ep=64, packed=True),
    Layout("etp", 64, tp=4, sp=True, ep=16, etp=4, packed=True, score=False),
    Layout("pp", 512, tp=4, sp=True, pp=8, ep=64, layers=1),
    Layout("vpp", 256, tp=2, sp=True, pp=2, vpp=2, ep=64, packed=True, layers=1),
    Layout("cp", 64, cp=4, tp=2, sp=True, ep=64, packed=True),
    Layout("all", 1024, tp=8, sp=True, pp=8, cp=4, ep=64, packed=True, layers=1),
)
"""Tensor-parallel ranks of experts need sequence parallelism."""
