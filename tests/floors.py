"""The house rules that import-linter's contracts in pyproject.toml cannot say: circles of files and
folders, what pure modules touch, words in their places, lengths, fragments, swallowed errors.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import TypeVar

PACKAGE = "megatron_policy"
Key = TypeVar("Key", str, tuple[str, str])

Imports = Mapping[str, Collection[str]]
"""What each module of the package imports, by absolute names."""

# Values and arithmetic: no files, no environment, and of foreign packages only PURE_IMPORTS. A
# contract of import-linter would have to list all others, which nobody knows beforehand.
PURE = ("adapters*", "batch", "errors", "version", "config*", "converters*", "estimate*")
PURE += (
    "interfaces*",
    "lm_head*",
    "packing*",
    "parallel*",
    "recurrence*",
    "refit.comparison",
    "refit.manifest",
    "refit.plan",
    "refit.planning",
    "refit.probe",
    "weights.geometry",
)
PURE_IMPORTS = sys.stdlib_module_names | {PACKAGE, "torch", "triton", "numpy", "pydantic", "yaml"}
PURE_FORBIDS = ("environ", "getenv")
PURE_FORBIDS_IMPORTS = ("mmap", "shutil", "socket", "subprocess", "tempfile")
FILE_NAMES = {"open", "fdopen", "fsync", "mkdir", "rmdir", "unlink", "touch", "stat", "exists"}
FILE_NAMES |= {"read_text", "read_bytes", "write_text", "write_bytes", "is_file", "is_dir"}
FILE_NAMES |= {"iterdir", "listdir", "scandir", "glob", "rglob", "system", "popen"}
FILE_CALLS = ("torch.load", "torch.save", "np.load", "np.save", "numpy.load", "numpy.save")
READS_FILES = {
    "adapters.opening": "a training checkpoint's files that describe adapters",
    "adapters.peft_files": "the files of an adapter's directory",
    "config.composed": "the files of a configuration, with their limits, and OmegaConf",
    "converters.files.contained": "files inside one directory",
    "converters.files.locking": "locks are files",
    "converters.files.publishing": "directories written next to their final name",
    "converters.files.raw_files": "bytes to the disk",
    "converters.formats.dist_files": "the directory of a torch_dist checkpoint",
    "converters.formats.dist_metadata": "its metadata file",
    "converters.formats.dist_records": "the records in its data files",
    "converters.formats.dist_writing": "writes such a directory",
    "converters.formats.hf_config": "config.json, which transformers completes",
    "converters.formats.hf_files": "the safetensors files of a directory",
    "converters.formats.hf_location": "a directory, or a model of the hub",
    "converters.formats.hf_writing": "writes such a directory",
    "converters.formats.side_files": "its other files, and transformers' tokenizers",
}

MEGATRON = ("engines.megatron", "engines.megatron.*")
# Strings outside MEGATRON that name it, as those do that are imported by name.
NAMES_MEGATRON = {
    ("cli.report", "megatron"): "the logger that a command silences",
    ("config.classify", "megatron"): "a value of the host's key for its backend",
    ("monitoring.library_warnings", "megatron"): "a package whose warnings are collected",
    ("hosts.nemo_rl.redirect", "megatron"): "a value of MEGATRON_POLICY_WORKERS",
    ("hosts.verl.plugin", "megatron"): "a value of MEGATRON_POLICY_VERL, and verl's name",
    ("hosts.verl.check", "megatron"): "verl's name of an engine, and of its section",
    ("converters.formats.dist_metadata", "megatron"): "a package that older files pickled",
    ("device.process_groups", "megatron"): "a package whose objects are parts of an engine",
    ("device.random_states", "megatron."): "a prefix fixed by existing files",
}

# Words that only these modules may hold, as a name or in a string; comments and docstrings may.
DEVICE = ("device", "device.*", "engines.megatron.cpu_platform")
NAME_ONLY_IN: dict[str, tuple[str, ...]] = {
    "cuda": DEVICE,
    "nccl": DEVICE,
    "parallel_state": ("engines.megatron.process_groups",),
}
FILE_LINES, FUNCTION_LINES, CLASS_LINES = 400, 60, 250
CLASS_TREE = 3
LARGER_TREES = {
    "Halves": "a replicated row whose elements are in another order",
    "Reshaped": "a replicated row whose tensor has other dimensions",
    "TowerQkv": "a replicated row whose tensor has two others too",
}

# Public classes of one name in two modules, each with its reason; Protocols may have it.
SAME_CLASS_NAME: dict[str, str] = {}

# A file of fewer than 80 lines with one importer belongs into that importer. Families, Protocols,
# packages and programs stand alone, and so does what is named here, each with its reason.
FRAGMENT_LINES = 80
_LONG = "one subject, and its importer has at least the 150 to 250 lines that a file aims at"
FRAGMENTS = {
    "hosts.nemo_rl.autoload": "loaded by a .pth file when Python starts",
    "hosts.nemo_rl.not_implemented": _LONG,
    "hosts.own_driver": "loaded by its entry point",
    "hosts.verl.config": "loaded by the name that verl's users give",
    "hosts.verl.plugin": "loaded by its entry point",
    "recurrence.context_parallel": _LONG,
}


@dataclass(frozen=True)
class Module:
    """One source file: its `name` inside the package, its `path` relative to the root."""

    name: str
    path: str
    source: str

    @property
    def is_package(self) -> bool:
        return self.path.endswith("__init__.py")

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes of its syntax tree, from above."""
        return list(ast.walk(self.tree))

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source, self.path)


