"""Reads a pickle without running it: names stay names, and made objects stay inert.

Nothing is imported, looked up or called on a pickle's behalf, so it cannot reach any object of
this process. Time and memory are bounded by its length alone.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MAX_INTEGER_BYTES = 8
"""No size, offset or count needs a longer integer."""


@dataclass(frozen=True, slots=True)
class Name:
    """A class or function that a pickle names."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(slots=True, eq=False)
class Made:
    """An object as a pickle describes it: its maker `by`, the arguments, and the state it gets."""

    by: Name
    arguments: tuple[Any, ...]
    state: Any = None


def unpickled(content: bytes, belongs: Callable[[Name], bool]) -> Any:
    """The value of a pickle of protocol 2 or later: None, bool, int, float, str, bytes, tuple,
    list, dict, `Name` and `Made`. A dict's keys are str or `Made`; `Made` compares by identity.

    ValueError for a damaged pickle, for instructions that picklers do not write, and for names
    that `belongs` refuses.
    """
    reader = _Reader(content, belongs)
    try:
        return reader.read()
    except (IndexError, KeyError, AttributeError, TypeError, struct.error) as error:
        raise ValueError(f"it is damaged at byte {reader.at}") from error


class _Reader:
    """The virtual machine of a pickle, without the instructions that reach outside."""

    def __init__(self, content: bytes, belongs: Callable[[Name], bool]) -> None:
        self._content, self._belongs = content, belongs
        self.at = 0
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}
        self._names: dict[tuple[str, str], Name] = {}

    def read(self) -> Any:
        """Run the pickle and return the top of the stack at the end."""
        content, stack, memo, steps = self._content, self._stack, self._memo, _STEPS
        while (code := content[self.at]) != _STOP:
            self.at += 1
            if code == _MEMOIZE:  # follows almost every value
                memo[len(memo)] = stack[-1]
                continue
            step = steps.get(code)
            if step is None:
                raise ValueError(
                    f"its instruction {bytes([code])!r} at byte {self.at - 1} is not allowed"
                )
            step(self)
        return stack.pop()

    def taken(self, size: int) -> bytes:
        """The next `size` bytes of the pickle."""
        start = self.at
        self.at = end = start + size
        if end > len(self._content):
            raise ValueError(f"it ends after {len(self._content)} bytes, too early")
        return self._content[start:end]

    def number(self, size: int) -> int:
        """The next unsigned number."""
        return int.from_bytes(self.taken(size), "little")

    def text(self, size: int) -> None:
        self._stack.append(str(self.taken(self.number(size)), "utf-8", "surrogatepass"))

    def binary(self, size: int) -> None:
        self._stack.append(self.taken(self.number(size)))

    def integer(self, size: int, signed: bool) -> None:
        self._stack.append(int.from_bytes(self.taken(size), "little", signed=signed))

    def long(self, size: int) -> None:
        length = self.number(size)
        if length > MAX_INTEGER_BYTES:
            raise ValueError(f"an integer of {length} bytes at byte {self.at} is not allowed")
        self.integer(length, signed=True)

    def real(self) -> None:
        self._stack += struct.unpack(">d", self.taken(8))

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def mark(self) -> None:
        self._marks.append(len(self._stack))

    def since_mark(self) -> list[Any]:
        """Pop what was pushed since the last mark."""
        start = self._marks.pop()
        items = self._stack[start:]
        del self._stack[start:]
        return items

    def pop(self) -> None:
        if self._marks and self._marks[-1] == len(self._stack):
            self._marks.pop()
        else:
            self._stack.pop()

    def tuple_of(self, size: int) -> None:
        items = tuple(self._stack[-size:])
        if len(items) < size:
            raise IndexError
        self._stack[-size:] = [items]

    def tuple_since_mark(self) -> None:
        self._stack.append(tuple(self.since_mark()))

    def append(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not list:
            raise TypeError
        target += items

    def set_items(self, items: list[Any]) -> None:
        target = self._stack[-1]
        keys = items[::2]
        # Other types of keys would hash anew, or let the pickle choose the hash.
        if type(target) is not dict or not {*map(type, keys)} <= {str, Made}:
            raise TypeError
        target.update(zip(keys, items[1::2], strict=True))

    def put(self, index: int) -> None:
        self._memo[index] = self._stack[-1]

    def get(self, index: int) -> None:
        self._stack.append(self._memo[index])

    def name(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str:
            raise TypeError
        found = self._names.get((module, name))
        if found is None:
            found = self._names[module, name] = Name(module, name)
            if not self._belongs(found):
                raise ValueError(f"it references {str(found)[:200]}, which is not allowed here")
        self._stack.append(found)

    def name_of_lines(self) -> None:
        lines = []
        for _ in range(2):
            end = self._content.index(b"\n", self.at)
            lines.append(str(self._content[self.at : end], "utf-8"))
            self.at = end + 1
        self.name(*lines)

    def name_of_stack(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        self.name(module, name)

    def make(self) -> None:
        arguments, by = self._stack.pop(), self._stack.pop()
        if type(by) is not Name or type(arguments) is not tuple:
            raise TypeError
        self._stack.append({} if by == _ORDERED and not arguments else Made(by, arguments))

    def build(self) -> None:
        state, made = self._stack.pop(), self._stack[-1]
        if type(made) is not Made or made.state is not None:
            raise TypeError
        made.state = state


_ORDERED = Name("collections", "OrderedDict")
_STOP, _MEMOIZE = pickle.STOP[0], pickle.MEMOIZE[0]
_STEPS: dict[int, Callable[[_Reader], object]] = {
    code[0]: step
    for code, step in {
        pickle.PROTO: lambda r: r.number(1),
        pickle.FRAME: lambda r: r.number(8),
        pickle.NONE: lambda r: r.push(None),
        pickle.NEWTRUE: lambda r: r.push(True),
        pickle.NEWFALSE: lambda r: r.push(False),
        pickle.BININT: lambda r: r.integer(4, True),
        pickle.BININT1: lambda r: r.integer(1, False),
        pickle.BININT2: lambda r: r.integer(2, False),
        pickle.LONG1: lambda r: r.long(1),
        pickle.LONG4: lambda r: r.long(4),
        pickle.BINFLOAT: _Reader.real,
        pickle.SHORT_BINUNICODE: lambda r: r.text(1),
        pickle.BINUNICODE: lambda r: r.text(4),
        pickle.BINUNICODE8: lambda r: r.text(8),
        pickle.SHORT_BINBYTES: lambda r: r.binary(1),
        pickle.BINBYTES: lambda r: r.binary(4),
        pickle.BINBYTES8: lambda r: r.binary(8),
        pickle.MARK: _Reader.mark,
        pickle.POP: _Reader.pop,
        pickle.POP_MARK: _Reader.since_mark,
        pickle.EMPTY_TUPLE: lambda r: r.push(()),
        pickle.TUPLE1: lambda r: r.tuple_of(1),
        pickle.TUPLE2: lambda r: r.tuple_of(2),
        pickle.TUPLE3: lambda r: r.tuple_of(3),
        pickle.TUPLE: _Reader.tuple_since_mark,
        pickle.EMPTY_LIST: lambda r: r.push([]),
        pickle.APPEND: lambda r: r.append([r._stack.pop()]),
        pickle.APPENDS: lambda r: r.append(r.since_mark()),
        pickle.EMPTY_DICT: lambda r: r.push({}),
        pickle.SETITEM: lambda r: r.set_items([r._stack.pop(), r._stack.pop()][::-1]),
        pickle.SETITEMS: lambda r: r.set_items(r.since_mark()),
        pickle.BINPUT: lambda r: r.put(r.number(1)),
        pickle.LONG_BINPUT: lambda r: r.put(r.number(4)),
        pickle.BINGET: lambda r: r.get(r.number(1)),
        pickle.LONG_BINGET: lambda r: r.get(r.number(4)),
        pickle.GLOBAL: _Reader.name_of_lines,
        pickle.STACK_GLOBAL: _Reader.name_of_stack,
        pickle.REDUCE: _Reader.make,
        pickle.NEWOBJ: _Reader.make,
        pickle.BUILD: _Reader.build,
    }.items()
}
