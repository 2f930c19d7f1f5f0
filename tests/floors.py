"""The house rules as a syntax-tree walk: floors, who may import or name what, lengths."""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

PACKAGE = "megatron_policy"

# Floor by module name inside the package ("" is its __init__); the first match decides.
FLOORS: tuple[tuple[str, int], ...] = (
    ("converters.contained", 1),
    ("converters.dist_metadata", 1),
    ("converters.hf_config", 1),
    ("converters.hf_files", 1),
    ("converters.hf_location", 1),
    ("converters.hf_writing", 1),
    ("converters.locking", 1),
    ("converters.publishing", 1),
    ("converters.raw_files", 1),
    ("converters.renaming", 1),
    ("converters.dist_files", 1),
    ("converters.dist_records", 1),
    ("converters.dist_writing", 1),
    ("converters", 0),
    ("converters.*", 0),
    ("config", 0),
    ("config.*", 0),
    ("errors", 0),
    ("version", 0),
    ("interfaces", 0),
    ("batch", 0),
    ("topology", 0),
    ("layout", 0),
    ("packing", 0),
    ("packing.*", 0),
    ("refit", 0),
    ("refit.plan", 0),
    ("refit.geometry", 0),
    ("refit.files", 0),
    ("refit.manifest", 0),
    ("refit.buffers", 0),
    ("refit.wire", 0),
    ("coordination", 0),
    ("coordination.timeouts", 0),
    ("coordination.*", 1),
    ("conversion.digests", 1),
    ("conversion.manifest", 1),
    ("conversion.tensors", 1),
    ("device", 1),
    ("device.*", 1),
    ("groups", 1),
    ("rendezvous", 1),
    ("model", 2),
    ("model.*", 2),
    ("train", 2),
    ("train.*", 2),
    ("checkpoint.manifest", 1),
    ("checkpoint.common", 1),
    ("checkpoint.beside", 0),
    ("checkpoint.finding", 1),
    ("checkpoint.identity", 1),
    ("checkpoint.verifying", 1),
    ("checkpoint.slices", 0),
    ("checkpoint.report", 0),
    ("checkpoint", 0),
    ("checkpoint.*", 2),
    ("refit.*", 2),
    ("session", 3),
    ("continuing", 3),
    ("checkpointing", 3),
    ("policy", 3),
    ("conversion", 3),
    ("conversion.*", 3),
    ("parity", 3),
    ("parity.*", 3),
    ("", 4),  # the re-exports: nothing below may lean on them
    ("cli", 4),
    ("cli.*", 4),
    ("__main__", 4),
    ("workers", 4),
    ("workers.*", 4),
    ("hosts", 4),
    ("hosts.*", 4),
)

# Foreign packages that only some modules may import, and all that floor 0 may import at all.
MEGATRON = ("device", "device.*", "groups", "model", "model.*", "train", "train.*")
MEGATRON += ("checkpoint", "checkpoint.*")
IMPORT_ONLY_IN: dict[str, tuple[str, ...]] = {
    "ray": ("workers", "workers.*", "hosts", "hosts.*"),
    "nemo_rl": ("hosts.nemo_rl", "hosts.nemo_rl.*"),
    "megatron": (*MEGATRON, "refit.*"),
    "transformer_engine": (*MEGATRON, "refit.*"),
    "zmq": ("refit.*",),
    "converters": (),  # it is imported as megatron_policy.converters, or a wheel has two of it
}
FLOOR_0_IMPORTS = sys.stdlib_module_names | {PACKAGE, "torch", "numpy", "pydantic", "yaml"}

# Words that only these modules may hold, as a name or in a string; comments and docstrings may.
DEVICE = ("device", "device.*")
NAME_ONLY_IN: dict[str, tuple[str, ...]] = {
    "cuda": DEVICE,
    "nccl": DEVICE,
    "parallel_state": ("groups",),
}
FLOOR_0_FORBIDS = ("environ", "getenv")  # the environment is read at the edge or on floor 1

FILE_LINES, FUNCTION_LINES, CLASS_LINES = 300, 60, 200


@dataclass(frozen=True)
class Module:
    """One source file: its `name` inside the package, its `path` relative to the root."""

    name: str
    path: str
    source: str
    tree: ast.Module
    is_package: bool


def floor_of(name: str) -> int | None:
    """The floor of a module, None if nobody has said."""
    return next((floor for pattern, floor in FLOORS if fnmatchcase(name, pattern)), None)


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
                relative = path.relative_to(root).as_posix()
                yield Module(name, relative, source, ast.parse(source, relative), is_package)


