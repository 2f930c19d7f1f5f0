"""What a user gets: a light import, a wheel and a source distribution that stand on their own."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

import megatron_policy

ROOT = Path(__file__).resolve().parent.parent.parent
START_LINE = "megatron_policy_nemo_rl.pth"
HEAVY = ("megatron", "ray", "torch", "transformers", "transformer_engine", "pydantic", "rich")


def python(code: str, *, cwd: Path, path: Path) -> str:
    """What a fresh interpreter prints that finds the package under `path`."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def loaded_by(code: str, cwd: Path) -> set[str]:
    report = f"import sys; print(*(name for name in {HEAVY!r} if name in sys.modules))"
    return set(python(f"{code}\n{report}", cwd=cwd, path=ROOT).splitlines()[-1].split())


def code_of(*arguments: str) -> str:
    """A program that runs a command, which has to succeed."""
    call = f"app({list(arguments)!r})"
    end = "except SystemExit as done:\n    assert not done.code, done.code\n"
    return f"from megatron_policy.cli import app\ntry:\n    {call}\n{end}"


def test_what_needs_nothing_heavy_imports_nothing_heavy(tmp_path: Path) -> None:
    assert loaded_by("import megatron_policy; dir(megatron_policy)", tmp_path) == set()
    parsing = "from megatron_policy import ConfigError, PolicyConfig"
    assert not loaded_by(parsing, tmp_path) & {"megatron", "ray", "transformers"}
    assert loaded_by(code_of("--help"), tmp_path) <= {"rich"}


