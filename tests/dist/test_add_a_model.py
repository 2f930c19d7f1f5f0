"""A family of an installed package: the one docs/add-a-model.md makes, and packages with faults."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import enum
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megatron_policy.cli import app
from megatron_policy.converters.architecture import Architecture, Attention, Mlp
from megatron_policy.converters.config_fields import rope_fields
from megatron_policy.converters.families.shared import dense, experts, mla, mtp, norm_rows
from megatron_policy.converters.registry import family_of
from megatron_policy.errors import ConversionError
from tests.dist.test_docs import python_blocks
from tests.dist.test_launch import ROOT
from tests.other_process import OtherProcess

DOCUMENT = "docs/add-a-model.md"


def blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", (ROOT / DOCUMENT).read_text(), re.DOTALL)


def install(project: Path, site: Path) -> None:
    """What pip does, without a network and without touching this environment."""
    command = f"{sys.executable} -m pip install --quiet --disable-pip-version-check --no-deps"
    options = ["--no-build-isolation", "--no-index", "--target", str(site), str(project)]
    done = subprocess.run([*command.split(), *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def package(folder: Path, name: str, source: str, entry: str) -> Path:
    """A project with one module that adds a family by the entry point."""
    pyproject, module = blocks("toml")[0], name.replace("-", "_")
    pyproject = pyproject.replace("helium-family", name).replace("helium_family", module)
    pyproject = re.sub(r"^helium = .*$", entry, pyproject, flags=re.MULTILINE)
    folder.mkdir(parents=True)
    (folder / "pyproject.toml").write_text(pyproject)
    (folder / f"{module}.py").write_text(source)
    return folder


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """Where the package of the document is installed."""
    folder = tmp_path_factory.mktemp("external")
    helium, _, dots, _ = python_blocks(DOCUMENT)
    _, both = blocks("toml")
    for name, source in (("helium", helium), ("dots", dots)):
        (entry,) = re.findall(rf"^\w+ = \"{name}_family:FAMILY\"$", both, re.MULTILINE)
        install(package(folder / name, f"{name}-family", source, entry), folder / "site")
        assert list((folder / "site").glob(f"{name}_family-*.dist-info/entry_points.txt"))
    return folder / "site"


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """A folder with the tiny checkpoints `helium` and `dots1` in it."""
    folder = tmp_path_factory.mktemp("checkpoints")
    _, *making = python_blocks(DOCUMENT)
    with contextlib.chdir(folder):
        for code in making[::2]:
            exec(compile(code, DOCUMENT, "exec"), {})
    return folder


EXPERT_ROWS = [
    f"model.layers.{{layer}}.mlp.{name}"
    for name in ("experts.{expert}.gate_proj", "gate.e_score_correction_bias", "shared_exp")
]


def run(
    commands: list[str], cwd: Path, *sites: Path, clean: bool = False
) -> dict[str, tuple[int, str, str]]:
    """Exit code, stdout and stderr of each command, with what is installed in `sites`; in a process
    that has imported nothing else if it is to be `clean`.
    """
    process = OtherProcess(clean=clean)
    try:
        process.begin(invoke, commands, cwd, [str(site) for site in sites])
        return process.result(timeout=600.0)
    finally:
        process.kill()


def invoke(commands: list[str], cwd: Path, sites: list[str]) -> dict[str, tuple[int, str, str]]:
    """What `run` says, one command after another in this process, which is for nothing else."""
    sys.path[:0] = sites
    os.chdir(cwd)
    results = {}
    for line in commands:
        result = CliRunner().invoke(app, line.split()[1:])
        fault = result.exception
        trace = "" if fault is None or isinstance(fault, SystemExit) else f"{fault!r}"
        results[line] = (result.exit_code, result.stdout, result.stderr + trace)
    return results


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("model", "first", "layers"),
    [("helium", "helium, 2 layers", 2), ("dots1", "dots1, 3 layers", 3)],
)
def test_the_documents_packages_inspect_convert_verify_and_compute_like_hf(
    site, models, model: str, first: str, layers: int
) -> None:
    """A dense family, and one with experts."""
    lines = re.findall(rf"^\$ (.+ {model}.*)$", "".join(blocks("console")), re.MULTILINE)
    commands = ["inspect", "convert", "convert", "verify", "parity"]
    assert [line.split()[1] for line in lines] == commands
    results = run(lines, models, site)
    assert [line for line, (code, _, _) in results.items() if code] == [], results
    inspected, *_, verified, parity = (results[line][1] for line in lines)
    shown, error = blocks("text")
    rows = [shown] if model == "helium" else EXPERT_ROWS
    assert [row for row in rows if row not in inspected] == []
    assert error.startswith("error: ") and "equal: " in verified
    head, _, *compared = parity.splitlines()
    assert head.startswith(f"{first}, tp 1 x pp 1, float32: 2 rows of 64 random tok")
    names = ["logits", "logprobs", *(f"layer {number}" for number in range(layers))]
    assert [line[:9].strip() for line in compared] == names
    assert all(float(line.split()[-4 if "log" in line else -3]) < 1e-4 for line in compared)


@pytest.mark.nightly
def test_a_row_that_is_left_out_is_named_as_the_document_says(models, tmp_path) -> None:
    source, *_ = python_blocks(DOCUMENT)
    start, end = source.index("    Qkv("), source.index(")\n\n\ndef ")
    lacking = source[:start] + source[end:]
    project = package(tmp_path / "project", "lacking", lacking, 'helium = "lacking:FAMILY"')
    install(project, tmp_path / "site")
    line = "megatron-policy inspect helium"
    code, out, said = run([line], models, tmp_path / "site", clean=True)[line]
    assert code == 1 and "no row of helium uses it" in out
    assert said.startswith(blocks("text")[1].strip()), said


def test_the_document_lists_every_attribute_of_a_model_and_its_parts_with_its_default() -> None:
    text = (ROOT / DOCUMENT).read_text()
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| .+ \|$", text, re.MULTILINE)
    listed = {name: default.strip("`") for name, default in rows}
    for field in (
        each for kind in (Attention, Mlp, Architecture) for each in dataclasses.fields(kind)
    ):
        default = field.default
        required = default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        said = str(default) if isinstance(default, enum.Enum) else repr(default)
        assert listed.pop(field.name) == ("none: has to be given" if required else said), field.name


def test_the_document_lists_every_set_of_rows_and_every_helper_of_families() -> None:
    text = (ROOT / DOCUMENT).read_text()
    listed = re.findall(r"`(\w+\.\w+)`", "".join(re.findall(r"^\| `.*? \|", text, re.MULTILINE)))
    for module in (dense, experts, mla, mtp, norm_rows, rope_fields):
        own = [
            name
            for node in ast.parse(inspect.getsource(module)).body
            for name in (
                [node.name]
                if isinstance(node, ast.FunctionDef | ast.ClassDef)
                else [ast.unparse(each) for each in getattr(node, "targets", ())]
            )
        ]
        shared = {name for name in own if name.isidentifier() and name[0] != "_" and len(name) > 1}
        found = {f"{module.__name__.rpartition('.')[2]}.{name}" for name in shared}
        assert found and sorted(found - {*listed, "dense.ACTIVATIONS", "rope_fields.KINDS"}) == []


def fake(site: Path, name: str, entries: str, source: str) -> None:
    """The traces that an installed package leaves."""
    info = site / f"{name}-2.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 2.1\n")
    (info / "entry_points.txt").write_text(f"[megatron_policy.models]\n{entries}\n")
    (site / f"{name}_family.py").write_text(source)


@pytest.mark.parametrize(
    ("model_type", "entry", "source", "said"),
    [
        ("new", "new = broken_family:FAMILY", "import not_installed", "ModuleNotFoundError: No mo"),
        ("new", "new = broken_family:FAMILY", "1 / 0", "cannot be imported: ZeroDivisionError"),
        ("new", "new = broken_family:FAMILY", "", "cannot be imported: AttributeError"),
        ("new", "new = broken_family:FAMILY", "FAMILY = {}", "is not a Family but a dict"),
        ("llama", "llama = broken_family:FAMILY", "", "has a built-in name"),
    ],
)
def test_a_package_with_a_fault_is_named_with_its_entry_point(
    tmp_path, monkeypatch, model_type: str, entry: str, source: str, said: str
) -> None:
    fake(tmp_path, "broken", entry, source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "broken_family", raising=False)
    with pytest.raises(ConversionError) as caught:
        family_of(model_type)
    message = str(caught.value)
    assert said in message and "\n" not in message
    assert f"entry point {entry} (megatron_policy.models) in package broken 2.1" in message
    assert family_of("qwen2").name == "qwen2"  # a broken package breaks nothing else
    monkeypatch.delitem(sys.modules, "broken_family", raising=False)


def test_two_packages_that_add_the_same_name_are_both_named(tmp_path, monkeypatch) -> None:
    for name in ("first", "second"):
        fake(tmp_path, name, f"new = {name}_family:FAMILY", "")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConversionError) as caught:
        family_of("new")
    assert "package first 2.1" in str(caught.value) and "package second 2.1" in str(caught.value)


def test_a_family_that_transformers_does_not_know_converts_from_its_bare_config(
    checkpoint, tmp_path
) -> None:
    """`take` has only what the file says; its own defaults fill in the rest."""
    source = (
        "from megatron_policy.converters.families import llama\n"
        "from megatron_policy.converters.registry import Family\n"
        "FAMILY = Family('homemade', llama.TABLE, llama.architecture, ('HomemadeForCausalLM',))\n"
    )
    fake(tmp_path / "site", "homemade", "homemade = homemade_family:FAMILY", source)
    shutil.copytree(checkpoint("llama"), tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    config |= {"model_type": "homemade", "architectures": ["HomemadeForCausalLM"]}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    words = ("inspect hf", "convert hf mcore --to mcore", "convert mcore again --to hf")
    commands = [f"megatron-policy {each}" for each in (*words, "verify hf again")]
    results = run(commands, tmp_path, tmp_path / "site")
    assert [line for line, (code, _, _) in results.items() if code] == [], results
    assert json.loads((tmp_path / "again" / "config.json").read_text()) == config
