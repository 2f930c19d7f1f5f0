"""Every block of Python and every command of the pages runs, or says why it does not."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex

import pytest
from typer.testing import CliRunner

from megatron_policy.cli import app
from tests.other_process import OtherProcess
from tests.site.blocks import (
    ROOT,
    Block,
    blocks_of,
    page_text,
    pages,
    problems,
    set_up,
    to_run,
    unexplained,
)

RUN = [page for page in pages() if to_run(page)]
LOCAL = {"Qwen/Qwen2.5-0.5B": "qwen2", "Qwen/Qwen3-30B-A3B": "qwen3_moe"}
"""Checkpoints that pages name, and the families of the tiny ones that they are here."""


def run_blocks(blocks: list[Block], cwd: str) -> str:
    """What the blocks of a page print, run in order in this process, which is for nothing else."""
    os.chdir(cwd)
    names: dict[str, object] = {"__name__": "__main__"}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for block in blocks:
            if block.kind == "python":
                # As at its place in the page, which a traceback then shows.
                exec(compile("\n" * block.line + block.text, block.page, "exec"), names)
            else:
                for command in re.findall(r"^\$ (.+?)(?:\s+#.*)?$", block.text, re.MULTILINE):
                    _command(block, command)
    return printed.getvalue()


def _command(block: Block, command: str) -> None:
    program, *words = shlex.split(command)
    assert program == "megatron-policy", f"{block.place}: run or mark {command!r}"
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, f"{block.place}: {command}\n{done.output}{done.exception!r}"


@pytest.mark.nightly
@pytest.mark.parametrize("page", RUN)
def test_the_blocks_of_a_page_run_and_print_what_it_says(page: str, checkpoint, tmp_path) -> None:
    (tmp_path / "Qwen").mkdir()
    for name, family in LOCAL.items():
        (tmp_path / name).symlink_to(checkpoint(family))
    process = OtherProcess()
    try:
        process.begin(run_blocks, to_run(page), str(tmp_path))
        printed = process.result(timeout=600.0)
    finally:
        process.kill()
    lines = [_without_numbers(line) for line in printed.splitlines()]
    # What is made of the code has its own test, and is not what the blocks print.
    written = (ROOT / page).read_text(encoding="utf-8").partition("<!-- made: ")[0]
    shown = re.findall(r"```text\n(.*?)```", written, re.DOTALL)
    for line in "".join(shown).splitlines():
        assert line == "..." or _without_numbers(line) in lines, f"{page}: {line!r} is not printed"


def _without_numbers(line: str) -> str:
    return re.sub(r"-?\d[\d.]*(e[+-]?\d+)?", "0", line)


def test_a_block_that_is_not_run_here_says_who_runs_it_or_why_nobody_does() -> None:
    blocks = [
        each for page in pages() for each in blocks_of(page, (ROOT / page).read_text("utf-8"))
    ]
    assert len([block for block in blocks if block.mark]) > 10
    assert [problem for block in blocks for problem in problems(block)] == []


def test_what_the_pages_show_can_be_pasted() -> None:
    assert {
        page: found for page in pages() if (found := [*unexplained(page, page_text(page))])
    } == {}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Train:\n\n```python\nx = batch\n```\n", "no block before it gives batch"),
        ("<!-- also run\na = 1\n-->\n```python\nprint(a)\n```\n", "no block before it gives a"),
        ("Run:\n\n```console\n$ c FILE\n```\n", "does not explain FILE"),
        ("Run:\n\n```console\n$ c ... --x\n```\n", "does not explain ..."),
        ("A `batch`:\n\n```python\nx = [batch for _ in range(2)]\n```\n", ""),
        ("```python\na = 1\n```\n\n```python\ndef f(b):\n    return a + b\n```\n", ""),
        ("`FILE` is any:\n\n```console\n$ A=1 c FILE --max-memory 64MiB   # ALL of it\n```\n", ""),
        (
            "It continues [that](index.md#the-shortest-example):\n\n```python\npolicy, loss\n```\n",
            "",
        ),
    ],
)
def test_a_name_is_reported_that_nothing_shows_or_explains(text: str, said: str) -> None:
    problems = [*unexplained("docs/page.md", text)]
    assert len(problems) == bool(said) and all(said in problem for problem in problems)


def test_a_block_that_continues_a_section_is_run_after_its_code() -> None:
    continues = "This continues [it](../index.md#the-shortest-example):"
    (block,) = blocks_of("docs/a/b.md", f"{continues}\n\n```python\nx = policy\n```\n")
    assert block.continues == ("docs/index.md", "the-shortest-example")
    (before,) = set_up(block)
    assert "policy = MegatronPolicy(config)" in before.text
    first, *_ = to_run("docs/profile.md")
    assert first == before


def test_hidden_code_that_sets_something_up_is_a_problem() -> None:
    hidden = "<!-- also run\n{}\n-->\n"
    (block,) = blocks_of("docs/page.md", hidden.format("assert 1 < 2"))
    assert list(problems(block)) == []
    (block,) = blocks_of("docs/page.md", hidden.format("a = 1"))
    assert "assertions alone" in next(problems(block))


def test_the_commands_and_programs_of_every_example_are_in_blocks_that_are_looked_at() -> None:
    readmes = [page for page in pages() if page.startswith("examples/")]
    assert len(readmes) == len(list((ROOT / "examples").rglob("README.md"))) > 5
    for page in readmes:
        text = (ROOT / page).read_text("utf-8")
        assert list(blocks_of(page, text)), page
        fenced = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        plain = [block for kind, block in fenced if not kind]
        assert [each for each in plain if re.match(r"(\$ )?(python|make) ", each)] == [], page


@pytest.mark.parametrize(
    ("mark", "said"),
    [
        ("run by tests/gone.py", "there is no tests/gone.py"),
        ("run by tests/test_floors.py", "does not name page.md"),
        ("not run: no time", "a reason begins with"),
        ("not run:", "a reason begins with"),
    ],
)
def test_a_wrong_mark_is_reported_with_its_line(mark: str, said: str) -> None:
    (block,) = blocks_of("docs/page.md", f"Text.\n\n<!-- {mark} -->\n```python\nx = 1\n```\n")
    (problem,) = problems(block)
    assert problem.startswith("docs/page.md:3: ") and said in problem


def test_hidden_code_indented_blocks_and_commands_are_found() -> None:
    text = (
        "<!-- also run\na = 1\n-->\n- item\n\n  ```python\n  b = a\n  ```\n\n```console\n$ c\n```\n"
    )
    found = [(each.kind, each.text) for each in blocks_of("docs/page.md", text)]
    assert found == [("python", "a = 1\n"), ("python", "b = a\n"), ("console", "$ c\n")]