def is_pure(name: str) -> bool:
    """Whether a module only computes."""
    return _matches(name, PURE) and name not in READS_FILES


def package_modules(root: Path) -> list[Module]:
    """Every module of the package under `root`; converters/ stands outside it and belongs to it."""
    return [
        *_modules(root, root / PACKAGE, ""),
        *_modules(root, root / "converters", "converters"),
    ]


def _modules(root: Path, folder: Path, prefix: str) -> Iterator[Module]:
    for directory, folders, files in os.walk(folder):  # does not follow the link
        folders[:] = sorted(set(folders) - {"__pycache__"})
        for file in sorted(files):
            if file.endswith(".py"):
                path = Path(directory, file)
                parts = [*prefix.split("."), *path.relative_to(folder).with_suffix("").parts]
                is_package = parts[-1] == "__init__"
                name = ".".join(part for part in parts[: -1 if is_package else None] if part)
                source = path.read_text(encoding="utf-8")
                yield Module(name, path.relative_to(root).as_posix(), source)


def check_circles(modules: list[Module], imports: Imports) -> list[str]:
    """A circle of files, and one of folders. import-linter's `acyclic_siblings` does not see one
    through a package's `__init__`, or of a folder with the one that it is in.
    """
    packages = {_absolute(module.name) for module in modules if module.is_package}
    files: dict[str, set[str]] = {}
    folders: dict[str, set[str]] = {}
    for module in modules:
        if not module.name:
            continue  # the re-exports: a contract says who leans on them
        name = _absolute(module.name)
        files[name] = {each for each in imports[name] if each.startswith(f"{PACKAGE}.")}
        ours = _folder(name, packages)
        theirs = {_folder(each, packages) for each in files[name]}
        folders.setdefault(ours, set()).update(theirs - {ours})
    problems = []
    for what, edges in (("files", files), ("folders", folders)):
        try:
            TopologicalSorter(edges).prepare()
        except CycleError as error:
            problems.append(f"{what} import each other in a circle: {' <- '.join(error.args[1])}")
    return problems


def _absolute(name: str) -> str:
    return f"{PACKAGE}.{name}" if name else PACKAGE


def _folder(name: str, packages: set[str]) -> str:
    """The folder of a module; a module at the top stands for itself."""
    folder = name.rpartition(".")[0]
    return name if name in packages or folder == PACKAGE else folder


