"""Reads YAML files within limits, and composes the policy's section of one: the files that it
inherits from, overrides, and interpolations, as NeMo RL does. OmegaConf, where installed, merges
and resolves.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from megatron_policy.config.keys import KEYS
from megatron_policy.converters.files.contained import names_in, nearest
from megatron_policy.errors import ConfigError

MAX_FILES = 50
"""Limit for the files that one configuration inherits from."""
MAX_BYTES = 2**18
"""Limit for a file; a configuration has a few thousand."""
MAX_DEPTH = 50
_ENDINGS = (".yaml", ".yml")
MAX_VALUES = 100_000
"""Limit for a document, with all aliases expanded."""
_SHOWN = 10
POLICY, DEFAULTS, REPLACES = "policy", "defaults", "_override_"
_RESOLVERS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "max": lambda a, b: max(a, b),
}
"""NeMo RL's own, which its configurations call as `${mul:2,3}`."""


@dataclass(frozen=True)
class Composed:
    """A policy's section with all values, and the names of the file's other sections."""

    policy: Mapping[str, Any]
    others: tuple[str, ...] = ()


def compose(path: Path, overrides: Sequence[str] = ()) -> Composed:
    """The section `policy` of the file, or all of a file that has the policy's keys at its top,
    with `overrides` such as "megatron_cfg.tensor_model_parallel_size=2", or "~metrics", which takes
    a key out.

    ConfigError for a file that has neither, or that needs OmegaConf where it is not installed.
    """
    document = _load_with_parents(path)
    if POLICY not in document and "model_name" in document:
        document = {POLICY: document}
    if POLICY not in document:
        if "model_type" in document or "architectures" in document:
            raise ConfigError(
                f"{path} is a model's config, not a configuration file: a configuration has the "
                "model as `model_name`, and `megatron-policy plan` takes its directory after "
                "--model"
            )
        names = [f"{name!s:.40}" for name in document]
        has = ", ".join(names[:_SHOWN]) + " and others" * (len(names) > _SHOWN)
        raise ConfigError(
            f"{path} has no section `policy`, as files of NeMo RL have, nor a `model_name` at its "
            f"top, as the section alone has: it has {has or 'nothing'}. See configs/ for examples"
        )
    if not isinstance(document[POLICY], dict):
        given = type(document[POLICY]).__name__
        raise ConfigError(f"{path} has no section `policy`: its `policy` is a {given}, not keys")
    for override in overrides:
        _override(document, override)
    policy = document[POLICY]
    if (found := next(_find_interpolations(policy, POLICY), None)) is not None:
        policy = _resolve(path, document, POLICY, found)
    return Composed(policy, tuple(name for name in document if name != POLICY))


def _load_with_parents(path: Path) -> dict[str, Any]:
    """The document in the file, merged over those that its `defaults` name."""
    count = 0

    def read(file: Path, above: tuple[Path, ...]) -> dict[str, Any]:
        nonlocal count
        count += 1
        if count > MAX_FILES:
            raise ConfigError(f"{path} inherits from more than {MAX_FILES} files")
        document = load_yaml(file)
        document = {} if document is None else document
        if not isinstance(document, dict):
            kind = type(document).__name__
            raise ConfigError(f"{file} has no section `policy`: it is a {kind}, not sections")
        if DEFAULTS not in document:
            return document
        parents = []
        for parent in _find_parents(file, document):
            if parent.resolve() in above:
                raise ConfigError(f"{file}: its `defaults` lead back to {parent}")
            parents.append(read(parent, (*above, parent.resolve())))
        own = {name: value for name, value in document.items() if name != DEFAULTS}
        return _merge(file, [*parents, own])

    return read(path, (path.resolve(),))


def _find_parents(file: Path, document: Mapping[str, Any]) -> list[Path]:
    """The files in `defaults`, which are relative to the file."""
    names = document[DEFAULTS]
    if (found := next(_find_interpolations(names, DEFAULTS), None)) is not None:
        names = _resolve(file, document, DEFAULTS, found)
    parents = [file.parent / str(name) for name in ([names] if isinstance(names, str) else names)]
    for parent in parents:
        if not parent.is_file():
            raise ConfigError(f"{file}: its `defaults` name {parent}, which is not there")
    return parents


def _override(document: dict[str, Any], text: str) -> None:
    """Set what `KEY=VALUE` says, or take out the KEY of `~KEY`; in the section `policy` unless KEY
    begins with another's name.
    """
    removes = text.startswith("~")
    key, equals, value = text.partition("=")
    parts = key.strip().lstrip("~" if removes else "+").split(".")
    if bool(equals) == removes or not all(parts):
        raise ConfigError(
            f"the override {text!r} is not KEY=VALUE, as in "
            "megatron_cfg.tensor_model_parallel_size=2, nor ~KEY"
        )
    if parts[0] in KEYS or parts[0] not in document:
        parts.insert(0, POLICY)
    section = document
    for depth, part in enumerate(parts[:-1], 1):
        below = section.get(part)
        if below is not None and not isinstance(below, dict):
            where = ".".join(parts[:depth])
            raise ConfigError(
                f"the override {text!r}: {where} is {below!r:.40}, not a section of keys"
            )
        section[part] = dict(below or {})  # an alias in YAML is one object in two places
        section = section[part]
    if removes:
        if parts[-1] not in section:
            raise ConfigError(f"the override {text!r}: there is no {'.'.join(parts)} to take out")
        del section[parts[-1]]
        return
    try:
        section[parts[-1]] = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"the override {text!r}: its value is not valid YAML: {error}") from error


