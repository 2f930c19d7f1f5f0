"""What stands next to a path that does not exist, or where something else was looked for: what a
typo in it may have meant, and what makes of it what was looked for.
"""

from __future__ import annotations

import difflib
from pathlib import Path


def nearest(path: Path, *, directory: bool) -> Path:
    """The missing path with its first missing part replaced by the nearest name there, of a
    `directory` if the path is to be one; the path itself if no name is near.
    """
    missing = next(each for each in (*reversed(path.parents), path) if not each.exists())
    beside = names_in(missing.parent, directories=directory or missing != path)
    found = difflib.get_close_matches(missing.name, beside, n=1, cutoff=0.7)
    if not found:
        return path
    near = missing.parent / found[0]
    whole = near / path.relative_to(missing)
    return whole if whole.exists() else near


def names_in(directory: Path, *, directories: bool) -> list[str]:
    """The names in a directory, or of its `directories` alone, in order and without hidden ones;
    none if it cannot be listed.
    """
    try:
        found = [each for each in directory.iterdir() if not directories or each.is_dir()]
    except OSError:
        return []
    return sorted(each.name for each in found if not each.name.startswith("."))


def how_to_convert(directory: Path) -> str:
    """The command that makes a Hugging Face directory of a checkpoint in Megatron-Core's format,
    which the directory is, or has under the last of its names; "" if it is none.
    """
    for where in ("*.distcp", "*/*.distcp"):
        if found := {file.parent for file in directory.glob(where)}:
            place = max(found)
            model = "" if (place / "hf" / "config.json").is_file() else " --config MODEL"
            return f"`megatron-policy convert {place} OUT --to hf{model}`"
    return ""
