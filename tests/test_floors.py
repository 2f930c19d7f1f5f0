"""The floors hold for this tree, and a tree that breaks a rule is reported."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.floors import (
    Module,
    check_circles,
    check_class_names,
    check_floors,
    check_foreign_imports,
    check_fragments,
    check_lengths,
    check_names,
    check_swallowed_errors,
    package_modules,
)

ROOT = Path(__file__).resolve().parent.parent
CHECKS = (
    check_floors,
    check_circles,
    check_foreign_imports,
    check_names,
    check_class_names,
    check_fragments,
    check_lengths,
    check_swallowed_errors,
)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_package_keeps_the_house_rules(check) -> None:
    modules = package_modules(ROOT)
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
        errors="class Part: ...\nclass _Own: ...\nclass Seen: ...",
    )
    (problem,) = check_class_names(modules)
    assert problem == "two classes Part: megatron_policy/batch.py:1, megatron_policy/errors.py:1"


def test_a_short_file_with_one_importer_is_reported_unless_it_may_stand_alone(tmp_path) -> None:
    modules = tree(
        tmp_path,
        INIT="from .refit.whole import f",
        refit__INIT="",
        refit__whole="from .piece import x\nfrom .shared import y\nfrom .shape import Z\n" * 30,
        refit__piece="x = 1",
        refit__shared="y = 1",
        refit__other="from .shared import y\n" * 61,
        refit__shape="class Z(Protocol): ...",
        converters__families__llama="TABLE = ()",
    )
    (problem,) = check_fragments(modules)
    assert problem.startswith("megatron_policy/refit/piece.py: 0 lines, imported by refit.whole")


@pytest.mark.parametrize("handler", ["except:", "except Exception:", "except BaseException:"])
def test_a_handler_that_swallows_every_error_is_reported(tmp_path, handler) -> None:
    modules = tree(tmp_path, policy=f"try:\n    x = 1\n{handler}\n    pass\n")
    assert len(check_swallowed_errors(modules)) == 1


def test_the_link_to_the_converters_is_not_walked_twice(tmp_path) -> None:
    tree(tmp_path, INIT="", converters__rows="")
    (tmp_path / "megatron_policy" / "converters").symlink_to("../converters")
    assert [module.name for module in package_modules(tmp_path)] == ["", "converters.rows"]