def check_pure_imports(modules: list[Module], imports: Imports) -> list[str]:
    """Foreign packages in modules that only compute."""
    return [
        f"{module.path}: {module.name} is pure, and imports {name}"
        for module in modules
        for name in sorted(imports[_absolute(module.name)])
        if is_pure(module.name) and name.partition(".")[0] not in PURE_IMPORTS
    ]


def check_megatron_strings(
    modules: list[Module], excepted: Mapping[tuple[str, str], str] = NAMES_MEGATRON
) -> list[str]:
    """Strings that are `megatron` or begin with `megatron.`: what is imported by name."""
    found = {
        (module.name, text): f"{module.path}:{line}: {text!r} names megatron"
        for module in modules
        if not _matches(module.name, MEGATRON)
        for line, text in _strings(module)
        if f"{text}.".startswith("megatron.")
    }
    return _without(found, excepted, "NAMES_MEGATRON")


def check_files(modules: list[Module], excepted: Mapping[str, str] = READS_FILES) -> list[str]:
    """Pure modules that open or look for files, or that start programs."""
    found = {
        module.name: f"{module.path}:{line}: {what} in a pure module"
        for module in modules
        if _matches(module.name, PURE)
        for line, what in _file_accesses(module)
    }
    return _without(found, excepted, "READS_FILES")


def _file_accesses(module: Module) -> Iterator[tuple[int, str]]:
    for node in module.nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            above = ""
            if isinstance(node, ast.ImportFrom):
                above = f"{'.' * node.level}{node.module or ''}."
            for target in (f"{above}{alias.name}" for alias in node.names):
                top, _, last = target.rpartition(".")
                if target.split(".")[0] in PURE_FORBIDS_IMPORTS or (top and last in FILE_NAMES):
                    yield node.lineno, target
        elif isinstance(node, ast.Attribute):
            called = ast.unparse(node) if node.attr in {*FILE_NAMES, "load", "save"} else ""
            if node.attr in FILE_NAMES or called in FILE_CALLS:
                yield node.lineno, called
        elif isinstance(node, ast.Name) and node.id == "open":
            yield node.lineno, node.id


def check_names(modules: list[Module]) -> list[str]:
    """Words that stand, as a name or in a string, where they may not."""
    problems = []
    sought = re.compile("|".join((*NAME_ONLY_IN, *PURE_FORBIDS)))
    for module in modules:
        for line, text in _texts(module) if sought.search(module.source) else ():
            for word in set(re.findall(r"\w+", text)):
                allowed = NAME_ONLY_IN.get(word)
                if allowed is not None and not _matches(module.name, allowed):
                    problems.append(f"{module.path}:{line}: {word!r} only in {_listed(allowed)}")
                if word in PURE_FORBIDS and is_pure(module.name):
                    problems.append(f"{module.path}:{line}: {word!r} in a pure module")
    return problems


def check_private_names(modules: list[Module], others: list[Module]) -> list[str]:
    """Private names of the package that `others` read or replace, and that it does not have: those
    of a module that is imported by name are looked for there, all others in every module.
    """
    own = {f"{PACKAGE}.{module.name}": _list_private_names(module) for module in modules}
    every, problems = {"_asdict", "_fields", "_make", "_replace"}.union(*own.values()), []
    for other in (each for each in others if re.search(r"""[."']_[a-z]""", each.source)):
        imported = {PACKAGE: every} | {
            each.asname or each.name: own.get(f"{node.module}.{each.name}", every)
            for node in other.nodes
            if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith(f"{PACKAGE}.")
            for each in node.names
        }
        for node in other.nodes:
            for owner, name in _private_uses(node):
                first = re.split(r"\W", owner)[0]
                known = imported.get(first, {name})
                if name not in (known if owner == first else known | every):
                    problems.append(f"{other.path}:{node.lineno}: the package has no {name}")
    return problems


