"""Reads a pickle without running it: names stay names, and made objects stay inert.

Nothing is imported, looked up or called on a pickle's behalf, so it cannot reach any object of
this process. Time and memory are bounded by its length alone.
"""

from __future__ import annotations

import io
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


_ORDERED = Name("collections", "OrderedDict")
_PLAIN = (
    *(pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.POP, pickle.POP_MARK),
    *(pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BINFLOAT),
    *(pickle.BININT, pickle.BININT1, pickle.BININT2),
    *(pickle.SHORT_BINUNICODE, pickle.BINUNICODE, pickle.BINUNICODE8),
    *(pickle.SHORT_BINBYTES, pickle.BINBYTES, pickle.BINBYTES8),
    *(pickle.EMPTY_TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3, pickle.TUPLE),
    *(pickle.EMPTY_LIST, pickle.EMPTY_DICT, pickle.GLOBAL, pickle.STACK_GLOBAL),
    *(pickle.MEMOIZE, pickle.BINPUT, pickle.LONG_BINPUT, pickle.BINGET, pickle.LONG_BINGET),
)
"""Instructions that put values of Python's own kinds on the stack, or move them."""


def unpickled(content: bytes, belongs: Callable[[Name], bool]) -> Any:
    """The value of a pickle of protocol 2 or later: None, bool, int, float, str, bytes, tuple,
    list, dict, `Name` and `Made`. A dict's keys are str or `Made`; `Made` compares by identity.

    ValueError for a damaged pickle, for instructions that picklers do not write, and for names
    that `belongs` refuses.
    """
    file = io.BytesIO(content)
    try:
        return _Unpickler(file, belongs).load()
    except (LookupError, AttributeError, TypeError, EOFError, struct.error) as error:
        raise ValueError(f"it is damaged before byte {file.tell()}") from error
    except pickle.UnpicklingError as error:
        raise ValueError(f"it is damaged before byte {file.tell()}: {error}") from error


class _Allowed(dict[int, Callable[[Any], None]]):
    def __missing__(self, code: int) -> Any:
        raise ValueError(f"its instruction {bytes([code])!r} is not allowed")


class _Unpickler(pickle._Unpickler):
    """Python's own in its form in Python, since the other one lets a file choose how long its memo
    is; with the instructions alone that reach nothing outside.
    """

    stack: list[Any]
    append: Callable[[Any], None]
    read: Callable[[int], bytes]
    pop_mark: Callable[[], list[Any]]

    def __init__(self, file: io.BytesIO, belongs: Callable[[Name], bool]) -> None:
        super().__init__(file)
        self._belongs = belongs
        self._names: dict[tuple[str, str], Name] = {}

    def find_class(self, module: str, name: str) -> Name:
        found = self._names.get((module, name))
        if found is None:
            found = self._names[module, name] = Name(module, name)
            if not self._belongs(found):
                raise ValueError(f"it references {str(found)[:200]}, which is not allowed here")
        return found

    def load_long1(self) -> None:
        length = self.read(1)[0]
        if length > MAX_INTEGER_BYTES:
            raise ValueError(f"an integer of {length} bytes is not allowed")
        self.append(pickle.decode_long(self.read(length)))

    def load_append(self) -> None:
        value = self.stack.pop()
        self._extend([value])

    def load_appends(self) -> None:
        self._extend(self.pop_mark())

    def _extend(self, items: list[Any]) -> None:
        if type(self.stack[-1]) is not list:
            raise TypeError
        self.stack[-1] += items

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._update([key, value])

    def load_setitems(self) -> None:
        self._update(self.pop_mark())

    def _update(self, items: list[Any]) -> None:
        target, keys = self.stack[-1], items[::2]
        # Other types of keys would hash anew, or let the pickle choose the hash.
        if type(target) is not dict or len(items) % 2 or not {*map(type, keys)} <= {str, Made}:
            raise TypeError
        target.update(zip(keys, items[1::2], strict=True))

    def load_reduce(self) -> None:
        arguments, by = self.stack.pop(), self.stack.pop()
        if type(by) is not Name or type(arguments) is not tuple:
            raise TypeError
        self.append({} if by == _ORDERED and not arguments else Made(by, arguments))

    def load_build(self) -> None:
        state, made = self.stack.pop(), self.stack[-1]
        if type(made) is not Made or made.state is not None:
            raise TypeError
        made.state = state

    dispatch = _Allowed(
        {code[0]: pickle._Unpickler.dispatch[code[0]] for code in _PLAIN}
        | {
            pickle.LONG1[0]: load_long1,
            pickle.APPEND[0]: load_append,
            pickle.APPENDS[0]: load_appends,
            pickle.SETITEM[0]: load_setitem,
            pickle.SETITEMS[0]: load_setitems,
            pickle.REDUCE[0]: load_reduce,
            pickle.NEWOBJ[0]: load_reduce,
            pickle.BUILD[0]: load_build,
        }
    )