def _find_interpolations(value: Any, path: str) -> Iterator[str]:
    """Paths of strings with a `${...}`."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _find_interpolations(item, f"{path}.{key}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _find_interpolations(item, f"{path}[{index}]")
    elif isinstance(value, str) and "${" in value:
        yield path


def _merge(file: Path, documents: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Each document over those before it; a section with `_override_` in place of theirs."""
    config = _import_omegaconf(file, "it has `defaults`")
    with _name_file_in_errors(file):
        whole = config.create({})
        for document in documents:
            own = dict(document)
            for name, section in document.items():
                if isinstance(section, Mapping) and section.get(REPLACES):
                    own[name] = {key: each for key, each in section.items() if key != REPLACES}
                    whole.pop(name, None)
            whole = config.merge(whole, config.create(own))
        found: dict[str, Any] = config.to_container(whole, resolve=False)
    return found


def _resolve(file: Path, document: Mapping[str, Any], section: str, path: str) -> Any:
    """A section of the document, of which `path` is an interpolation, with the values of all."""
    config = _import_omegaconf(file, f"{path} is an interpolation")
    with _name_file_in_errors(file):
        found = config.create(dict(document))[section]
        return config.to_container(found, resolve=True) if config.is_config(found) else found


def _import_omegaconf(file: Path, why: str) -> Any:
    """OmegaConf, with the resolvers of NeMo RL; ConfigError if it is not installed."""
    try:
        from omegaconf import OmegaConf
    except ImportError as error:
        raise ConfigError(
            f"{file}: {why}, which OmegaConf resolves: pip install omegaconf, or write the "
            "values out"
        ) from error
    # Newer releases have renamed it.
    register = getattr(OmegaConf, "register_resolver", None) or OmegaConf.register_new_resolver
    for name, function in _RESOLVERS.items():
        if not OmegaConf.has_resolver(name):
            register(name, function)
    return OmegaConf


@contextmanager
def _name_file_in_errors(file: Path) -> Iterator[None]:
    """Turn what OmegaConf raises into a ConfigError that names the file and the key."""
    from omegaconf.errors import OmegaConfBaseException

    try:
        yield
    except OmegaConfBaseException as error:
        what, *more = str(error).splitlines() or [""]
        keys = [line.partition(":")[2] for line in more if line.strip().startswith("full_key:")]
        if variable := re.search(r"Environment variable '(\w+)'", what):
            what += f". Set it first: export {variable[1]}=..."
        where = "".join(f"{key}:" for key in keys if key.strip())
        raise ConfigError(f"{file}:{where} {what}") from error
    except RecursionError as error:
        raise ConfigError(f"{file}: an interpolation leads back to itself") from error


def load_yaml(path: Path) -> Any:
    """The document in the file; ConfigError saying what is wrong with it."""
    try:
        if not path.is_file():
            raise ConfigError(_explain_absence(path))
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(f"{path} has more than {MAX_BYTES} bytes: it is not a configuration")
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    try:
        loader = yaml.SafeLoader(content)
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            _check(node)
            return loader.construct_document(node)
        finally:
            loader.dispose()
    except RecursionError as error:
        raise ConfigError(f"{path}: its values are nested too deeply") from error
    except (yaml.YAMLError, ValueError, ArithmeticError, LookupError) as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    except (AttributeError, TypeError) as error:  # from PyYAML: values that do not fit their tags
        raise ConfigError(f"{path} is not valid YAML: a value is not what its tag says") from error


def _explain_absence(path: Path) -> str:
    if path.is_dir():
        names = names_in(path, directories=False)
        if "config.json" in names:
            return (
                f"{path} is a model's directory, not a configuration file: a configuration has it "
                "as `model_name`, and `megatron-policy plan` takes it after --model"
            )
        found = [each for each in names if each.endswith(_ENDINGS)]
        has = f"it has {', '.join(found[:_SHOWN])}" if found else "it has no YAML files"
        return f"{path} is a directory, not a configuration file: {has}"
    near = nearest(path, directory=False)
    if near != path:
        return f"there is no configuration file {path}: did you mean {near}?"
    hint = "" if path.suffix in _ENDINGS else "; `megatron-policy plan` takes a model after --model"
    return f"there is no configuration file {path}{hint}"


def _check(root: yaml.Node) -> None:
    """ValueError for recursive nodes, for too deep or too many nodes, and for duplicate keys."""
    sizes: dict[yaml.Node, int] = {}
    _measure(root, sizes, set(), 0)
    for node in sizes:
        seen: set[str] = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise ValueError(f"line {_line_of(key)} names {key.value!r:.200} a second time")
                seen.add(key.value)


def _measure(
    node: yaml.Node, sizes: dict[yaml.Node, int], above: set[yaml.Node], depth: int
) -> int:
    """The number of values that the node expands to."""
    if node in above:
        raise ValueError(f"the value in line {_line_of(node)} contains itself")
    if depth > MAX_DEPTH:
        raise ValueError(f"line {_line_of(node)} is nested more than {MAX_DEPTH} values deep")
    if node not in sizes:
        inner = node.value if isinstance(node, yaml.CollectionNode) else ()
        if isinstance(node, yaml.MappingNode):
            inner = chain.from_iterable(inner)
        above.add(node)
        size = 1 + sum(_measure(each, sizes, above, depth + 1) for each in inner)
        above.discard(node)
        if size > MAX_VALUES:
            where = f"the value in line {_line_of(node)}"
            raise ValueError(f"{where} has more than {MAX_VALUES} values")
        sizes[node] = size
    return sizes[node]


def _line_of(node: yaml.Node) -> int:
    line: int = node.start_mark.line
    return line + 1
