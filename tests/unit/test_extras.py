"""Without the optional packages all else works, and what needs one says how to install it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
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
is_file = cache(Path.is_file)
NEEDS = {
    "from megatron_policy import Policy": 'pip install "ray>=2.40"',
    "from megatron_policy.workers import init_ray": 'pip install ".[ray]"',
    "import megatron_policy.refit.transports.ipc.transport": 'pip install "pyzmq>=26"',
}
"""What needs an optional package, and how its error says to install that."""

WITHOUT_EXTRAS = """
import sys
sys.modules |= dict.fromkeys({extras!r})
import torch
from megatron_policy import BatchedDataDict, MegatronPolicy
from megatron_policy.cli import app
from megatron_policy.errors import MissingPackageError
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
for line, wanted in {needs!r}.items():
    try:
        exec(line)
        sys.exit(line + " found what it needs")
    except MissingPackageError as error:
        assert wanted in str(error).splitlines()[-1], error
"""


@pytest.mark.parametrize("package", EXTRAS)
def test_an_extra_brings_what_its_error_tells_to_install(package: str) -> None:
    extra = EXTRAS[package]
    assert PROJECT["optional-dependencies"][extra.name] == [extra.requirement]
    bare = re.split(r"\W", extra.requirement)[0]
    assert not [line for line in PROJECT["dependencies"] if re.split(r"\W", line)[0] == bare]


@pytest.mark.nightly
def test_the_commands_and_a_policy_work_without_optional_packages_and_what_needs_one_names_it(
    checkpoint, tmp_path
) -> None:
    values = {"model": str(checkpoint("qwen2")), "target": str(tmp_path / "mcore")}
    code = WITHOUT_EXTRAS.format(extras=sorted(EXTRAS), needs=NEEDS, **values)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1:] == ["True"] and not done.returncode, done.stderr
    assert (tmp_path / "mcore").is_dir()


def test_a_package_that_lacks_one_of_its_own_keeps_its_error(tmp_path, monkeypatch) -> None:
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
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            called = ast.unparse(node)
            if called.startswith("require("):
                yield ast.literal_eval(called.removeprefix("require"))
        elif not isinstance(node, ast.FunctionDef) and not is_for_types(node):
            yield from imported_names(getattr(node, "body", []), package)


def is_for_types(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


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
    return {path for path in found if str(path) in NEED or is_file(path)}


def test_files_of_tests_import_without_an_optional_package_or_are_listed() -> None:
    needing: dict[str, set[str]] = {package: set() for package in NEED}
    for file in (ROOT / "tests").rglob("test_*.py"):
        reached, todo = {file}, [file]
        while todo:
            new = imported_files(todo.pop()) - reached
            todo.extend(path for path in new if is_file(path))
            reached |= new
        for package in NEED:
            if Path(package) in reached:
                needing[package].add(file.relative_to(ROOT / "tests").as_posix())
    for package, files in needing.items():
        assert not {file for file in files if not file.startswith(NEED[package])}
        assert not {each for each in NEED[package] if not any(f.startswith(each) for f in files)}