@pytest.mark.nightly
@pytest.mark.skipif(
    not find_spec("transformers.utils.type_validators"),
    reason="this transformers checks configs without its models",
)
def test_a_plan_imports_no_model_of_transformers(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """More than its list of them, whose names the documentation of its configs reads: with some
    releases that brings torch._dynamo.
    """
    models = {"transformers.activations", "transformers.modeling_utils", "torch._dynamo"}
    report = f"import sys; print(*sorted({models!r} & set(sys.modules)))"
    listing = python(
        f"import transformers.models.auto.modeling_auto\n{report}", cwd=tmp_path, path=ROOT
    )
    model = str(checkpoint("qwen2", tied=True))
    code = (
        f"{code_of('plan', '--model', model, '--gpus', '1')}"
        "from transformers.utils import is_torch_available, import_utils\n"
        "assert is_torch_available() and import_utils.is_torch_available()\n"
        f"{report}"
    )
    assert python(code, cwd=tmp_path, path=ROOT).splitlines()[-1:] == listing.splitlines()


def test_every_reexported_name_is_there_and_no_other() -> None:
    pytest.importorskip("ray")
    for name in megatron_policy.__all__:
        value = getattr(megatron_policy, name)
        assert getattr(value, "__name__", name) == name
        assert name in dir(megatron_policy)
    with pytest.raises(AttributeError, match="'megatron_policy' has no attribute 'Polciy'"):
        megatron_policy.Polciy  # noqa: B018


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """All that is installed from, built from a copy so that the tree stays as it is."""
    tree = tmp_path_factory.mktemp("tree")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    ignore = shutil.ignore_patterns("__pycache__")
    for name in ("megatron_policy", "converters", "tests", "configs", "examples"):
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=ignore)
    built = tmp_path_factory.mktemp("dist")
    for name in ("editable", "bare"):
        (built / name).mkdir()
    code = (
        "import os\nfrom setuptools import build_meta as build\n"
        f"build.build_wheel({str(built)!r}); build.build_sdist({str(built)!r})\n"
        f"build.build_editable({str(built / 'editable')!r})\n"
        "os.environ['MEGATRON_POLICY_NO_START_LINE'] = '1'\n"
        f"build.build_editable({str(built / 'bare')!r})"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tree, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    places = {"wheel": "", "sdist": "", "editable": "editable", "bare": "bare"}
    found = {}
    for kind, place in places.items():
        (found[kind],) = (built / place).glob("*.tar.gz" if kind == "sdist" else "*.whl")
    return found


def sources() -> set[str]:
    """Every module of the package by its path in a wheel."""
    package, converters = (
        {path.relative_to(ROOT).as_posix() for path in (ROOT / name).rglob("*.py")}
        for name in ("megatron_policy", "converters")
    )
    return package | {f"megatron_policy/{path}" for path in converters}


def test_the_wheel_holds_one_package_with_every_module_and_the_converters(distributions) -> None:
    names = zipfile.ZipFile(distributions["wheel"]).namelist()
    assert len(names) == len(set(names))
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {
        "megatron_policy",
        START_LINE,
    }
    assert {name for name in names if name.endswith(".py")} == sources()
    assert "megatron_policy/converters/rows/kinds.py" in names
    assert "megatron_policy/py.typed" in names
    groups = (ROOT / "megatron_policy/hosts/verl/conf").rglob("*.yaml")
    files = {path.relative_to(ROOT).as_posix() for path in groups}
    assert len(files) == 5 and files < set(names)


def test_the_wheel_works_outside_the_repository(distributions, tmp_path: Path) -> None:
    installed, elsewhere = tmp_path / "installed", tmp_path / "elsewhere"
    elsewhere.mkdir()
    zipfile.ZipFile(distributions["wheel"]).extractall(installed)
    code = (
        "import megatron_policy, megatron_policy.cli\n"
        "from megatron_policy.converters import registry, rows\n"
        "from importlib.metadata import distribution\n"
        "print(megatron_policy.__file__, rows.__file__, registry.family_of('qwen2').name)\n"
        "print(distribution('megatron-policy').version)\n"
        "for point in distribution('megatron-policy').entry_points:\n"
        "    print(point.group, point.name, point.value, bool(point.load()))"
    )
    files, version, *points = python(code, cwd=elsewhere, path=installed).splitlines()
    package, rows, family = files.split()
    assert Path(package).is_relative_to(installed) and Path(rows).is_relative_to(installed)
    assert family == "qwen2"
    assert version == megatron_policy.__version__
    assert points == [
        "console_scripts megatron-policy megatron_policy.cli:app True",
        "megatron_policy.hosts nemo_rl megatron_policy.hosts.nemo_rl:backend True",
        "megatron_policy.hosts ray megatron_policy.hosts.own_driver:backend True",
        "nemo_rl.policy_backends megatron megatron_policy.hosts.nemo_rl:backend True",
        "verl.plugins megatron_policy megatron_policy.hosts.verl.plugin True",
        "vllm.general_plugins megatron_policy megatron_policy.inference.vllm:register True",
    ]


def test_the_line_that_a_python_runs_at_its_start_is_installed_unless_a_variable_says_no(
    distributions,
) -> None:
    for kind in ("wheel", "editable"):
        archive = zipfile.ZipFile(distributions[kind])
        line = archive.read(START_LINE).decode()
        assert line.startswith("import ") and line.count("\n") == 1
        (record,) = (name for name in archive.namelist() if name.endswith("/RECORD"))
        assert START_LINE in archive.read(record).decode(), "or it would outlive the package"
    assert START_LINE not in zipfile.ZipFile(distributions["bare"]).namelist()


def test_what_the_dockerfile_copies_is_there_and_not_ignored() -> None:
    ignored, *kept = [
        line
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line and not line.startswith(("#", "**"))
    ]
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    copied = [name for line in lines if line.startswith("COPY ") for name in line.split()[1:-1]]
    assert ignored == "*" and [f"!{name}" for name in copied] == kept
    assert all((ROOT / name).exists() for name in copied)


def test_the_version_is_the_one_that_the_changelog_and_the_citation_end_with() -> None:
    changes = re.findall(r"^## \[(.+?)\] - (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert changes[0] == (citation["version"], citation["date-released"])
    assert citation["version"] == megatron_policy.__version__


def test_the_source_distribution_builds_the_same_package(distributions) -> None:
    with tarfile.open(distributions["sdist"]) as archive:
        members = [m for m in archive.getmembers() if m.name.count("/") > 0]
    inside = {member.name.split("/", 1)[1] for member in members if member.isfile()}
    assert sources() | {"LICENSE", "README.md", "pyproject.toml", "setup.py"} <= inside
    assert not [member.name for member in members if member.issym() or member.islnk()]
