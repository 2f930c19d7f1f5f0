"""The floors hold for this tree, and a tree that breaks a rule is reported."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.floors import (
    CONVERTERS_FLOORS,
    Module,
    check_circles,
    check_class_names,
    check_converters,
    check_files,
    check_floors,
    check_foreign_imports,
    check_fragments,
    check_lengths,
    check_megatron_strings,
    check_names,
    check_swallowed_errors,
    package_modules,
)

ROOT = Path(__file__).resolve().parent.parent
CHECKS = (
    check_floors,
    check_converters,
    check_circles,
    check_foreign_imports,
    check_megatron_strings,
    check_files,
    check_names,
    check_class_names,
    check_fragments,
    check_lengths,
    check_swallowed_errors,
)


@cache
def modules_of_the_package() -> list[Module]:
    return package_modules(ROOT)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_package_keeps_the_house_rules(check) -> None:
    modules = modules_of_the_package()
    assert {"", "policy", "device", "converters.rows"} <= {module.name for module in modules}
    problems = check(modules)
    assert not problems, "\n" + "\n".join(problems)


@pytest.mark.parametrize("folder", ["examples", "benchmarks"])
def test_code_around_the_package_keeps_the_lengths(folder: str) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    modules = [
        Module("", path.relative_to(ROOT).as_posix(), source, ast.parse(source), False)
        for path in files
        for source in [path.read_text(encoding="utf-8")]
    ]
    assert check_lengths(modules) + check_swallowed_errors(modules) == []


def tree(root: Path, **sources: str) -> list[Module]:
    """A synthetic package: keyword `a__b` is file a/b.py, `__init__` of a folder is a__INIT."""
    for key, source in sources.items():
        inside = key.replace("__", "/").replace("INIT", "__init__") + ".py"
        path = root / (inside if inside.startswith("converters/") else f"megatron_policy/{inside}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return package_modules(root)


@pytest.mark.parametrize(
    "source",
    [
        "from megatron_policy.policy import MegatronPolicy",
        "from megatron_policy import policy",
        "import megatron_policy.policy",
        "from ..policy import MegatronPolicy",
        "from .. import policy",
        "def late():\n    from ..policy import MegatronPolicy",
        "if TYPE_CHECKING:\n    from megatron_policy.policy import MegatronPolicy",
    ],
)
def test_an_import_that_goes_up_is_reported_however_it_is_written(tmp_path, source) -> None:
    modules = tree(tmp_path, INIT="", policy="class MegatronPolicy: ...", weights__load=source)
    (problem,) = check_floors(modules)
    assert "weights/load.py" in problem
    assert "floor 2 imports 'policy' of floor 6" in problem


def test_imports_that_go_down_or_stay_are_not_reported(tmp_path) -> None:
    modules = tree(
        tmp_path,
        INIT="",
        errors="",
        weights__INIT="from .load import load",
        weights__load="from megatron_policy import errors\nfrom . import geometry",
        weights__geometry="from ..errors import ConfigError",
        converters__rows="import torch",
        converters__table="from .rows import Row\nfrom megatron_policy.converters import rows",
    )
    assert check_floors(modules) == []


def test_the_reexports_of_the_package_are_not_for_its_own_modules(tmp_path) -> None:
    modules = tree(tmp_path, INIT="", training__step="from megatron_policy import PolicyConfig")
    assert "floor 5 imports 'megatron_policy' of floor 9" in check_floors(modules)[0]


def test_an_import_of_a_module_that_does_not_exist_is_reported(tmp_path) -> None:
    (problem,) = check_floors(tree(tmp_path, INIT="", batch="from megatron_policy.gone import x"))
    assert "'megatron_policy.gone.x', which does not exist" in problem


def test_a_module_that_has_no_floor_is_named(tmp_path) -> None:
    (problem,) = check_floors(tree(tmp_path, INIT="", attic__old=""))
    assert "'attic.old'" in problem


@pytest.mark.parametrize(
    ("where", "source", "said"),
    [
        ("rows__blocks", "from megatron_policy.converters.families import qwen2", "1 of"),
        ("rows__blocks", "from ..families.qwen2 import QWEN2", "1 of"),
        ("architecture__rotary", "def f():\n    from ..rows import blocks", "0 of"),
        ("families__shared__dense", "from megatron_policy.converters import table", "2 of"),
        ("table", "from .formats.hf_files import HfFiles", "4 of"),
        ("mismatch", "if TYPE_CHECKING:\n    from .registry import Family", "3 of"),
    ],
)
def test_an_import_that_goes_up_inside_the_converters_is_reported(
    tmp_path, where, source, said
) -> None:
    names = ("rows__blocks", "families__qwen2", "table", "registry", "formats__hf_files")
    packages = ("", "rows__", "families__", "formats__")
    sources = {f"converters__{name}": "" for name in (*names, *(f"{p}INIT" for p in packages))}
    sources[f"converters__{where}"] = source
    (problem,) = check_converters(tree(tmp_path, **sources))
    assert problem.startswith(f"converters/{where.replace('__', '/')}.py:")
    assert f"floor {said} converters/ imports" in problem


def test_imports_that_go_down_or_stay_inside_the_converters_are_not_reported(tmp_path) -> None:
    modules = tree(
        tmp_path,
        converters__INIT="",
        converters__rows__blocks="from ..architecture import traits\nfrom . import kinds",
        converters__rows__kinds="from megatron_policy.errors import ConversionError",
        converters__architecture__traits="",
        converters__table="from .registry import Family",
        converters__registry="from .rows import blocks\nfrom .mismatch import compare",
        converters__mismatch="",
        converters__formats__hf_files="from ..table import Table",
        convert="from megatron_policy.converters.formats import hf_files",
        errors="",
    )
    assert check_converters(modules) == []


def test_a_module_of_the_converters_that_has_no_floor_is_named(tmp_path) -> None:
    (problem,) = check_converters(tree(tmp_path, converters__attic__old=""))
    assert problem.startswith("converters/attic/old.py: no floor")


def test_the_architecture_page_draws_the_floors_of_the_converters() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    picture = page.split("\n## Conversion\n")[1].split("```")[1].strip("\n").splitlines()
    drawn = [set(re.findall(r"(?:^|\s)(\w+)(?:/|\.py)", line)) for line in picture]
    assert drawn == [set(names) for _, names in reversed(CONVERTERS_FLOORS) if names != ("",)]


@pytest.mark.parametrize(
    ("sources", "said"),
    [
        (
            {"refit__a": "from . import b", "refit__b": "def f():\n    from .a import x"},
            "files import each other in a circle: refit.a, refit.b",
        ),
        (
            {
                "refit__a": "from megatron_policy.training.b import x",
                "refit__c": "",
                "training__b": "",
                "training__d": "if TYPE_CHECKING:\n    from megatron_policy.refit import c",
            },
            "folders import each other in a circle: refit, training",
        ),
    ],
    ids=["files", "folders"],
)
def test_a_circle_is_reported(tmp_path, sources, said) -> None:
    packages = {"refit__INIT": "", "training__INIT": ""}
    (problem,) = check_circles(tree(tmp_path, INIT="", **packages, **sources))
    assert problem == said


def test_what_only_goes_down_is_no_circle(tmp_path) -> None:
    modules = tree(
        tmp_path,
        INIT="from megatron_policy.refit.a import x",
        refit__INIT="",
        refit__a="from megatron_policy import errors\nfrom . import b",
        refit__b="from megatron_policy.errors import ConfigError",
        errors="",
    )
    assert check_circles(modules) == []


@pytest.mark.parametrize(
    ("where", "source"),
    [
        ("policy", "import ray"),
        ("training__step", "def late():\n    from ray.util import placement_group"),
        ("workers__group", "import nemo_rl"),
        ("policy", "from megatron.core import parallel_state"),
        ("converters__rows", "import megatron.core"),
        ("converters__rows", "import safetensors"),
        ("config", "from transformers import AutoConfig"),
        ("weights__load", "from converters.rows import Row"),
    ],
)
def test_a_foreign_import_outside_its_place_is_reported(tmp_path, where, source) -> None:
    (problem,) = check_foreign_imports(tree(tmp_path, **{where: source}))
    assert where.replace("__", "/") in problem


def test_foreign_imports_in_their_place_are_not_reported(tmp_path) -> None:
    modules = tree(
        tmp_path,
        workers__group="import ray",
        hosts__nemo_rl="import nemo_rl",
        engines__megatron__build="import megatron.core, transformer_engine",
        converters__formats__hf_files="import safetensors, transformers",
        config="import yaml, pydantic, difflib",
    )
    assert check_foreign_imports(modules) == []


@pytest.mark.parametrize(
    "source",
    [
        "m = importlib.import_module('megatron.core')",
        "m = __import__('megatron')",
        "found = find_spec(name='megatron.core')",
        "m = import_module(f'megatron.core.{name}')",
    ],
)
def test_a_string_that_names_megatron_outside_its_engine_is_reported(tmp_path, source) -> None:
    modules = tree(tmp_path, training__step=source, engines__megatron__build=source)
    (problem,) = check_megatron_strings(modules, {})
    assert problem.startswith("megatron_policy/training/step.py:1: 'megatron")


def test_strings_that_do_not_name_megatron_and_excepted_ones_are_not_reported(tmp_path) -> None:
    source = '"""megatron.core"""\nx = "megatron_policy.policy", "no megatron.core"\nmegatron = 1'
    modules = tree(tmp_path, training__step=source, config__keys="backend = 'megatron'")
    assert check_megatron_strings(modules, {("config.keys", "megatron"): "a value"}) == []


@pytest.mark.parametrize(
    "source",
    [
        "def f(path):\n    return open(path)",
        "def f(path):\n    return path.read_text()",
        "def f(path):\n    return torch.load(path)",
        "def f(path):\n    read = path.read_bytes",
        "from os import listdir",
        "import subprocess",
        "def f():\n    from subprocess import run",
        "def f():\n    os.system('true')",
    ],
)
def test_a_pure_module_that_touches_files_or_programs_is_reported(tmp_path, source) -> None:
    modules = tree(tmp_path, packing__bins=source, training__step=source, config__file=source)
    (problem,) = check_files(modules, {"config.file": "the file of a configuration"})
    assert problem.startswith("megatron_policy/packing/bins.py:")
    assert problem.endswith("in a pure module")


def test_names_of_files_that_are_only_computed_with_are_pure(tmp_path) -> None:
    source = "from pathlib import Path\ndef f(path):\n    return path.name.replace('a', 'open')"
    assert check_files(tree(tmp_path, packing__bins=source), {}) == []


@pytest.mark.parametrize(
    ("where", "source"),
    [
        ("weights__load", "import torch\nx = torch.cuda"),
        ("weights__load", "device = 'cuda:0'"),
        ("weights__load", "device = f'cuda:{rank}'"),
        ("training__step", "backend = 'nccl'"),
        ("training__step", "import torch.cuda"),
        ("training__step", "from torch import cuda"),
        ("training__step", "move(cuda=True)"),
        ("policy", "def cuda(): ..."),
        ("engines__megatron__build", "from megatron.core import parallel_state as ps"),
        ("engines__megatron__build", "from megatron.core.parallel_state import get_world_size"),
        ("config", "import os\nx = os.environ['A']"),
    ],
)
def test_a_word_outside_its_place_is_reported(tmp_path, where, source) -> None:
    problems = check_names(tree(tmp_path, **{where: source}))
    assert problems and all(where.replace("__", "/") in problem for problem in problems)


def test_comments_docstrings_longer_names_and_the_device_are_free(tmp_path) -> None:
    modules = tree(
        tmp_path,
        device__INIT="import torch\nx = torch.cuda, 'nccl'",
        engines__megatron__process_groups="from megatron.core import parallel_state",
        workers__worker='"""cuda"""\ndef move_to_cuda(model):\n    """nccl."""  # cuda\n',
    )
    assert check_names(modules) == []


def lines(count: int) -> str:
    return "".join(f"    x{number} = {number}\n" for number in range(count))


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("\n" * 401, "401 lines"),
        ("def long():\n" + lines(60), "long 61 lines"),
        ("async def long():\n" + lines(60), "long 61 lines"),
        ("class Long:\n" + lines(250), "Long 251 lines"),
    ],
)
def test_what_is_too_long_is_reported_and_one_line_less_is_not(tmp_path, source, said) -> None:
    (problem,) = check_lengths(tree(tmp_path, policy=source))
    assert said in problem
    shorter = source[: source.rstrip("\n").rfind("\n") + 1] if source.strip() else source[1:]
    assert check_lengths(tree(tmp_path, policy=shorter)) == []


def test_two_classes_of_one_name_are_reported_but_not_protocols_or_private_ones(tmp_path) -> None:
    modules = tree(
        tmp_path,
        batch="class Part: ...\nclass _Own: ...\nclass Seen(Protocol): ...",
        device="class Seen(typing.Protocol): ...",
        version="class Seen(typing.Protocol[T]): ...",
        errors="class Part: ...\nclass _Own: ...\nclass Seen: ...",
    )
    (problem,) = check_class_names(modules, {})
    assert problem == "two classes Part: megatron_policy/batch.py:1, megatron_policy/errors.py:1"
    assert check_class_names(modules, {"Part": "for a reason"}) == []


def test_a_class_of_a_name_that_only_begins_like_protocol_is_none(tmp_path) -> None:
    modules = tree(tmp_path, batch="class A(ProtocolError): ...", errors="class A: ...")
    assert len(check_class_names(modules, {})) == 1


def test_a_short_file_with_one_importer_is_reported_unless_it_may_stand_alone(tmp_path) -> None:
    modules = tree(
        tmp_path,
        INIT="from .refit.whole import f",
        refit__INIT="",
        refit__whole="from .piece import x\nfrom .shared import y\nfrom .shape import Z\n" * 30,
        refit__piece="x = 1",
        refit__shared="y = 1",
        refit__other="from .shared import y\n" * 80,
        refit__shape="class Z(Protocol): ...",
        refit__attribute="class Y(typing.Protocol): ...",
        converters__families__llama="TABLE = ()",
    )
    (problem,) = check_fragments(modules, {})
    assert problem.startswith("megatron_policy/refit/piece.py: 0 lines, imported by refit.whole")
    assert check_fragments(modules, {"refit.piece": "for a reason"}) == []


@pytest.mark.parametrize(("lines", "fragments"), [(79, 1), (80, 0)])
def test_a_fragment_has_fewer_than_80_lines(tmp_path, lines, fragments) -> None:
    modules = tree(tmp_path, refit__piece="\n" * lines)
    assert len(check_fragments(modules, {})) == fragments


@pytest.mark.parametrize("entry", ["refit.*", "refit.gone", "refit.long"])
def test_an_exception_that_excepts_no_fragment_is_reported(tmp_path, entry) -> None:
    modules = tree(tmp_path, refit__piece="x = 1", refit__long="x = 1\n" * 80)
    excepted = {"refit.piece": "for a reason", entry: "for a reason"}
    assert check_fragments(modules, excepted) == [f"FRAGMENTS: {entry!r} excepts nothing"]


@pytest.mark.parametrize("entry", ["P*", "Gone", "Once"])
def test_an_exception_that_excepts_no_class_is_reported(tmp_path, entry) -> None:
    modules = tree(tmp_path, batch="class Part: ...\nclass Once: ...", errors="class Part: ...")
    excepted = {"Part": "for a reason", entry: "for a reason"}
    assert check_class_names(modules, excepted) == [f"SAME_CLASS_NAME: {entry!r} excepts nothing"]


def test_an_exception_that_excepts_no_string_and_no_file_is_reported(tmp_path) -> None:
    modules = tree(tmp_path, config__keys="x = 1")
    (string,) = check_megatron_strings(modules, {("config.keys", "megatron"): "for a reason"})
    (file,) = check_files(modules, {"config.keys": "for a reason"})
    assert string == "NAMES_MEGATRON: ('config.keys', 'megatron') excepts nothing"
    assert file == "READS_FILES: 'config.keys' excepts nothing"


@pytest.mark.parametrize("body", ["pass", "continue", "...", "'why'"])
@pytest.mark.parametrize(
    "handler",
    [
        "except:",
        "except Exception:",
        "except BaseException:",
        "except (Exception, OSError):",
        "except (KeyError, (OSError, builtins.BaseException)) as error:",
        "except* Exception:",
    ],
)
def test_a_handler_that_swallows_every_error_is_reported(tmp_path, handler, body) -> None:
    if "*" in handler and body == "continue":
        body = "pass"  # Python itself refuses to leave such a handler
    source = f"for _ in x:\n    try:\n        x = 1\n    {handler}\n        {body}\n"
    assert len(check_swallowed_errors(tree(tmp_path, policy=source))) == 1


@pytest.mark.parametrize("kind", ["Exception", "BaseException", "OSError, Exception"])
@pytest.mark.parametrize("suppress", ["suppress", "contextlib.suppress"])
def test_a_suppression_of_every_error_is_reported(tmp_path, suppress, kind) -> None:
    source = f"with {suppress}({kind}):\n    x = 1\n"
    assert len(check_swallowed_errors(tree(tmp_path, policy=source))) == 1


@pytest.mark.parametrize(
    "source",
    [
        "try:\n    x = 1\nexcept (OSError, KeyError):\n    pass\n",
        "try:\n    x = 1\nexcept Exception:\n    log()\n",
        "try:\n    x = 1\nexcept Exception:\n    'why'\n    raise\n",
        "with contextlib.suppress(OSError):\n    x = 1\n",
    ],
)
def test_a_handler_of_some_errors_or_one_that_does_something_is_not(tmp_path, source) -> None:
    assert check_swallowed_errors(tree(tmp_path, policy=source)) == []


def test_the_link_to_the_converters_is_not_walked_twice(tmp_path) -> None:
    tree(tmp_path, INIT="", converters__rows="")
    (tmp_path / "megatron_policy" / "converters").symlink_to("../converters")
    assert [module.name for module in package_modules(tmp_path)] == ["", "converters.rows"]
