"""Plain English: constructions that are never right in this project do not come back.

Looks in docstrings, comments and string literals of the code, and in the pages.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("megatron_policy", "converters", "examples", "benchmarks", "tests", "docs")
BANNED = {
    "knows no": "say what it is independent of, or nothing",
    "know no": "say what it is independent of, or nothing",
    "knows not": "does not know",
    "know not": "do not know",
    "knows nothing of": "say what it is independent of, or nothing",
    "know nothing of": "say what it is independent of, or nothing",
    "may be read": "can be read",
    "mend": "fix",
    "mends": "fixes",
    "mended": "fixed",
    "whatever is": "everything that is, or regardless of",
    "one's": "name whose it is: the length of each, its, your",
    "of one mind": "agree, or check_same_value",
    "for one who": "name the reader, or say you",
    "amid": "during, or in the middle of",
    "for ever": "forever",
    "goes with the next": "will be removed in the next",
    "go with the next": "will be removed in the next",
    "bears on": "affects",
    "bear on": "affect",
    "is not built": "is not supported, or is not implemented",
    "are not built": "are not supported, or are not implemented",
    "not built yet": "not supported yet",
    "has the last word": "takes precedence",
    "which is no": "which is not a",
    "it is no": "it is not a",
    "that is no": "that is not a",
    "that are no": "that are not",
    "is no dtype": "is not a dtype",
    "is no multiple": "is not a multiple",
    "are no whole": "are not whole",
    "what is there": "what is supported, what was found, what exists",
    "without a word": "without a message",
    "lie too deep": "are nested too deeply",
    "outside of": "outside",
    "shall": "is to, or must",
    "stands there": "is there",
    "inside of": "inside",
}
"""Each construction, found as whole words in any case, and what to write."""

_ANY = re.compile(
    r"(?<!\w)("
    + "|".join(re.escape(words).replace(r"\ ", r"\s+") for words in BANNED)
    + r")(?!\w)",
    re.IGNORECASE,
)


def found(text: str) -> list[str]:
    """The banned constructions in a text, also those that a line break divides."""
    return [" ".join(hit[1].lower().split()) for hit in _ANY.finditer(text)]


def texts(code: str) -> Iterator[tuple[int, str]]:
    """(line, text) of each docstring, string literal and block of comments."""
    inside: set[ast.expr] = set()  # parts of f-strings, which come after the whole
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.JoinedStr):
            inside.update(node.values)
            yield node.lineno, "".join(_shown(part) for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in inside:
            yield node.lineno, node.value
    block: list[str] = []
    first = last = 0
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        if token.type != tokenize.COMMENT:
            continue
        line = token.start[0]
        if block and line != last + 1:
            yield first, " ".join(block)
            block = []
        first, last = (first if block else line), line
        block.append(token.string.lstrip("#").strip())
    if block:
        yield first, " ".join(block)


def _shown(part: ast.expr) -> str:
    return str(part.value) if isinstance(part, ast.Constant) else "{}"


_SEPARATED = r"""(?:\W|\\[nt]|\b[bfru]{1,2}(?=["']))+"""
_SUSPECT = re.compile(
    r"(?:(?<!\w)|(?<=\\[nt]))(?:"
    + "|".join(re.escape(w).replace(r"\ ", _SEPARATED).replace("'", r"\\?'") for w in BANNED)
    + r")(?!\w)"
)


def constructions(code: str) -> Iterator[tuple[int, str]]:
    """(line, words) of each banned construction in code. Most files are done with after a look at
    their text, where quotes and hashes may stand between two words.
    """
    if _SUSPECT.search(code.lower()):
        for line, text in texts(code):
            yield from ((line, words) for words in found(text))


def files() -> Iterator[Path]:
    """All code and pages but this file."""
    yield from ROOT.glob("*.md")
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".md") and path != Path(__file__).resolve():
                yield path


def complaints(path: Path) -> Iterator[str]:
    """A line for each banned construction in a file."""
    content = path.read_text()
    is_code = path.suffix == ".py"
    for line, words in constructions(content) if is_code else ((1, w) for w in found(content)):
        yield f"{path.relative_to(ROOT)}:{line}: {words!r}; write: {BANNED[words]}"


def test_a_planted_construction_is_found() -> None:
    for words in BANNED:
        first, *rest = words.split()
        divided = "\n    ".join([first.capitalize(), *rest])
        assert found(f"Before, {words}: after.") == found(f"({divided})") == [words]
        quoted = words.replace("'", r"\'")
        assert list(constructions(f"x = 'Before\\n{quoted}: after.'")) == [(1, words)]


@pytest.mark.parametrize(
    "text",
    ["amend it; it recommends", "someone's", "it knows nothing", "it is not", "outside often"],
)
def test_parts_of_other_words_are_not_found(text: str) -> None:
    assert found(text) == []


@pytest.mark.parametrize(
    "code",
    [
        '"""It knows no\nreader."""',
        'print("it knows " "no reader")',
        'print("it knows " f"no reader of {1}")',
        'print(f"{1} knows no {2}")',
        r'print("it knows\nno reader")',
        "a = 1  # it knows no reader",
        "# it knows\n# no reader\na = 1",
    ],
)
def test_docstrings_literals_and_comments_are_searched(code: str) -> None:
    assert [words for _, words in constructions(code)] == ["knows no"]


def test_names_in_code_are_not_searched() -> None:
    assert list(constructions("amid = 'a'\nmend(amid)")) == []


def test_no_banned_construction_is_used() -> None:
    searched = sorted(files())
    assert ROOT / "README.md" in searched and ROOT / "megatron_policy" / "errors.py" in searched
    assert [line for path in searched for line in complaints(path)] == []
