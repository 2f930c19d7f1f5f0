"""The house rules hold for this tree, and a tree that breaks one is reported."""

from __future__ import annotations

import re
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import grimp
import pytest
from importlinter.api import read_configuration
from importlinter.contracts.forbidden import ForbiddenContract
from importlinter.contracts.layers import LayersContract

from tests.floors import (
    PACKAGE,
    Imports,
    Module,
    check_circles,
    check_class_names,
    check_class_trees,
    check_files,
    check_fragments,
    check_guards,
    check_lengths,
    check_megatron_strings,
    check_names,
    check_private_names,
    check_pure_imports,
    check_swallowed_errors,
    package_modules,
)

ROOT = Path(__file__).resolve().parent.parent
CONTRACTS = read_configuration(str(ROOT / "pyproject.toml"))
KINDS = {"layers": LayersContract, "forbidden": ForbiddenContract}

modules_of_the_package = cache(lambda: package_modules(ROOT))


@cache
def graph() -> grimp.ImportGraph:
    return grimp.build_graph(PACKAGE, include_external_packages=True, cache_dir=None)


@pytest.mark.parametrize(
    "check",
    [
        check_megatron_strings,
        check_files,
        check_names,
        check_class_names,
        check_class_trees,
        check_guards,
        check_lengths,
        check_swallowed_errors,
    ],
)
def test_the_package_keeps_the_house_rules(check: Any) -> None:
    modules = modules_of_the_package()
    assert {"", "policy", "device", "converters.rows"} <= {module.name for module in modules}
    assert check(modules) == []


@pytest.mark.parametrize("check", [check_circles, check_pure_imports, check_fragments])
def test_the_packages_imports_keep_the_house_rules(check: Any) -> None:
    names = {f"{PACKAGE}.{module.name}".rstrip(".") for module in modules_of_the_package()}
    imports = {name: graph().find_modules_directly_imported_by(name) for name in names}
    assert check(modules_of_the_package(), imports) == []


@pytest.mark.parametrize("folder", ["examples", "benchmarks"])
def test_code_around_the_package_keeps_the_lengths(folder: str) -> None:
    modules = [
        Module("", path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))
        for path in sorted((ROOT / folder).rglob("*.py"))
    ]
    assert check_lengths(modules) + check_swallowed_errors(modules) == []


def test_private_names_that_tests_use_are_in_the_package() -> None:
    tests = [
        Module("", path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))
        for path in sorted((ROOT / "tests").rglob("*.py"))
    ]
    assert check_private_names(modules_of_the_package(), tests) == []


@pytest.mark.parametrize(
    ("use", "there"),
    [
        ("setattr(part, '_own', 1)", True),
        ("monkeypatch.setattr(part, '_gone', 1)", False),
        ("mock.patch.object(part, '_other', 1)", False),  # of another module
        ("setattr(Kind, '_other', 1)", True),  # it may be a base's
        ("setattr(part.Kind, '_other', 1)", True),
        ("setattr(part.Kind, '_gone', 1)", False),
        ("setattr(Kind, '_gone', 1)", False),
        ("mock.patch('megatron_policy.room.part._gone')", False),
        ("mock.patch('megatron_policy.room.part._own')", True),
        ("mock.patch('json._gone')", True),
        ("part._gone()", False),
        ("part.Kind(1)._own + json._gone + Kind.__name__", True),
    ],
)
def test_a_private_name_that_nothing_has_is_reported(use: str, there: bool) -> None:
    package = tree(room__part="class Kind:\n    _own = 1\n", other="def _other(): ...\n")
    imports = "import json\nfrom megatron_policy.room import part\nfrom megatron_policy.room.part"
    (user,) = tree(test=f"{imports} import Kind\n{use}\n")
    assert (check_private_names(package, [user]) == []) is there


def broken_by(importer: str, imported: str) -> set[str]:
    """The contracts of pyproject.toml that one import more breaks."""
    more = deepcopy(graph())
    for name in (importer, imported):
        if name not in more.modules:
            more.add_module(name)
    more.add_import(importer=importer, imported=imported)
    return {
        options["id"]
        for options in CONTRACTS["contracts_options"]
        if not KINDS[options["type"]](options["name"], CONTRACTS["session_options"], options)
        .check(deepcopy(more), verbose=False)
        .kept
    }


