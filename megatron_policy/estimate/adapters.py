"""Low-rank adapters in numbers: which linear layers have one, and what they keep.

A frozen layer keeps no input, since its weights need no gradients; the adapter beside it does. What
nothing trainable precedes needs no gradients and keeps nothing.
Shapes as in `engines/megatron/adapters.py`: N parts of a fused layer, R rank, Q rows of B.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from megatron_policy.adapters.rows import Concatenated
from megatron_policy.adapters.targets import add_adapters
from megatron_policy.config import PolicyConfig
from megatron_policy.config.trained import PeftConfig
from megatron_policy.converters.architecture import Architecture
from megatron_policy.converters.architecture.part import Linears, Place, RankShare
from megatron_policy.converters.rows import Row
from megatron_policy.converters.table import Entry, Table
from megatron_policy.estimate.states import ModelRows
from megatron_policy.parallel.topology import Topology

_NAME = re.compile(r"decoder\.layers\.\d+\.(.+)\.weight")
_EXPERT = re.compile(r"local_experts\.\d+\.")


@dataclass(frozen=True)
class Adapter:
    """Beside one linear layer, whose weight is that of `base`."""

    a: Row
    b: Row
    base: Row

    def elements(self, arch: Architecture) -> tuple[int, int]:
        """Of A and of B. A part's rows of B are multiplied by that part's vectors alone."""
        a, b = (math.prod(row.local_shape(arch, 1)) for row in (self.a, self.b))
        return a, b

    def vector(self, arch: Architecture) -> int:
        """N times R: elements for each token of what B is applied to."""
        return self.a.local_shape(arch, 1)[0]

    def sizes(self, arch: Architecture, shards: int) -> tuple[int, int]:
        """Inputs and outputs of the linear layer on one of `shards` ranks."""
        outputs, inputs = self.base.local_shape(arch, shards)
        return inputs, outputs

    def spread(self, arch: Architecture, shards: int) -> int:
        """Elements of the matrix in which the rows of B are in the columns of their own parts, of
        the factors that put them there and, if some parts have none, of those rows by themselves,
        on one of `shards` ranks; 0 with one A for all parts.
        """
        if not isinstance(self.a, Concatenated):
            return 0
        (_, outputs), vector = self.sizes(arch, shards), self.vector(arch)
        rows, _ = self.b.local_shape(arch, shards)
        alone = rows * vector if rows < outputs else 0
        return outputs * vector + rows * len(self.a.hf) + alone


LinearAdapters = Mapping[str, Adapter]
"""The adapters of a decoder layer, by the linear layer."""


@dataclass(frozen=True)
class ModelAdapters:
    """The adapters of a model, for each decoder layer."""

    layers: tuple[LinearAdapters, ...]
    dropout: bool
    before: bool
    """Whether elements of an adapter's inputs are dropped, else of its outputs."""
    towers: bool = False
    """Whether towers have some too, so that all layers follow something trainable."""

    @classmethod
    def of(cls, rows: ModelRows, peft: PeftConfig) -> ModelAdapters | None:
        """Those among a model's rows; None without `peft`."""
        if not peft.enabled:
            return None
        layers = tuple(map(_of_layer, rows.layers))
        towers = any(entry.adapts for entry in rows.embedding)
        return cls(layers, peft.dropout > 0, peft.dropout_position == "pre", towers)

    @classmethod
    def of_model(cls, config: PolicyConfig, table: Table) -> ModelAdapters | None:
        """Those that a configuration asks for on the model of `table`; None without any."""
        peft = config.megatron_cfg.peft
        return cls.of(ModelRows.of(add_adapters(config, table)), peft) if peft.enabled else None


def _of_layer(entries: Iterable[Entry]) -> LinearAdapters:
    bases = {entry.megatron: entry.row for entry in entries}
    sides: dict[str, list[Row]] = {}
    for entry in entries:
        if entry.adapts:
            sides.setdefault(entry.adapts, []).append(entry.row)
    return {linear_of(name): Adapter(a, b, bases[name]) for name, (a, b) in sides.items()}


def linear_of(weight: str) -> str:
    """The linear layer, within its decoder layer, that has the weight of this name."""
    found = _NAME.fullmatch(weight)
    assert found is not None, weight
    return _EXPERT.sub("", found[1])


@dataclass(frozen=True)
class LayerTraining:
    """What of a decoder layer has gradients: all of it, or `adapters` beside frozen weights."""

    adapters: LinearAdapters | None
    drops: bool = False
    before: bool = False

    @classmethod
    def of(cls, adapters: ModelAdapters | None, layer: int) -> LayerTraining:
        """That of decoder layer number `layer`."""
        if adapters is None:
            return cls(None)
        return cls(adapters.layers[layer], adapters.dropout, adapters.before)

    @property
    def trained(self) -> bool:
        """Whether all weights are."""
        return self.adapters is None

    def keep(self, *names: str) -> bool:
        """Whether one of these keeps its input as it is, for gradients of its own weight or of its
        adapter's.
        """
        return self.trained or (self.adapted(*names) and not (self.drops and self.before))

    def adapted(self, *names: str) -> bool:
        """Whether one of these has an adapter."""
        return self.adapters is not None and any(name in self.adapters for name in names)

    def count_adapters(
        self, linears: Linears, arch: Architecture, topology: Topology, share: RankShare
    ) -> int:
        """Bytes of the adapters beside these linear layers, without the inputs that they keep."""
        total, own, width = 0, self.adapters or {}, share.width
        mask = 1 if share.kernels.fused_dropout else width
        for linear in (each for group in linears for each in group if each.name in own):
            shards, copies = topology.tp, 1
            if linear.into is Place.ROUTED:
                shards, copies = topology.expert_tp, linear.experts // topology.ep
            into, out = (share.tokens(at, linear.chosen) for at in (linear.into, linear.out))
            adapter = own[linear.name]
            spread = copies * adapter.spread(arch, shards)
            total += width * (out * adapter.vector(arch) + spread)
            inputs, outputs = adapter.sizes(arch, shards)
            if self.drops and self.before:  # what is left is a copy
                total += into * inputs * (width + mask)
            elif self.drops:
                total += out * outputs * mask
        return total
