"""A family's rows bound to one config: the inventory of both sides, known before a byte is read.

Closed world: every Megatron parameter is filled once, every HF tensor is used once or ignored for
a stated reason, and anything else is an error that names both sides.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

import torch

from megatron_policy.converters.architecture import Architecture, Moe, ScalarHead
from megatron_policy.converters.config_fields import IGNORED, Fields, shown
from megatron_policy.converters.config_fields.quantisation import found_in
from megatron_policy.converters.rows import Ignore, Role, Row, Shape, TowerQkv
from megatron_policy.converters.rows.blocks import EXPERT, of_expert
from megatron_policy.converters.rows.expert_rows import STACKED, Stacked, order_experts, tell_order
from megatron_policy.converters.scalar_head import find_head, put_head
from megatron_policy.errors import ConversionError

from .mismatch import Expected, compare, list_other_dtypes, name_dtypes
from .registry import Family, family_of

EMBEDDING, LAYER, HEAD = "embedding", "layer", "head"

WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Of HF weights. Others are quantised (a cast would lose their scales) or would be truncated."""


@dataclass(frozen=True)
class Entry:
    """A row for one layer: the Megatron parameter's canonical name and its HF tensors.

    Entries of experts that HF stacks share an HF tensor; each has its own elements in it.
    """

    megatron: str
    hf: tuple[str, ...]
    row: Row
    layer: int | None
    where: str
    expert: int | None = None
    adapts: str = ""
    """The name of the weight that it adapts, if it belongs to an adapter."""
    within: Entry | None = None
    """The parameter of which this is a part in training checkpoints; None: itself."""

    @property
    def saved(self) -> Entry:
        """The parameter that training checkpoints have."""
        return self.within or self