def _private_uses(node: ast.AST) -> Iterator[tuple[str, str]]:
    """The owner and the name of what is read, or replaced as in `setattr(owner, "name", value)` and
    `patch("owner.name")`, if the name is private.
    """
    if isinstance(node, ast.Attribute) and _is_private(node.attr):
        yield ast.unparse(node.value), node.attr
    elif isinstance(node, ast.Call):
        first, second = (*node.args, None, None)[:2]
        for text in (first, second):
            if isinstance(text, ast.Constant) and isinstance(text.value, str):
                owner, _, name = text.value.rpartition(".")
                if _is_private(name):
                    yield owner if text is first else ast.unparse(first), name


def _list_private_names(module: Module) -> set[str]:
    fields = ("name", "asname", "attr", "id", "arg")
    found = {getattr(node, field, None) for node in module.nodes for field in fields}
    return {each for each in found if isinstance(each, str) and _is_private(each)}


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and not name.endswith("_")


def check_lengths(modules: list[Module]) -> list[str]:
    """Files, functions and classes over the hard limits."""
    problems = []
    for module in modules:
        lines = module.source.count("\n")
        if lines > FILE_LINES:
            problems.append(f"{module.path}: {lines} lines, at most {FILE_LINES}")
        for node in module.nodes:
            limit = _limit_of(node)
            if limit is not None:
                assert isinstance(node, ast.stmt) and node.end_lineno is not None
                length = node.end_lineno - node.lineno + 1
                if length > limit:
                    what = f"{module.path}:{node.lineno}: {getattr(node, 'name', '')}"
                    problems.append(f"{what} {length} lines, at most {limit}")
    return problems


def check_class_trees(
    modules: list[Module], excepted: Mapping[str, str] = LARGER_TREES
) -> list[str]:
    """Classes that with all that they inherit from in this package are more than three: what they
    do is better told by parts that they have.
    """
    classes = {
        node.name: (module.path, node)
        for module in modules
        for node in module.nodes
        if isinstance(node, ast.ClassDef)
    }
    found = {}
    for name, (path, node) in classes.items():
        tree, left = {name}, [node]
        while left:
            for base in left.pop().bases:
                inherited = ast.unparse(base).partition("[")[0].rpartition(".")[2]
                if inherited in classes and inherited not in tree:
                    tree.add(inherited)
                    left.append(classes[inherited][1])
        if len(tree) > CLASS_TREE:
            found[name] = f"{path}:{node.lineno}: {name} is {len(tree)} classes: {sorted(tree)}"
    return _without(found, excepted, "LARGER_TREES")


def check_class_names(
    modules: list[Module], excepted: Mapping[str, str] = SAME_CLASS_NAME
) -> list[str]:
    """Public classes that share their name with another, Protocols left out."""
    places: dict[str, list[str]] = {}
    for module in modules:
        for node in module.nodes:
            if not isinstance(node, ast.ClassDef) or node.name.startswith("_"):
                continue
            if not _is_protocol(node):
                places.setdefault(node.name, []).append(f"{module.path}:{node.lineno}")
    found = {
        name: f"two classes {name}: {', '.join(each)}"
        for name, each in sorted(places.items())
        if len(each) > 1
    }
    return _without(found, excepted, "SAME_CLASS_NAME")


def check_fragments(
    modules: list[Module], imports: Imports, excepted: Mapping[str, str] = FRAGMENTS
) -> list[str]:
    """Short files with at most one importer, which belong into it."""
    importers: dict[str, set[str]] = {}
    for module in modules:
        for name in imports[_absolute(module.name)] if module.name else ():
            importers.setdefault(name.removeprefix(f"{PACKAGE}."), set()).add(module.name)
    found = {
        module.name: f"{module.path}: {module.source.count(chr(10))} lines, imported by "
        f"{', '.join(importers.get(module.name, ())) or 'nobody'}: they belong into one file"
        for module in modules
        if module.source.count("\n") < FRAGMENT_LINES
        and len(importers.get(module.name, ())) <= 1
        and not _stands_alone(module)
    }
    return _without(found, excepted, "FRAGMENTS")