@pytest.mark.parametrize(
    ("importer", "imported", "contract"),
    [
        ("weights.load", "megatron_policy.policy.step", "floors"),
        ("parallel.topology", "megatron_policy.converters.registry", None),
        ("policy", "megatron_policy.errors", None),
        ("attic", "torch", "floors"),
        ("hosts.verl.check", "megatron_policy", "reexports"),
        ("converters.rows.blocks", "megatron_policy.converters.families.qwen2", "converters"),
        ("converters.mismatch", "megatron_policy.converters.registry", "converters"),
        ("converters.attic", "torch", "converters"),
        ("converters.formats.hf_files", "megatron_policy.converters.table", None),
        ("converters.formats.hf_files", "megatron_policy.converters", "converters-reexports"),
        ("policy", "megatron", "megatron"),
        ("engines.hugging_face", "transformer_engine", "megatron"),
        ("engines.megatron.build", "transformer_engine", None),
        ("engines.megatron", "megatron", None),
        ("policy", "ray", "ray"),
        ("workers.policy", "ray", None),
        ("hosts", "ray", None),
        ("workers.policy", "nemo_rl", "nemo-rl"),
        ("hosts.nemo_rl", "nemo_rl", None),
        ("lm_head.fused", "triton", "triton"),
        ("refit.deltas.codec", "numba", "numba"),
        ("cli", "matplotlib", "pictures"),
        ("cli", "PIL", "pictures"),
        ("refit.transports.ipc", "zmq", "zmq"),
        ("monitoring.summary", "wandb", "wandb"),
        ("monitoring.writers", "tensorboard", "nowhere"),
        ("weights.load", "converters", "nowhere"),
    ],
)
def test_an_import_outside_its_place_breaks_its_contract(
    importer: str, imported: str, contract: str | None
) -> None:
    assert broken_by(f"{PACKAGE}.{importer}", imported) == ({contract} if contract else set())


