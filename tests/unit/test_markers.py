"""The GPU markers: a test that asks for more GPUs than there are is skipped, and says so."""

from __future__ import annotations

import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


ASKING = """
import pytest

@pytest.mark.multi_gpu(1000)
def test_that_asks_for_a_thousand():
    raise AssertionError("ran all the same")

def test_that_asks_for_none():
    pass
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True)


@pytest.mark.nightly
def test_a_test_that_asks_for_more_gpus_than_there_are_is_skipped_with_the_reason(
    tmp_path: Path,
) -> None:
    asking = tmp_path / "test_asking.py"
    asking.write_text(ASKING)
    options = ["-c", "pyproject.toml", "-p", "tests.conftest", "-p", "no:cacheprovider"]
    done = run("-m", "pytest", *options, str(asking))
    assert "1 passed, 1 skipped" in done.stdout, done.stdout + done.stderr
    assert "needs 1000 GPU(s), " in done.stdout


def test_no_folder_of_tests_is_left_out(pytestconfig: pytest.Config) -> None:
    """pytest's own default skips a folder named `dist`, silently."""
    folders = [p for p in (pytestconfig.rootpath / "tests").rglob("*") if p.is_dir()]
    names = {p.name for p in folders if p.name != "__pycache__"}
    assert {"dist", "unit", "ray", "gpu"} <= names
    skipped = pytestconfig.getini("norecursedirs")
    assert not [n for n in names for pattern in skipped if fnmatch(n, pattern)]


@pytest.mark.nightly
def test_files_of_tests_that_only_compute_import_no_framework() -> None:
    """Below a function, `tests/pure/conftest.py` notices."""
    code = (
        "import sys, importlib, pathlib, tests.conftest\n"
        "from tests.pure.conftest import SLOW\n"
        "for path in sorted(pathlib.Path('tests/pure').glob('test_*.py')):\n"
        "    importlib.import_module(f'tests.pure.{path.stem}')\n"
        "    found = [name for name in SLOW if name in sys.modules]\n"
        "    assert not found, f'{path} imports {found}'\n"
    )
    done = run("-c", code)
    assert done.returncode == 0, done.stderr
