"""The memory that a process has and uses, on Linux with glibc."""

from __future__ import annotations

import ctypes
import gc
import sys
from pathlib import Path

_FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"


class _Allocated(ctypes.Structure):
    """What `mallinfo2` returns."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in _FIELDS.split())


def read_memory() -> dict[str, int]:
    """Of this process, once garbage is collected:

    resident    bytes that belong to no file, also those in the swap space
    allocated   bytes that malloc has given out: what is resident besides is free, or Python's own
    objects     blocks that Python has given out
    """
    gc.collect()
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    fields = {line[0]: line[1] for line in lines if len(line) > 1}
    resident = sum(int(fields[each]) for each in ("RssAnon:", "RssShmem:", "VmSwap:"))
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _Allocated
    found = mallinfo()
    return {
        "resident": 1024 * resident,
        "allocated": found.uordblks + found.hblkhd,
        "objects": sys.getallocatedblocks(),
    }