def test_imports_are_seen_however_they_are_written(tmp_path: Path, monkeypatch: Any) -> None:
    """A contract would not notice what its graph of imports leaves out."""
    forms = (
        "from house.policy import MegatronPolicy",
        "from house import policy",
        "import house.policy",
        "from ..policy import MegatronPolicy",
        "from .. import policy",
        "def late():\n    from ..policy import MegatronPolicy",
        "if TYPE_CHECKING:\n    from house.policy import MegatronPolicy",
    )
    sources = {"__init__": "", "policy": "", "weights/__init__": ""}
    sources |= {f"weights/w{number}": form for number, form in enumerate(forms)}
    (tmp_path / "house" / "weights").mkdir(parents=True)
    for name, source in sources.items():
        (tmp_path / "house" / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not {"exclude_type_checking_imports"} & CONTRACTS["session_options"].keys()
    seen = grimp.build_graph("house", include_external_packages=True, cache_dir=None)
    importers = seen.find_modules_that_directly_import("house.policy")
    assert importers == {f"house.weights.w{number}" for number in range(len(forms))}


def test_the_architecture_page_draws_the_floors_of_the_converters() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    picture = page.split("\n## Conversion\n")[1].split("```")[1].strip("\n").splitlines()
    drawn = [set(re.findall(r"(?:^|\s)(\w+)(?:/|\.py)", line)) for line in picture]
    (layers,) = (
        each["layers"] for each in CONTRACTS["contracts_options"] if each["id"] == "converters"
    )
    assert drawn == [set(layer.split(" : ")) for layer in layers]


def tree(**sources: str) -> list[Module]:
    """Modules of a package: keyword `a__b` is file a/b.py, `__init__` of a folder is a__INIT."""
    found = []
    for key, source in sources.items():
        path = key.replace("__", "/").replace("INIT", "__init__")
        name = path.removesuffix("__init__").strip("/").replace("/", ".")
        found.append(Module(name, f"{path}.py", source))
    return found


def importing(modules: list[Module], **targets: str) -> Imports:
    """Imports among these modules: `a__b="c.d torch"` if a.b imports c.d and torch."""
    own = {module.name: f"{PACKAGE}.{module.name}".rstrip(".") for module in modules}
    found: dict[str, set[str]] = {name: set() for name in own.values()}
    for key, names in targets.items():
        found[own[key.replace("__", ".")]] = {own.get(name, name) for name in names.split()}
    return found


@pytest.mark.parametrize(
    ("imports", "said"),
    [
        ({"refit__a": "refit.b", "refit__b": "refit.a"}, "files"),
        ({"refit": "refit.b", "refit__b": "refit"}, "files"),
        ({"refit__a": "refit.deep.x", "refit__deep__x": "refit.b"}, "folders"),
        ({"refit__a": "training.b", "training__d": "refit.c"}, "folders"),
        ({"refit__a": "refit.b errors", "refit__b": "errors", "refit": "refit.a"}, ""),
    ],
)
def test_a_circle_of_files_or_folders_is_reported(imports: dict[str, str], said: str) -> None:
    names = ("errors", "refit__a", "refit__b", "refit__c", "refit__INIT", "refit__deep__x")
    names += ("refit__deep__INIT", "training__b", "training__d", "training__INIT")
    modules = tree(**dict.fromkeys(names, ""))
    problems = check_circles(modules, importing(modules, **imports))
    assert [problem.split()[0] for problem in problems] == ([said] if said else [])


@pytest.mark.parametrize(
    ("where", "foreign", "fine"),
    [
        ("converters__rows", "safetensors", False),
        ("config", "transformers", False),
        ("config", "yaml pydantic difflib torch", True),
        ("converters__formats__hf_files", "safetensors transformers", True),
        ("policy", "transformers", True),
    ],
)
def test_what_only_computes_imports_few_packages(where: str, foreign: str, fine: bool) -> None:
    modules = tree(**{where: ""})
    problems = check_pure_imports(modules, importing(modules, **{where: foreign}))
    assert problems == [] if fine else "is pure, and imports" in problems[0]


@pytest.mark.parametrize(
    "source",
    [
        "m = importlib.import_module('megatron.core')",
        "m = __import__('megatron')",
        "found = find_spec(name='megatron.core')",
        "m = import_module(f'megatron.core.{name}')",
    ],
)
def test_a_string_that_names_megatron_outside_its_engine_is_reported(source) -> None:
    modules = tree(training__step=source, engines__megatron__build=source)
    (problem,) = check_megatron_strings(modules, {})
    assert problem.startswith("training/step.py:1: 'megatron")


def test_strings_that_do_not_name_megatron_and_excepted_ones_are_not_reported() -> None:
    source = '"""megatron.core"""\nx = "megatron_policy.policy", "no megatron.core"\nmegatron = 1'
    modules = tree(training__step=source, config__keys="backend = 'megatron'")
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
def test_a_pure_module_that_touches_files_or_programs_is_reported(source) -> None:
    modules = tree(packing__bins=source, training__step=source, config__file=source)
    (problem,) = check_files(modules, {"config.file": "the file of a configuration"})
    assert problem.startswith("packing/bins.py:")
    assert problem.endswith("in a pure module")


def test_names_of_files_that_are_only_computed_with_are_pure() -> None:
    source = "from pathlib import Path\ndef f(path):\n    return path.name.replace('a', 'open')"
    assert check_files(tree(packing__bins=source), {}) == []


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
def test_a_word_outside_its_place_is_reported(where, source) -> None:
    problems = check_names(tree(**{where: source}))
    assert problems and all(where.replace("__", "/") in problem for problem in problems)


def test_comments_docstrings_longer_names_and_the_device_are_free() -> None:
    modules = tree(
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
def test_what_is_too_long_is_reported_and_one_line_less_is_not(source, said) -> None:
    (problem,) = check_lengths(tree(policy=source))
    assert said in problem
    shorter = source[: source.rstrip("\n").rfind("\n") + 1] if source.strip() else source[1:]
    assert check_lengths(tree(policy=shorter)) == []


def test_a_class_that_is_more_than_three_is_reported_with_all_of_them() -> None:
    base = "class A: ...\nclass B(Generic[T]): ...\nclass C(device.A, B[int]): ...\n"
    assert check_class_trees(tree(batch=base, device="class D(ValueError): ..."), {}) == []
    modules = tree(batch=base, device="class D(batch.C, Protocol): ...")
    (problem,) = check_class_trees(modules, {})
    assert problem == "device.py:1: D is 4 classes: ['A', 'B', 'C', 'D']"


def test_two_classes_of_one_name_are_reported_but_not_protocols_or_private_ones() -> None:
    modules = tree(
        batch="class Part: ...\nclass _Own: ...\nclass Seen(Protocol): ...",
        device="class Seen(typing.Protocol): ...",
        version="class Seen(typing.Protocol[T]): ...",
        errors="class Part: ...\nclass _Own: ...\nclass Seen: ...",
    )
    (problem,) = check_class_names(modules, {})
    assert problem == "two classes Part: batch.py:1, errors.py:1"
    assert check_class_names(modules, {"Part": "for a reason"}) == []


def test_a_class_of_a_name_that_only_begins_like_protocol_is_none() -> None:
    modules = tree(batch="class A(ProtocolError): ...", errors="class A: ...")
    assert len(check_class_names(modules, {})) == 1


def test_a_short_file_with_one_importer_is_reported_unless_it_may_stand_alone() -> None:
    sources = {
        "INIT": "",
        "refit__INIT": "",
        "refit__whole": "\n" * 90,
        "refit__piece": "x = 1",
        "refit__shared": "y = 1",
        "refit__other": "\n" * 80,
        "refit__shape": "class Z(Protocol): ...",
        "refit__attribute": "class Y(typing.Protocol): ...",
        "converters__families__llama": "TABLE = ()",
    }
    modules = tree(**sources)
    imports = importing(
        modules, refit__whole="refit.piece refit.shared", refit__other="refit.shared"
    )
    (problem,) = check_fragments(modules, imports, {})
    assert problem.startswith("refit/piece.py: 0 lines, imported by refit.whole")
    assert check_fragments(modules, imports, {"refit.piece": "for a reason"}) == []


@pytest.mark.parametrize(("lines", "fragments"), [(79, 1), (80, 0)])
def test_a_fragment_has_fewer_than_80_lines(lines: int, fragments: int) -> None:
    modules = tree(refit__piece="\n" * lines)
    assert len(check_fragments(modules, importing(modules), {})) == fragments


def test_an_exception_that_excepts_nothing_is_reported() -> None:
    modules = tree(refit__piece="x = 1", refit__long="x = 1\n" * 80)
    for entry in ("refit.*", "refit.gone", "refit.long"):
        excepted = {"refit.piece": "for a reason", entry: "for a reason"}
        problems = check_fragments(modules, importing(modules), excepted)
        assert problems == [f"FRAGMENTS: {entry!r} excepts nothing"]
    modules = tree(batch="class Part: ...\nclass Once: ...", errors="class Part: ...")
    for entry in ("P*", "Gone", "Once"):
        problems = check_class_names(modules, {"Part": "for a reason", entry: "for a reason"})
        assert problems == [f"SAME_CLASS_NAME: {entry!r} excepts nothing"]
    modules = tree(config__keys="x = 1")
    (string,) = check_megatron_strings(modules, {("config.keys", "megatron"): "for a reason"})
    (file,) = check_files(modules, {"config.keys": "for a reason"})
    assert string == "NAMES_MEGATRON: ('config.keys', 'megatron') excepts nothing"
    assert file == "READS_FILES: 'config.keys' excepts nothing"


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
def test_a_handler_that_swallows_every_error_is_reported(handler: str) -> None:
    for body in ("pass", "...", "'why'", *(["continue"] if "*" not in handler else [])):
        source = f"for _ in x:\n    try:\n        x = 1\n    {handler}\n        {body}\n"
        assert len(check_swallowed_errors(tree(policy=source))) == 1, body


def test_a_program_that_starts_before_its_module_ends_is_reported() -> None:
    guard, rest = 'if __name__ == "__main__":\n    main()\n', "def main() -> None: ...\n"
    assert check_guards(tree(policy=rest + guard)) == []
    (said,) = check_guards(tree(policy=guard + rest))
    assert said.endswith(":1: a program's guard is its module's last statement")


@pytest.mark.parametrize("kind", ["Exception", "BaseException", "OSError, Exception"])
def test_a_suppression_of_every_error_is_reported(kind: str) -> None:
    for suppress in ("suppress", "contextlib.suppress"):
        source = f"with {suppress}({kind}):\n    x = 1\n"
        assert len(check_swallowed_errors(tree(policy=source))) == 1


@pytest.mark.parametrize(
    "source",
    [
        "try:\n    x = 1\nexcept (OSError, KeyError):\n    pass\n",
        "try:\n    x = 1\nexcept Exception:\n    log()\n",
        "try:\n    x = 1\nexcept Exception:\n    'why'\n    raise\n",
        "with contextlib.suppress(OSError):\n    x = 1\n",
    ],
)
def test_a_handler_of_some_errors_or_one_that_does_something_is_not(source: str) -> None:
    assert check_swallowed_errors(tree(policy=source)) == []


def test_the_link_to_the_converters_is_not_walked_twice(tmp_path: Path) -> None:
    for file in ("megatron_policy/__init__.py", "converters/rows.py"):
        (tmp_path / file).parent.mkdir()
        (tmp_path / file).touch()
    (tmp_path / "megatron_policy" / "converters").symlink_to("../converters")
    assert [module.name for module in package_modules(tmp_path)] == ["", "converters.rows"]
