"""What a model family is: its rows, and how its config is read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from megatron_policy.converters.architecture import Architecture, Shell
from megatron_policy.converters.config_fields import Fields
from megatron_policy.converters.families.shared.dense import rename
from megatron_policy.converters.families.shared.pictures import make_rows
from megatron_policy.converters.rows import Ignore, Row
from megatron_policy.converters.rows.expert_rows import STACKED
from megatron_policy.converters.scalar_head import SEQUENCE, TOKEN


@dataclass(frozen=True)
class Family:
    """Its rows, how to read its config, and the HF classes whose checkpoints it converts."""

    name: str
    table: tuple[Row | Ignore, ...]
    architecture: Callable[[Fields], Architecture]
    hf_architectures: tuple[str, ...]
    hf_model_type: str | None = None
    """The model_type of transformers' class that has the same fields, if it is not `name`: the
    makers' own class comes with their checkpoints, and no code of a checkpoint is executed.
    """
    other_names: tuple[tuple[str, str], ...] = ()
    """Parts of names of HF tensors, each with what some checkpoints have in its place."""
    hf_prefix: str = ""
    """What the names of transformers' classes with a scalar head begin with, if not as those of
    `hf_architectures`.
    """
    surrounded: bool = False
    """Whether its models have a shell: the decoder is a part of transformers' composite model."""
    paths: tuple[tuple[str, str], ...] = ()
    """What names of HF tensors begin with, or have in them if it begins with a dot, and what the
    paths of transformers' modules have in its place.
    """
    find_rows: Callable[[Fields], tuple[Row | Ignore, ...]] | None = None
    """Finds its rows, in place of `table`, where these depend on the config."""
    make_shell_rows: Callable[[Shell], tuple[Row, ...]] = make_rows
    """Makes the rows of what surrounds its decoder."""

    def list_rows(self, fields: Fields, tensors: Collection[str] = ()) -> tuple[Row | Ignore, ...]:
        """Its rows for a model of this config; see `name_rows`."""
        rows = self.table if self.find_rows is None else self.find_rows(fields)
        return self.name_rows(rows, tensors)

    def name_rows(
        self, rows: Iterable[Row | Ignore], tensors: Collection[str]
    ) -> tuple[Row | Ignore, ...]:
        """The rows by the names that a checkpoint with these HF tensors has, if any are."""
        others = [pair for pair in self.other_names if _have_other(tensors, *pair)]
        return rename(rows, dict(others))

    def list_shell_rows(
        self, shell: Shell, names: Collection[str]
    ) -> tuple[Shell, tuple[Row | Ignore, ...]]:
        """The shell of a checkpoint with HF tensors of these names, if any are given, and its rows:
        without what it can lack, where all of that is lacking.
        """
        rows = self.name_rows(self.make_shell_rows(shell), names)
        optional = [
            row
            for row in rows
            if not isinstance(row, Ignore)
            and shell.optional
            and row.megatron.endswith(shell.optional)
        ]
        if not names or not optional or any(n in names for row in optional for n in row.hf):
            return shell, rows
        return shell.leave_out_optional(), tuple(row for row in rows if row not in optional)

    @property
    def has_forms(self) -> bool:
        """Whether its checkpoints differ in the names of the same tensors, or have others too."""
        return bool(self.other_names or (self.table and self.find_rows)) or any(
            not isinstance(row, Ignore) and row.when == STACKED for row in self.table
        )

    @property
    def scalar_classes(self) -> tuple[str, str]:
        """The HF classes with one number for each sequence, and for each token."""
        prefix = self.hf_prefix or self.hf_architectures[0].removesuffix("ForCausalLM")
        return (prefix + SEQUENCE, prefix + TOKEN)


def _have_other(names: Collection[str], part: str, other: str) -> bool:
    """Whether names have `other`, and none the `part` but as a piece of it."""
    others = [name for name in names if other in name]
    rest = names if part not in other else {*names} - {*others}
    return bool(others) and not any(f".{part.removeprefix('.')}" in f".{name}" for name in rest)