def check_floors(modules: list[Module]) -> list[str]:
    """Modules without a floor, and imports that go up."""
    known = {module.name for module in modules}
    problems = []
    for module in modules:
        floor = floor_of(module.name)
        if floor is None:
            problems.append(f"{module.path}: {module.name!r} has no floor in tests/floors.py")
            continue
        for line, target in _imports(module):
            if target.split(".")[0] != PACKAGE:
                continue
            inner = _longest_known(target, known)
            above = floor_of(inner)
            place = f"{module.path}:{line}"
            if target.count(".") - len(list(filter(None, inner.split(".")))) > 1:
                problems.append(f"{place}: imports {target!r}, which does not exist")
            elif above is not None and above > floor:
                what = inner or PACKAGE
                problems.append(f"{place}: floor {floor} imports {what!r} of floor {above}")
    return problems


def check_foreign_imports(modules: list[Module]) -> list[str]:
    """Foreign packages imported where they may not be."""
    problems = []
    for module in modules:
        for line, target in _imports(module):
            top = target.split(".")[0]
            allowed = IMPORT_ONLY_IN.get(top)
            if allowed is not None and not _matches(module.name, allowed):
                problems.append(f"{module.path}:{line}: {top} only in {_listed(allowed)}")
            elif floor_of(module.name) == 0 and top not in FLOOR_0_IMPORTS:
                problems.append(f"{module.path}:{line}: floor 0 does not import {top}")
    return problems


def check_names(modules: list[Module]) -> list[str]:
    """Words that stand, as a name or in a string, where they may not."""
    problems = []
    for module in modules:
        for line, text in _texts(module.tree):
            for word in set(re.findall(r"\w+", text)):
                allowed = NAME_ONLY_IN.get(word)
                if allowed is not None and not _matches(module.name, allowed):
                    problems.append(f"{module.path}:{line}: {word!r} only in {_listed(allowed)}")
                if word in FLOOR_0_FORBIDS and floor_of(module.name) == 0:
                    problems.append(f"{module.path}:{line}: {word!r} not on floor 0")
    return problems


def check_lengths(modules: list[Module]) -> list[str]:
    """Files, functions and classes over the hard limits."""
    problems = []
    for module in modules:
        lines = module.source.count("\n")
        if lines > FILE_LINES:
            problems.append(f"{module.path}: {lines} lines, at most {FILE_LINES}")
        for node in ast.walk(module.tree):
            limit = _limit_of(node)
            if limit is not None:
                assert isinstance(node, ast.stmt) and node.end_lineno is not None
                length = node.end_lineno - node.lineno + 1
                if length > limit:
                    what = f"{module.path}:{node.lineno}: {getattr(node, 'name', '')}"
                    problems.append(f"{what} {length} lines, at most {limit}")
    return problems


def check_swallowed_errors(modules: list[Module]) -> list[str]:
    """Handlers of everything that do nothing."""
    return [
        f"{module.path}:{node.lineno}: swallows every error"
        for module in modules
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ExceptHandler)
        and (node.type is None or getattr(node.type, "id", "") in ("Exception", "BaseException"))
        and all(isinstance(step, (ast.Pass, ast.Continue)) for step in node.body)
    ]


def _limit_of(node: ast.AST) -> int | None:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return FUNCTION_LINES
    return CLASS_LINES if isinstance(node, ast.ClassDef) else None


def _imports(module: Module) -> Iterator[tuple[int, str]]:
    """(line, absolute target) of every import, also in functions; `from a import b` gives a.b."""
    here = [PACKAGE, *filter(None, module.name.split("."))]
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            up = node.level - (1 if module.is_package else 0)
            base = here[: len(here) - up] if node.level else []
            base = [*base, *filter(None, (node.module or "").split("."))]
            for alias in node.names:
                yield node.lineno, ".".join([*base, alias.name])


def _longest_known(target: str, known: set[str]) -> str:
    """The module that `target` leads to: "policy" for megatron_policy.policy.MegatronPolicy."""
    parts = target.split(".")[1:]
    while parts and ".".join(parts) not in known:
        parts.pop()
    return ".".join(parts)


def _texts(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, text) of every identifier and string; a bare string statement is documentation."""
    documentation = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    line = 1
    for node in ast.walk(tree):
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
