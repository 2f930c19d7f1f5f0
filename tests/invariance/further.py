"""Further tables of the invariance page, each measured by tests of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

PADDED, PACKED, DYNAMIC = "padded", "packed", "dynamic"
OF_MODULES, FUSED = "of each module", "of fused layers"
OF_EXPERTS, OF_STACKS, LATENT = "of experts", "of stacked experts", "of latent attention"


@dataclass(frozen=True)
class FurtherCell:
    """Where something of some kind is trained."""

    layout: str
    batching: str
    kind: str
    family: str


@dataclass(frozen=True)
class Table:
    """One table: what its cells are of, and what the page calls the quantities."""

    name: str
    title: str
    cells: tuple[FurtherCell, ...]
    quantities: Mapping[str, str]

    @property
    def columns(self) -> tuple[str, ...]:
        """The first ones, which name a cell."""
        return ("layout", "batching", self.title, "family")


@dataclass
class Collected:
    """The largest difference of each quantity with its tolerance, by cell of a table."""

    table: Table
    found: dict[FurtherCell, Mapping[str, tuple[float, float]]] = field(default_factory=dict)

    def add(self, cell: FurtherCell, record: Mapping[str, tuple[float, float]]) -> None:
        """Keep what a test measured if its cell is in the table."""
        if cell in self.table.cells:
            self.found[cell] = record


_EXPERTS = (OF_EXPERTS, "qwen3_moe")
ADAPTERS = Table(
    "adapters",
    "adapters",
    (
        FurtherCell("TP2+SP", PADDED, OF_MODULES, "qwen2"),
        FurtherCell("TP2+SP", PADDED, FUSED, "qwen2"),
        FurtherCell("PP2", PADDED, OF_MODULES, "qwen2"),
        FurtherCell("TP2xPP2xDP2+SP", PADDED, OF_MODULES, "qwen2"),
        FurtherCell("TP2xCP2+SP", PACKED, OF_MODULES, "qwen2"),
        FurtherCell("DP2 distributed optimizer, both overlaps", PACKED, OF_MODULES, "qwen2"),
        FurtherCell("TP2+SP, experts whole", PADDED, *_EXPERTS),
        FurtherCell("EP2", PADDED, *_EXPERTS),
        FurtherCell("EP2", PACKED, *_EXPERTS),
        FurtherCell("EP2xPP2", PADDED, *_EXPERTS),
        FurtherCell("EP2xCP2", PADDED, *_EXPERTS),
        FurtherCell("EP2", PADDED, OF_STACKS, "gpt_oss"),
        FurtherCell("EP2xTP2+SP", PADDED, LATENT, "deepseek_v3"),
    ),
    {"loss": "loss", "grad norm": "grad norm", "weights": "adapters"},
)
SCALAR = Table(
    "scalar",
    "values or scores",
    (
        FurtherCell("TP2", PADDED, "scores", "qwen2"),
        FurtherCell("TP2+SP", PACKED, "values as logits", "qwen3"),
        FurtherCell("PP2", PACKED, "scores as logits", "qwen3"),
        FurtherCell("TP2xPP2xDP2+SP", PADDED, "values", "qwen2"),
        FurtherCell("TP2xCP2+SP", PACKED, "values as logits", "qwen3"),
        FurtherCell("EP2", DYNAMIC, "values", "qwen3_moe"),
        FurtherCell("EP2xTP2+SP", PACKED, "values", "qwen3_moe"),
        FurtherCell("EP2xPP2", PADDED, "scores", "qwen3_moe"),
    ),
    {
        "loss": "loss",
        "grad norm": "grad norm",
        "weights": "weights",
        "values after training": "values after",
    },
)
LAYOUTS = (
    ("one process", PADDED, "token"),
    ("one process", PACKED, "policy gradient"),
    ("TP2", PADDED, "token"),
    ("TP2+SP", PACKED, "policy gradient"),
    ("PP2", DYNAMIC, "token"),
    ("PP2xVPP2", PACKED, "token"),
    ("CP2", PADDED, "token"),
    ("CP4", PACKED, "policy gradient"),
    ("TP4 over 2 key-value groups", PACKED, "token"),
    ("TP2xCP2+SP", PACKED, "token"),
    ("FSDP2 x 2", PADDED, "token"),
    ("FSDP1 x 2", DYNAMIC, "policy gradient"),
)
WITH_EXPERTS = (
    *(each for each in LAYOUTS if each[0] not in ("TP2", "TP4 over 2 key-value groups")),
    ("EP2xTP2+SP", PADDED, "token"),
    ("EP2xCP2", PACKED, "policy gradient"),
)
"""Tensor-parallel ranks share experts with sequence parallelism alone."""
HYBRIDS_TABLE = Table(
    "hybrids",
    "trained loss",
    tuple(
        FurtherCell(*each, family)
        for family, layouts in (("qwen3_next", WITH_EXPERTS), ("nemotron_h", LAYOUTS))
        for each in layouts
    ),
    {
        name: name
        for name in ("loss", "grad norm", "weights", "logprobs before", "logprobs after", "entropy")
    },
)
FEW_PATCHES = ", few patches"
"""Said of batchings that bound the patches of a microbatch."""
SEEN = (
    ("one process", PADDED),
    ("one process, packed", PACKED),
    ("TP2", DYNAMIC + FEW_PATCHES),
    ("TP2+SP", PACKED + FEW_PATCHES),
    ("PP2", PACKED),
    ("CP2", PACKED),
    ("DP2, overlaps", PADDED),
    ("TP2xCP2+SP", PACKED),
    ("TP2xPP2xCP2+SP", PACKED),
    ("FSDP2", PACKED),
    ("FSDP2 x 2", PADDED),
    ("FSDP2 x 4", DYNAMIC),
    ("FSDP2 CP2", PACKED),
    ("FSDP2 TP2+SP x 2", PACKED),
    ("FSDP1 x 2", DYNAMIC),
)
SEEN_BY_EXPERTS = (
    ("one process", PACKED),
    ("EP2xTP2+SP", PACKED),
    ("PP2", PADDED),
    ("EP2xCP2", PADDED),
    ("EP2xTP2xPP2xCP2+SP, distributed optimizer, overlaps", PACKED),
    ("FSDP2 x 2", PADDED),
)
OF_FAMILIES = {"qwen2_5_vl": SEEN, "qwen3_vl": SEEN, "qwen3_vl_moe": SEEN_BY_EXPERTS}
AT_ONCE, BF16, RAY = "at once", "at once, in bf16", "by Ray workers, as an engine received it"
IN_BF16 = (
    ("qwen2_5_vl", "TP2+SP"),
    ("qwen2_5_vl", "FSDP2 x 2"),
    ("qwen3_vl", "TP2+SP"),
    ("qwen3_vl", "PP2"),
    ("qwen3_vl", "CP2"),
    ("qwen3_vl_moe", "EP2xTP2+SP"),
)
RESUMED = (
    ("qwen2_5_vl", "PP2", "TP2+SP"),
    ("qwen3_vl", "TP2+SP", "PP2"),
    ("qwen3_vl", "PP2", "FSDP2 x 2"),
    ("qwen3_vl", "FSDP2 x 2", "FSDP1 x 2"),
    ("qwen3_vl", "FSDP1 x 2", "TP2+SP"),
    ("qwen3_vl_moe", "EP2xTP2+SP", "PP2"),
)
"""By family the layouts before and after a checkpoint."""
BY_RAY = (("qwen2_5_vl", "PP2"), ("qwen3_vl", "TP2+SP"), ("qwen3_vl_moe", "EP2xTP2+SP"))


def name_resumed(saver: str) -> str:
    """What the table says of training that goes on from a checkpoint of another layout."""
    return f"in two runs, the first {saver}"


def _list_seen() -> Iterator[FurtherCell]:
    for family, layouts in OF_FAMILIES.items():
        batchings = dict(layouts)
        hows = [(name, AT_ONCE) for name in batchings]
        for kind, cases in ((BF16, IN_BF16), (RAY, BY_RAY)):
            hows += [(name, kind) for own, name in cases if own == family]
        hows += [(then, name_resumed(first)) for own, first, then in RESUMED if own == family]
        yield from (FurtherCell(name, batchings[name], how, family) for name, how in hows)


PICTURES_TABLE = Table(
    "pictures",
    "trained",
    tuple(_list_seen()),
    {
        name: name
        for name in (
            *("loss", "grad norm", "weights"),
            *("tower's gradients", "logprobs before", "logprobs after"),
        )
    },
)
OF_DECODERS, OF_TOWERS = "of the decoder", "of decoder and tower"
PICTURE_ADAPTERS = Table(
    "picture_adapters",
    "adapters are",
    tuple(
        FurtherCell(layout, dict(OF_FAMILIES[family])[layout], OF_TOWERS, family)
        for family, layouts in (
            ("qwen2_5_vl", ("TP2+SP",)),
            ("qwen3_vl", ("one process", "TP2", "TP2+SP", "PP2", "CP2", "DP2, overlaps")),
            ("qwen3_vl_moe", ("EP2xTP2+SP", "PP2")),
        )
        for layout in layouts
    ),
    {
        "loss": "loss",
        "grad norm": "grad norm",
        "weights": "adapters",
        "tower's gradients": "tower's gradients",
        "logprobs": "logprobs after",
    },
)
FURTHER = (ADAPTERS, SCALAR, HYBRIDS_TABLE, PICTURES_TABLE, PICTURE_ADAPTERS)
