"""The page of vLLM's families is of the cases that are run, and says what it has to."""

from __future__ import annotations

import pytest

from tests.families import SAMPLES
from tests.vllm import family_page as page
from tests.vllm.family_cases import BF16_ALONE, CASES, REFUSED, REFUSED_WITH_AVX512, UNUSED

LEAST = 28
"""Of all families, how many vLLM has to take."""


def test_the_page_lists_every_case_and_every_refusal() -> None:
    rows = page.rows(page.PAGE.read_text(encoding="utf-8"))
    assert list(rows) == [page.name_of(case.name) for case in CASES], "see its first paragraph"
    refused = {name for name, columns in rows.items() if page.REFUSED in columns[0]}
    known, others = (
        {page.name_of(name) for name in each} for each in (REFUSED, REFUSED_WITH_AVX512)
    )
    assert refused in (known, known | others)  # by the CPU on which it was written
    for name in set(rows) - refused:
        read, _, sent = rows[name][1].partition(" of ")
        family = name.split("`")[1]
        assert (int(read) < int(sent)) == ("MTP" in name or family in UNUSED), rows[name]
        most = 0.5 if family in BF16_ALONE else 1e-4
        assert all(0 < float(number) < most for number in rows[name][2:]), rows[name]


def test_vllm_takes_most_families_and_every_refusal_has_its_reason() -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    assert len(set(SAMPLES) - set(REFUSED)) >= LEAST
    for name, (_, reason) in REFUSED.items():
        assert f"- {page.name_of(name)}: {reason}" in " ".join(text.split()), name


def test_a_page_is_read_back_as_it_was_rendered_and_none_is_written_of_some_cases() -> None:
    with pytest.raises(AssertionError, match="all cases"):
        page.write(page.Measured())
    line = page.Line(model="X", names=7, read=6, before=1e-6, after=2e-6)
    versions = dict.fromkeys(("vllm", "torch", "transformers", "cpu"), "1.0")
    first, *others = (case.name for case in CASES)
    lines = dict.fromkeys(others, line) | {first: page.Line(reason="for no reason")}
    text = page.render(page.Measured(lines, versions))
    rows = page.rows(text)
    assert rows.pop(page.name_of(first))[0] == page.REFUSED
    assert all(columns == ["X", "6 of 7", "1.0e-06", "2.0e-06"] for columns in rows.values())
    assert f"- {page.name_of(first)}: for no reason" in text