def _without(found: Mapping[Key, str], excepted: Collection[Key], table: str) -> list[str]:
    """The problems that `table` does not except, and each of its entries that excepts none."""
    return [
        *(text for key, text in found.items() if key not in excepted),
        *(f"{table}: {key!r} excepts nothing" for key in excepted if key not in found),
    ]


def _stands_alone(module: Module) -> bool:
    """Packages, programs, families, and modules of nothing but Protocols."""
    if module.is_package or "." not in module.name or module.name.endswith("__main__"):
        return True
    if module.name.startswith("converters.families."):
        return True
    defined = [
        node for node in module.tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))
    ]
    return bool(defined) and all(
        isinstance(node, ast.ClassDef) and _is_protocol(node) for node in defined
    )


def _is_protocol(node: ast.ClassDef) -> bool:
    """Whether it has Protocol among its bases, under whatever prefix and with whatever types."""
    bases = (ast.unparse(base).partition("[")[0] for base in node.bases)
    return any(base.rpartition(".")[2] == "Protocol" for base in bases)


def check_swallowed_errors(modules: list[Module]) -> list[str]:
    """Handlers of everything that do nothing."""
    return [
        f"{module.path}:{node.lineno}: swallows every error"
        for module in modules
        for node in module.nodes
        if (
            isinstance(node, ast.ExceptHandler)
            and (node.type is None or _is_everything(node.type))
            and all(_does_nothing(step) for step in node.body)
        )
        or (
            isinstance(node, ast.Call)
            and getattr(node.func, "attr", getattr(node.func, "id", "")) == "suppress"
            and any(_is_everything(kind) for kind in node.args)
        )
    ]


def check_guards(modules: list[Module]) -> list[str]:
    """Modules that go on after what they do as programs: it would not find what follows."""
    return [
        f"{module.path}:{node.lineno}: a program's guard is its module's last statement"
        for module in modules
        for node in module.tree.body[:-1]
        if isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"
    ]


def _is_everything(kind: ast.expr) -> bool:
    """Whether an expression of `except` is Exception or BaseException, or a tuple with one."""
    if isinstance(kind, ast.Tuple):
        return any(_is_everything(each) for each in kind.elts)
    return ast.unparse(kind).rpartition(".")[2] in ("Exception", "BaseException")


def _does_nothing(step: ast.stmt) -> bool:
    constant = isinstance(step, ast.Expr) and isinstance(step.value, ast.Constant)
    return constant or isinstance(step, (ast.Pass, ast.Continue))


def _limit_of(node: ast.AST) -> int | None:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return FUNCTION_LINES
    return CLASS_LINES if isinstance(node, ast.ClassDef) else None


def _documentation(module: Module) -> set[int]:
    """The ids of bare string statements."""
    return {
        id(node.value)
        for node in module.nodes
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }


def _strings(module: Module) -> Iterator[tuple[int, str]]:
    """(line, text) of every string except documentation."""
    documentation = _documentation(module)
    for node in module.nodes:
        if not isinstance(node, ast.Constant) or id(node) in documentation:
            continue
        if isinstance(node.value, str):
            yield node.lineno, node.value


def _texts(module: Module) -> Iterator[tuple[int, str]]:
    """(line, text) of every identifier and string except documentation."""
    documentation = _documentation(module)
    line = 1
    for node in module.nodes:
        line = getattr(node, "lineno", line)
        if id(node) in documentation:
            continue
        for _, value in ast.iter_fields(node):
            for text in value if isinstance(value, list) else [value]:
                if isinstance(text, str):
                    yield line, text


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _listed(patterns: tuple[str, ...]) -> str:
    return ", ".join(patterns) or "no module"
