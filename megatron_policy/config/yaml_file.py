"""Reads a YAML file in bounded time: its size, its depth and the expansion of aliases have
limits.
"""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from megatron_policy.converters.files.contained import names_in, nearest
from megatron_policy.errors import ConfigError

MAX_BYTES = 2**18
"""Limit for a file; a configuration has a few thousand."""
MAX_DEPTH = 50
_ENDINGS = (".yaml", ".yml")
_SHOWN = 10
MAX_VALUES = 100_000
"""Limit for a document, with all aliases expanded."""


def load(path: Path) -> Any:
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
