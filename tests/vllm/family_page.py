"""The page docs/vllm-families.md: family_page.md filled with what a run found; runs nothing."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

from tests.exact import ROOM
from tests.families import SAMPLES
from tests.invariance.page import wrapped
from tests.vllm.family_cases import BF16_ALONE, CASES, LENGTH, ROWS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "vllm-families.md"
TEMPLATE = Path(__file__).with_suffix(".md")
WRITE = "VLLM_FAMILIES_PAGE"
"""Set in the environment, a run of all cases writes the page."""
COLUMNS = ("model", "in vLLM", "names", "before", "after")
REFUSED = "see below"


def name_of(case: str) -> str:
    """A case's first column."""
    family, _, kind = case.partition(" ")
    return f"`{family}` {kind}".rstrip()


@dataclass(frozen=True)
class Line:
    """What was found out of a case; of one that vLLM does not take, the reason alone."""

    model: str = ""
    names: int = 0
    read: int = 0
    before: float = 0.0
    after: float = 0.0
    reason: str = ""

    def columns(self, case: str) -> tuple[str, ...]:
        if self.reason:
            return (name_of(case), REFUSED, "", "", "")
        numbers = (f"{self.before:.1e}", f"{self.after:.1e}")
        return (name_of(case), self.model, f"{self.read} of {self.names}", *numbers)


@dataclass(frozen=True)
class Measured:
    """What a run has found out, by the names of cases, and the versions that its engines had."""

    lines: dict[str, Line] = field(default_factory=dict)
    engine: dict[str, str] = field(default_factory=dict)


def write(measured: Measured) -> None:
    """The page, of a run of all cases."""
    missing = {case.name for case in CASES} - set(measured.lines)
    assert not missing, f"the page needs a run of all cases: {missing}"
    PAGE.write_text(render(measured), encoding="utf-8")


def rows(text: str) -> dict[str, list[str]]:
    """The columns of a page's table behind the first one, by that."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    return {first: rest for first, *rest in lines}


def render(measured: Measured) -> str:
    """The page's text."""
    rows = [COLUMNS, ("---", "---", "---", "---:", "---:")]
    rows += [measured.lines[case.name].columns(case.name) for case in CASES]
    reasons = [
        textwrap.fill(
            f"- {name_of(case.name)}: {measured.lines[case.name].reason}",
            120,
            subsequent_indent="  ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        for case in CASES
        if measured.lines[case.name].reason
    ]
    packages = ("torch", "megatron-core", "transformers")
    text = TEMPLATE.read_text(encoding="utf-8").format(
        table="\n".join(f"| {' | '.join(row)} |" for row in rows),
        refused="\n".join(reasons),
        engine=measured.engine,
        trainer={name: version(name).partition("+")[0] for name in packages},
        cpu=measured.engine["cpu"],
        count=sum(not measured.lines[family].reason for family in SAMPLES),
        families=len(SAMPLES),
        rows=ROWS,
        length=LENGTH,
        room=ROOM,
        bf16=", ".join(f"`{family}`" for family in BF16_ALONE if family in SAMPLES),
        missing="KeyError: 'layers.1.mlp.gate.e_score_correction_bias'",
    )
    return "\n\n".join(
        paragraph if paragraph.startswith("- ") else wrapped(paragraph)
        for paragraph in text.split("\n\n")
    )