@dataclass(frozen=True)
class Table:
    """All entries of one model, embedding first and head last, and the HF tensors to ignore.
    Layers for multi-token prediction count as part of the head.
    """

    family: str
    architecture: Architecture
    entries: tuple[Entry, ...]
    ignored: Mapping[str, Ignore]
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Fields of config.json with other values than in the model's file; what is written has them.
    """
    fresh: Mapping[str, float] = field(default_factory=dict)
    """HF tensors of a scalar head that the checkpoint lacks, with the standard deviation that they
    are drawn with; 0 for zeros.
    """
    paths: tuple[tuple[str, str], ...] = ()
    """See `Family.paths`."""

    def exported(self) -> tuple[Entry, ...]:
        """The entries that own their HF tensors: together they hold each HF tensor exactly once."""
        return tuple(entry for entry in self.entries if entry.row.owns)

    def hf_shapes(self) -> dict[str, Shape]:
        """Every HF tensor of the model with its shape, in table order."""
        return {name: e.shape for name, e in self._hf(self.exported()).items()}

    def copies(self) -> dict[str, str]:
        """Tied copies among the ignored HF tensors, with the names of their originals."""
        return {name: row.equals for name, row in self.ignored.items() if row.equals}

    def carried(self) -> tuple[str, ...]:
        """The HF tensors of layers that the model leaves out: an export copies them unchanged."""
        return tuple(n for n, row in self.ignored.items() if row.carried and not row.equals)

    def sent(self, names: Collection[str]) -> tuple[Entry, ...]:
        """What exports and refits send: `exported`, and further HF tensors that repeat one of
        those, if they are among `names`.
        """
        owners = {entry.hf: entry for entry in self.exported()}
        repeated = {
            name: row.equals for name, row in self.ignored.items() if row.carried and row.equals
        }
        return (
            *self.exported(),
            *(replace(owners[(of,)], hf=(n,)) for n, of in repeated.items() if n in names),
        )

    def entries_of(
        self, layers: Iterable[int], first: bool, last: bool, experts: range | None = None
    ) -> tuple[Entry, ...]:
        """The entries of a model chunk of these global layers; `first` has the embedding, `last`
        the head and the layers for multi-token prediction. Of each layer's experts it has all, or
        those numbered in `experts`.
        """
        wanted = set(layers)

        def held(entry: Entry) -> bool:
            here = experts is None or entry.expert is None or entry.expert in experts
            if entry.where == LAYER:
                return here and entry.layer in wanted
            if entry.where == EMBEDDING:
                return first
            # A chunk that has the embedding itself needs no tied copy of it.
            return here and last and (entry.row.owns or not first)

        return tuple(filter(held, self.entries))

    def check_hf(self, shapes: Mapping[str, Shape], dtypes: Mapping[str, torch.dtype]) -> None:
        """Raise ConversionError unless a checkpoint holds exactly the tensors of this model.

        Each must have its shape and one of `WEIGHT_DTYPES`; ignored tensors are not checked.
        """
        own = self._hf(self.exported())
        expected = {name: e for name, e in own.items() if name not in self.fresh}
        # Quantised weights come with tensors that no row uses, so quantisation is reported first.
        quantised = found_in([name for name in shapes if name not in expected], dtypes)
        problems = list_other_dtypes(expected, dtypes, WEIGHT_DTYPES)
        if quantised or problems:
            legal = name_dtypes(WEIGHT_DTYPES)
            what = quantised.what if quantised else f"the checkpoint has weights not in {legal}"
            convert = f"Dequantise or convert the checkpoint to {legal} first."
            advice = quantised.advice if quantised else convert
            raise ConversionError(f"{what}:\n{problems}\n{advice}")
        seen = {name: shape for name, shape in shapes.items() if name not in self.ignored}
        if problems := compare(expected, seen, f"no row of {self.family} uses it"):
            raise ConversionError(
                f"the checkpoint is not the {self.family} model of its config.json:\n{problems}\n"
                "Correct the checkpoint or its config.json, or give the family's TABLE another row."
            )

    def check_megatron(
        self,
        found: Mapping[str, Shape],
        tp: int,
        entries: Sequence[Entry],
        *,
        expert_tp: int | None = None,
    ) -> None:
        """Raise ConversionError unless a chunk's parameters (canonical names) match `entries`.

        `tp` ranks split them; `expert_tp` those of experts, as many as `tp` if None.
        """
        sizes = {False: tp, True: tp if expert_tp is None else expert_tp}
        expected = {
            entry.megatron: Expected(
                entry.row.local_shape(self.architecture, sizes[of_expert(entry.row.megatron)]),
                f"filled from {' + '.join(entry.hf)} ({type(entry.row).__name__} row)",
            )
            for entry in entries
        }
        problems = compare(expected, found, f"no row of {self.family} fills it")
        if problems:
            raise ConversionError(
                f"the built model does not fit the table of {self.family} (tp {tp}):\n{problems}\n"
                "Give the family's TABLE a row for it, or build the model that the table describes."
            )

    def _hf(self, entries: Iterable[Entry]) -> dict[str, Expected]:
        """The HF tensors of `entries` by name."""
        shapes: dict[Row, tuple[Shape, ...]] = {}
        expected: dict[str, Expected] = {}
        for entry in entries:
            if entry.row not in shapes:
                shapes[entry.row] = entry.row.hf_shapes(self.architecture)
            use = f"feeds {entry.megatron} ({type(entry.row).__name__} row{tell_order(entry.row)})"
            expected |= {
                name: Expected(s, use) for name, s in zip(entry.hf, shapes[entry.row], strict=True)
            }
        return expected


def bind(
    raw: Mapping[str, Any],
    family: Family | None = None,
    mtp_layers: int = 0,
    head: ScalarHead | None = None,
    left_out: Collection[str] = (),
    tensors: Collection[str] = (),
    named: Collection[str] = (),
) -> Table:
    """The table of one HF config, a mapping of all its fields; its model_type names the family.
    The model has `mtp_layers` of the layers for multi-token prediction, or those that are among the
    HF `tensors` of its checkpoint, and the scalar `head`; if that is None, the head that its
    checkpoint has. `left_out` names fields that are not the model's, if the family does not know
    them. `named` are the HF tensors by whose names the family's forms are told apart, and by their
    shapes if it is a mapping to these; by default `tensors`.

    ConversionError for a config that cannot be translated faithfully, or a faulty table.
    """
    fields = Fields(raw)
    table = draft(fields, family, mtp_layers, head, tensors, named)
    fields.finish({**IGNORED, **dict.fromkeys(left_out, "overridden by null")})
    return table


def draft(
    fields: Fields,
    family: Family | None = None,
    mtp_layers: int = 0,
    head: ScalarHead | None = None,
    tensors: Collection[str] = (),
    named: Collection[str] = (),
) -> Table:
    """The table from `fields`, without checking that all of them were understood.

    For showing how a config is read; models are built from the result of `bind`.
    """
    family = family or family_of(fields.take("model_type"))
    names = fields.take("architectures", ())
    if not isinstance(names, (list, tuple)):
        raise ConversionError(f"config.json has {shown(names)} for architectures, not a list")
    for name in names:
        if name not in (*family.hf_architectures, *family.scalar_classes):
            fields.refuse(
                "architectures",
                name,
                f"{family.name} converts {' or '.join(family.hf_architectures)}",
            )
    source = find_head(fields, names, family.scalar_classes, head)
    rows = family.list_rows(fields, named or tensors)
    rows = rows if source.head is None else put_head(rows)
    try:
        architecture = family.architecture(fields)
        if source.head is not None:
            architecture = replace(architecture, tied=False, head=source.head)
        if any(name in (named or tensors) for name in _name_stacks(rows, architecture)):
            architecture = architecture.change_experts(stacked=True)
        architecture = order_experts(rows, architecture, named or tensors)
        mtp_layers = mtp_layers or _count_mtp_layers(rows, architecture, tensors)
        architecture = replace(architecture, mtp_layers=mtp_layers)
        if mtp_layers:  # which embed the tokens that follow, without pictures
            architecture = replace(architecture, attachments=())
    except ConversionError:
        raise
    except (ArithmeticError, TypeError, ValueError) as error:
        raise ConversionError(
            f"config.json has a value that a {family.name} model cannot have: {error}"
        ) from error
    if architecture.shell is not None:
        shell, of_shell = family.list_shell_rows(architecture.shell, named or tensors)
        architecture, rows = replace(architecture, shell=shell), (*rows, *of_shell)
    entries = _make_entries([row for row in rows if not isinstance(row, Ignore)], architecture)
    _refuse_duplicates(family.name, entries)
    _refuse_vectors_as_matrices(family.name, entries, architecture)
    ignored = {
        name: row
        for row in rows
        if isinstance(row, Ignore)
        for name in _name_ignored(row, architecture, named or tensors)
    }
    own = source.fields, source.fresh, family.paths
    return Table(family.name, architecture, entries, ignored, *own)


def _count_mtp_layers(
    rows: Iterable[Row | Ignore], architecture: Architecture, tensors: Collection[str]
) -> int:
    """How many layers for multi-token prediction, from the first on, have some of the `tensors`;
    `architecture` leaves them all out.
    """
    carried = (row for row in rows if isinstance(row, Ignore) and row.carried)
    templates = {row.hf for row in carried if architecture.holds(row.when)}
    counted = [hf for hf in templates if "{left_out}" in hf or "{mtp_layer}" in hf]
    left_out = [found for hf in counted if (found := _number_layers(hf, architecture))]
    present = [any(name in tensors for name in layer) for layer in zip(*left_out, strict=True)]
    return (*present, False).index(False)


def _name_stacks(rows: Iterable[Row | Ignore], architecture: Architecture) -> Iterator[str]:
    """What checkpoints call tensors of all experts of a layer, where they need not have such."""
    for row in rows:
        if not isinstance(row, Ignore) and row.when == STACKED:
            for layer in architecture.expert_layers:
                yield from (name.replace("{layer}", str(layer)) for name in row.hf)


def _name_ignored(
    row: Ignore, architecture: Architecture, tensors: Collection[str]
) -> Collection[str]:
    if "*" in row.hf:
        return [name for name in tensors if fnmatchcase(name, row.hf)]
    layers = range(architecture.num_layers)
    names = [row.hf] if architecture.holds(row.when) else []
    if "{layer}" in row.hf:
        names = [name.replace("{layer}", str(layer)) for name in names for layer in layers]
    names = [each for name in names for each in _number_layers(name, architecture)]
    if not of_expert(row.hf):
        return names
    experts = architecture.moe.experts if architecture.moe else 0
    return [name.replace(EXPERT, str(expert)) for name in names for expert in range(experts)]


def _number_layers(name: str, architecture: Architecture) -> list[str]:
    """A name with the number of each layer for multi-token prediction that it is a name of, if any:
    counted from 0 or after all other layers, of those that the model has or leaves out.
    """
    layers, held = architecture.num_layers, architecture.mtp_layers
    end = architecture.further_layers
    for mark, numbers in (
        ("{mtp}", range(held)),
        ("{left_out}", range(held, end)),
        ("{predicting}", range(layers, layers + held)),
        ("{mtp_layer}", range(layers + held, layers + end)),
    ):
        if mark in name:
            return [name.replace(mark, str(number)) for number in numbers]
    return [name]


def _make_entries(rows: Sequence[Row], architecture: Architecture) -> tuple[Entry, ...]:
    """Entries of the embedding, of each layer, of each layer for multi-token prediction, and of the
    head, in this order.
    """
    before: list[Entry] = []
    inside: list[Entry] = []
    after: list[Entry] = []
    for row in rows:
        repeated = "{layer}" in row.megatron or "{mtp}" in row.megatron
        if repeated or not architecture.holds(row.when):
            continue
        if row.megatron.startswith("embedding."):
            before.append(Entry(row.megatron, row.hf, row, None, EMBEDDING))
        else:
            after.append(Entry(row.megatron, row.hf, row, None, HEAD))
    for layer in range(architecture.num_layers + architecture.mtp_layers):
        mark, where, numbers = "{layer}", LAYER, {"{layer}": layer}
        if layer >= architecture.num_layers:
            mark, where = "{mtp}", HEAD
            numbers = {"{mtp}": layer - architecture.num_layers, "{predicting}": layer}
        for row in rows:
            if mark in row.megatron and architecture.holds(row.when, row.part, layer):
                inside += _make_layer_entries(row, numbers, layer, where, architecture.moe)
    return (*before, *inside, *after)


def _make_layer_entries(
    row: Row, numbers: Mapping[str, int], layer: int, where: str, moe: Moe | None
) -> Iterator[Entry]:
    experts: Iterable[int | None] = (None,)
    if of_expert(row.megatron):
        assert moe is not None, f"{row.megatron} is a row of a model with experts"
        experts = range(moe.experts)
    for expert in experts:
        own = row
        if expert is not None and isinstance(row, Stacked):
            own = replace(row, expert=expert)
        names = [row.megatron, *row.hf]
        for mark, number in (*numbers.items(), (EXPERT, expert)):
            names = [name.replace(mark, str(number)) for name in names]
        yield Entry(names[0], tuple(names[1:]), own, layer, where, expert)


def _refuse_duplicates(family: str, entries: Sequence[Entry]) -> None:
    # Experts stacked in one HF tensor share it, so only the first one counts; so do projections.
    shared = {id(e) for e in entries if isinstance(e.row, Stacked) and e.expert}
    shared |= {id(e) for e in entries if isinstance(e.row, TowerQkv) and e.row.number}
    whole = [e for e in entries if e.row.owns and id(e) not in shared]
    for side, names in (
        ("Megatron parameter", [entry.megatron for entry in entries]),
        ("HF tensor", [name for entry in whole for name in entry.hf]),
    ):
        if len(set(names)) < len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise ConversionError(
                f"the table of {family} uses a {side} in two rows: {', '.join(twice[:20])}"
            )


def _refuse_vectors_as_matrices(
    family: str, entries: Sequence[Entry], architecture: Architecture
) -> None:
    """Refuse one-dimensional parameters whose row has the default role, a matrix."""
    for name, row in {entry.row.megatron: entry.row for entry in entries}.items():
        if row.role is Role.MATRIX and len(row.local_shape(architecture, 1)) < 2:
            raise ConversionError(
                f"the table of {family} says that {name} is a matrix, but it has one dimension: "
                "give its row role=Role.BIAS, Role.NORM, Role.SINK or Role.ACTIVATION, which sets "
                "its weight decay"
            )
