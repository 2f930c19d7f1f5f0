"""The public interface is what tests/public_api.txt says: it changes on purpose only."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

from tests.public_api import FILE, MODULES, text

ROOT = Path(__file__).resolve().parents[2]


def test_names_signatures_entry_points_and_options_are_those_that_were_agreed() -> None:
    found, agreed = text().splitlines(), FILE.read_text(encoding="utf-8").splitlines()
    new = [line for line in found if line not in agreed]
    gone = [line for line in agreed if line not in found]
    assert found == agreed, (
        f"new: {new}, gone: {gone}. If that is meant, run `python -m tests.public_api` and say so "
        "in the change"
    )
    for option in (
        "--tp (default 1): Tensor-parallel ranks.",
        "--to (required): The format of DST.",
        "--dtype (default float32): Dtype that both models compute in.",
    ):
        assert f"    {option}" in found


IMPORT = re.compile(
    r"\bfrom (megatron_policy[\w.]*) import (\([^)]*\)|[^\n`;\"']+)"
    r"|\bimport (megatron_policy[\w.]*)"
)


def imports_in(written: str) -> Iterator[tuple[str, str | None]]:
    """(module, name) of every import of the package that a text writes; no name for `import`.

    A name that is a module is one.
    """
    for module, names, alone in IMPORT.findall(re.sub(r"#.*", "", written)):
        if alone:
            yield alone, None
        for name in re.findall(r"(\w+)(?: as \w+)?", names):
            if _is_module(f"{module}.{name}"):
                yield f"{module}.{name}", None
            else:
                yield module, name


def _is_module(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        return False
    return True


def unlisted(written: str) -> list[str]:
    """The imports of a text that the snapshot leaves out."""
    return [
        f"{module}: {name or 'the module'}"
        for module, name in imports_in(written)
        if module not in MODULES
        or (name and name not in (MODULES[module] or importlib.import_module(module).__all__))
    ]


def test_what_documents_and_examples_import_is_in_the_snapshot() -> None:
    folders = ((ROOT / "docs", "*.md"), (ROOT / "examples", "*.md"), (ROOT / "examples", "*.py"))
    files = [ROOT / "README.md", *(file for at, kind in folders for file in at.rglob(kind))]
    texts = {file.relative_to(ROOT).as_posix(): file.read_text("utf-8") for file in files}
    assert sum(len(list(imports_in(each))) for each in texts.values()) > 30
    missing = {name: found for name, each in texts.items() if (found := unlisted(each))}
    assert missing == {}, "add them to MODULES in tests/public_api.py"


def test_an_import_that_the_snapshot_leaves_out_is_found() -> None:
    for written, found in (
        ("from megatron_policy.errors import ConfigError", "megatron_policy.errors: ConfigError"),
        ("    from megatron_policy import errors", "megatron_policy.errors: the module"),
        ("import megatron_policy.errors as e", "megatron_policy.errors: the module"),
        ("write `from megatron_policy import Gone`.", "megatron_policy: Gone"),
        ("from megatron_policy import (\n    Gone,  # a\n    Policy,\n)", "megatron_policy: Gone"),
        ("python -c 'from megatron_policy import Gone'", "megatron_policy: Gone"),
    ):
        assert unlisted(written) == [found]
    written = "import megatron_policy\nfrom megatron_policy import Policy, device  # Gone\n"
    names = [("", None), ("", "Policy"), (".device", None)]
    assert list(imports_in(written)) == [(f"megatron_policy{name}", of) for name, of in names]
    assert unlisted(written) == []


def test_every_folder_says_what_lives_there_and_what_to_read_first() -> None:
    folders = (ROOT / "megatron_policy", ROOT / "converters")  # a walk does not follow the link
    for file in sorted(each for folder in folders for each in folder.rglob("__init__.py")):
        docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
        assert len(docstring) > 40, f"{file}: no docstring that says what lives here"
        if file.parent.name != "megatron_policy":
            assert "Read `" in " ".join(docstring.split()), (
                f"{file}: does not say what to read first"
            )
            for name in docstring.split("`")[1::2]:
                if name.endswith(".py"):
                    assert (file.parent / name).is_file(), f"{file}: there is no {name}"
