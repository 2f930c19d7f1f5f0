"""Without the optional packages all else works, and what needs one says how to install it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

import megatron_policy
from megatron_policy import workers
from megatron_policy.errors import MissingPackageError
from megatron_policy.extras import EXTRAS, require
from tests.conftest import NEED

ROOT = Path(__file__).resolve().parent.parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LAZY = {each.__name__: each for each in (megatron_policy, workers)}
BLOCKED = f"import sys; sys.modules |= dict.fromkeys({sorted(EXTRAS)!r})\n"

WITHOUT_RAY = """
import torch
from megatron_policy import BatchedDataDict, MegatronPolicy
from megatron_policy.cli import app
from tests.losses import SequenceNLL
model, target = {model!r}, {target!r}
for call in (
    ["inspect", model],
    ["plan", "--model", model, "--gpus", "1"],
    ["convert", model, target, "--to", "mcore"],
):
    try:
        app(call)
    except SystemExit as ended:
        assert not ended.code, call
config = {{"model_name": model, "train_global_batch_size": 2, "train_micro_batch_size": 1}}
policy = MegatronPolicy(config | {{"megatron_cfg": {{"enabled": True}}}})
data = BatchedDataDict(
    input_ids=torch.randint(0, 50, (2, 8)), token_mask=torch.ones(2, 8), sample_mask=torch.ones(2)
)
print(policy.train(data, SequenceNLL())["loss"].item() > 0)
"""


def without_extras(code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a Python that has none of the optional packages."""
    return subprocess.run(
        [sys.executable, "-c", BLOCKED + code], cwd=ROOT, capture_output=True, text=True
    )


@pytest.mark.parametrize("package", EXTRAS)
def test_an_extra_brings_what_its_error_tells_to_install(package: str) -> None:
    extra = EXTRAS[package]
    assert PROJECT["optional-dependencies"][extra.name] == [extra.requirement]
    bare = re.split(r"\W", extra.requirement)[0]
    assert not [line for line in PROJECT["dependencies"] if re.split(r"\W", line)[0] == bare]


def test_the_commands_and_a_policy_of_one_process_work_without_ray_and_zmq(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    target = tmp_path / "mcore"
    done = without_extras(WITHOUT_RAY.format(model=str(checkpoint("qwen2")), target=str(target)))
    assert done.stdout.splitlines()[-1:] == ["True"], done.stderr
    assert target.is_dir()


@pytest.mark.dear
@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("from megatron_policy import Policy", 'pip install "ray>=2.40"'),
        ("from megatron_policy.workers import init_ray", 'pip install ".[ray]"'),
        ("import megatron_policy.refit.transports.ipc.transport", 'pip install "pyzmq>=26"'),
    ],
)
def test_what_needs_a_missing_package_names_the_pip_command(line: str, wanted: str) -> None:
    done = without_extras(line)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("megatron_policy.errors.MissingPackageError: ") and wanted in last


def test_a_package_that_lacks_one_of_its_own_keeps_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "zmq.py").write_text("import one_of_its_own\n")
    monkeypatch.delitem(sys.modules, "zmq", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="one_of_its_own") as caught:
        require("zmq")
    assert not isinstance(caught.value, MissingPackageError)


def imported_names(body: list[ast.stmt], package: tuple[str, ...]) -> Iterator[str]:
    """What importing a module of `package` with this body imports, as dotted names of modules or
    members.
    """
    for node in body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            home = ".".join([*above, *filter(None, [node.module])])
            yield from (f"{home}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Expr) and ast.unparse(node).startswith("require("):
            yield ast.literal_eval(ast.unparse(node).removeprefix("require"))
        elif (
            not isinstance(node, ast.FunctionDef) and "TYPE_CHECKING" not in ast.unparse(node)[:20]
        ):
            yield from imported_names(getattr(node, "body", []), package)


@cache
def imported_files(file: Path) -> set[Path]:
    """The files of this checkout that importing `file` imports itself; a package of `NEED` as a
    path of its name.
    """
    found: set[Path] = set()
    package = file.relative_to(ROOT).parent.parts
    for name in imported_names(ast.parse(file.read_text()).body, package):
        above, _, member = name.rpartition(".")
        if above in LAZY and member in LAZY[above]._HOME:
            name = f"{above}.{LAZY[above]._HOME[member]}"
        parts = name.split(".")
        paths = [ROOT.joinpath(*parts[:end]) for end in range(1, len(parts) + 1)]
        found |= {path / "__init__.py" for path in paths} | {Path(f"{path}.py") for path in paths}
        found.add(Path(parts[0]))
    return {path for path in found if str(path) in NEED or path.is_file()}


@pytest.mark.dear
@pytest.mark.parametrize("package", NEED)
def test_files_of_tests_import_without_an_optional_package_or_are_listed(package: str) -> None:
    needing = set()
    for file in (ROOT / "tests").rglob("test_*.py"):
        reached, todo = {file}, [file]
        while todo and Path(package) not in reached:
            new = imported_files(todo.pop()) - reached
            todo.extend(path for path in new if path.is_file())
            reached |= new
        if Path(package) in reached:
            needing.add(file.relative_to(ROOT / "tests").as_posix())
    assert not {file for file in needing if not file.startswith(NEED[package])}
    assert not {each for each in NEED[package] if not any(f.startswith(each) for f in needing)}
