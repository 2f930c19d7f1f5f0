"""Numbers of bytes and of things as people read them."""

from __future__ import annotations

_UNITS = ("", "k", "M", "G", "T", "P", "E")


def show_size(size: float) -> str:
    """Bytes with a decimal unit and three digits: "988 MB", "3.09 GB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.5:
            return f"{size:.0f} B" if unit == "B" else f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def show_gib(size: float) -> str:
    """Bytes in GiB, in which devices have their memory: "71.5 GiB"."""
    return f"{size / 2**30:.3g} GiB"


def show_count(number: float) -> str:
    """A number with three digits and a prefix, to which a unit can be added: "494 M"."""
    power = 0
    while number >= 999.5 and power < len(_UNITS) - 1:
        number, power = number / 1000, power + 1
    return f"{number:.3g} {_UNITS[power]}"
