"""Links from pages to files of the repository: each such file is a page of the site."""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DOCS = "docs"
FOLDER = "repository"
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")
FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
LANGUAGES = {".py": "python", ".yaml": "yaml", ".sh": "bash", ".toml": "toml"}
NOTEBOOK = ".ipynb"
IMAGES = (".png", ".svg", ".jpg", ".gif")


def rewritten(text: str, place: str) -> str:
    """A page of the site, of the repository's file `place`, with links that hold in the site.

    A link to a file that does not exist stays as it is: MkDocs complains about it.
    """

    def replace(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(place), found[1]))
        if not target.startswith("../") and (ROOT / target).exists():
            return posixpath.relpath(page_of(target), posixpath.dirname(page_of(place))) + (
                found[2] or ""
            )
        return found[0]

    return _outside_code(text, lambda prose: LINK.sub(replace, prose))


def _outside_code(text: str, change: Callable[[str], str]) -> str:
    parts, end = [], 0
    for code in FENCE.finditer(text):
        parts += [change(text[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*parts, change(text[end:])])


def page_of(file: str) -> str:
    """Where the site has a file or folder of the repository."""
    if file.startswith(f"{DOCS}/"):
        return file.removeprefix(f"{DOCS}/")
    if (ROOT / file).is_dir():
        readme = f"{file}/README.md"
        return page_of(readme) if (ROOT / readme).is_file() else f"{FOLDER}/{file}/index.md"
    return f"{FOLDER}/{file}" if file.endswith((".md", *IMAGES)) else f"{FOLDER}/{file}.md"


def linked(text: str, place: str) -> Iterator[str]:
    """Files and folders of the repository, outside docs/, that a file links to."""
    prose = FENCE.sub("", text)
    for target, _ in LINK.findall(prose):
        file = posixpath.normpath(posixpath.join(posixpath.dirname(place), target))
        outside = not file.startswith((f"{DOCS}/", "../"))
        if outside and file != "." and (ROOT / file).exists():
            readme = f"{file}/README.md"
            yield readme if (ROOT / readme).is_file() else file


def pages(texts: Mapping[str, str]) -> dict[str, str | bytes]:
    """The pages of all files that those of `texts` (by file) lead to, by their path in the site."""
    waiting = dict(texts)
    found: dict[str, str | bytes] = {}
    while waiting:
        place, text = waiting.popitem()
        for file in linked(text, place):
            if page_of(file) in found:
                continue
            if file.endswith(IMAGES):
                found[page_of(file)] = (ROOT / file).read_bytes()
            else:
                shown = content(file)
                found[page_of(file)] = rewritten(shown, file)
                if file.endswith((".md", NOTEBOOK)):
                    waiting[file] = shown
    return found


def content(file: str) -> str:
    """A page's text: Markdown as it is, a notebook with its outputs, other files as code, folders
    as a list.
    """
    path = ROOT / file
    if path.is_dir():
        names = sorted(each.name + "/" * each.is_dir() for each in path.iterdir())
        shown = "\n".join(f"- `{name}`" for name in names if not name.startswith(("_", ".")))
        return f"# {file}\n\n{shown}\n"
    text = path.read_text(encoding="utf-8")
    if file.endswith(".md"):
        return text
    if file.endswith(NOTEBOOK):
        return "\n\n".join(_cell(cell) for cell in json.loads(text)["cells"]) + "\n"
    return f"# {file}\n\n{_fenced(text, LANGUAGES.get(path.suffix, 'text'))}\n"


def _fenced(text: str, language: str) -> str:
    fence = "````"
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


def _cell(cell: Mapping[str, Any]) -> str:
    source = "".join(cell["source"])
    if cell["cell_type"] != "code":
        return source
    parts = [_fenced(source, "python")]
    for output in cell["outputs"]:
        picture = output.get("data", {}).get("image/png")
        shown = f"![what the cell draws](data:image/png;base64,{picture})"
        parts.append(shown if picture else _fenced("".join(output["text"]), "text"))
    return "\n\n".join(parts)
