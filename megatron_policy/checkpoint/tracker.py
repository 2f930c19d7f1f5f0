"""Which directory of a training run is its checkpoint: the tracker, and the names of directories.

Knows nothing of what is in them but their manifests.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from megatron_policy.checkpoint import manifest as manifests
from megatron_policy.checkpoint.manifest import NAME, OPTIMIZER, Manifest
from megatron_policy.converters import contained, publishing, renaming
from megatron_policy.converters.locking import locked
from megatron_policy.errors import CheckpointError, ConversionError

TRACKER = "latest_checkpointed_iteration.txt"
"""Holds the step of the checkpoint that was committed last; Megatron-LM's name for it."""

MAX_TRACKER_BYTES = 2**16
PATTERN = "iter_*"
_STEP = re.compile(r"iter_(\d{7,})")


def directory(root: str | Path, step: int) -> Path:
    """Where the checkpoint of that step is, or will be."""
    return Path(root) / f"iter_{step:07d}"


def find(path: str | Path) -> Path:
    """The directory of a checkpoint: `path`, or the one in it that was committed last.

    Without a tracker it is the highest step that is complete. CheckpointError when there is none.
    """
    root = contained.expanded(path)
    if not root.is_dir():
        what = "is a file" if root.exists() else "does not exist"
        raise CheckpointError(
            f"{root} {what}: give the directory that checkpoints were saved to, or one of its "
            f"{PATTERN} directories"
        )
    if (root / NAME).is_file() or _STEP.fullmatch(root.name):
        return root
    if (root / TRACKER).exists():
        return _tracked(root)
    if found := complete(root):
        return found[-1]
    raise CheckpointError(f"{root} has no checkpoint: {_instead(root)}")


def is_saved(path: str | Path) -> bool:
    """Whether there is, in `path` or in one of its directories, something that a save left."""
    root = contained.expanded(path)
    if not root.is_dir():
        return False
    if (root / NAME).is_file() or any(root.glob(f"{PATTERN}/{NAME}")):
        return True
    return not (root / TRACKER).exists() and any(root.glob(f".{PATTERN}.partial-*"))


def complete(root: str | Path) -> list[Path]:
    """The directories in `root` that were written to their end, in the order of their steps."""
    return sorted(
        (path for path in Path(root).glob(PATTERN) if _is_complete(path)),
        key=lambda path: _of(path),
    )


def commit(root: str | Path, step: int) -> None:
    """Make that step's checkpoint the one to load, at once; it has to be on the disk by now.

    CheckpointError when the tracker cannot be written: the one before stays the one to load.
    """
    tracker = Path(root) / TRACKER
    beside = tracker.with_name(f".{TRACKER}.partial")
    try:
        with locked(tracker.parent):
            publishing.write_file(beside, str(step).encode())
            os.replace(beside, tracker)
            publishing.flush_directory(tracker.parent)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise CheckpointError(
            f"{tracker} cannot be written: {error.strerror}. {directory(root, step)} is complete; "
            "load it by this path"
        ) from error


def companion(weights: Manifest, optimizer_path: str | Path) -> Path:
    """The directory with the optimizer's state of the same save.

    `optimizer_path` is that directory or the one it was saved to. NoOptimizer when it has none, or
    that of another save.
    """
    root = contained.expanded(optimizer_path)
    if not root.is_dir():
        raise manifests.NoOptimizer(
            f"{root} does not exist, to take the optimizer's state from. Give the directory it was "
            "saved to, or load with fresh_optimizer=True to start a new one"
        )
    seen: list[str] = []
    for path in _candidates(root, weights.step):
        found = manifests.read(path)
        if found.id == weights.id and OPTIMIZER in found.contains:
            return path
        what = "" if OPTIMIZER in found.contains else ", without an optimizer's state"
        seen.append(f"{path} is of step {found.step}, save {found.id}{what}")
    there = "; ".join(seen) or f"it has {_listed(complete(root))}"
    raise manifests.NoOptimizer(
        f"{root} has no optimizer state for {weights.root or 'the weights'}, which is of step "
        f"{weights.step}, save {weights.id}: {there}. Give the directory it was saved to, or load "
        "with fresh_optimizer=True to start a new one"
    )


def reunite(weights_root: Path, optimizer_root: Path) -> None:
    """Give the optimizer's state of the checkpoint to load its name again, if a save that was
    killed has put its own in that place.
    """
    if weights_root == optimizer_root or not weights_root.is_dir():
        return
    try:
        weights = manifests.read(find(weights_root))
        if not weights.optimizer_elsewhere:
            return
        held = companion(weights, optimizer_root)
    except CheckpointError:
        return  # there is nothing whole to look after
    place = directory(optimizer_root, weights.step)
    if held != place and held.name.startswith("."):
        renaming.put(held, place, held.with_name(f"{held.name}-aside"))
        publishing.flush_directory(optimizer_root)


def _candidates(root: Path, step: int) -> Iterator[Path]:
    """Where the state of that step may be.

    Of a save of the same step again, which was killed before it came to the weights, the state
    that belongs to them stands beside the new one, under a hidden name.
    """
    place = directory(root, step)
    for path in (place, root, *sorted(root.glob(f".{place.name}.*"))):
        if (path / NAME).is_file():
            yield path


def _tracked(root: Path) -> Path:
    tracker = root / TRACKER
    try:
        text = contained.read(tracker, MAX_TRACKER_BYTES).decode(errors="replace").strip()
    except OSError as error:
        raise CheckpointError(f"{tracker} cannot be read: {error.strerror}") from error
    mend = f"write the step of a checkpoint into it ({_instead(root)}), or load one by its path"
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise CheckpointError(f"{tracker} holds {text[:40]!r}, which is no step; {mend}")
    found = directory(root, int(text))
    if not found.is_dir():
        raise CheckpointError(f"{tracker} names step {text}, but there is no {found}; {mend}")
    if not _is_complete(found):
        raise CheckpointError(f"{tracker} names step {text}, but {found} has no {NAME}; {mend}")
    try:
        return contained.inside(root, found.name)
    except ConversionError as error:
        raise CheckpointError(str(error)) from error


def _instead(root: Path) -> str:
    if found := complete(root):
        return f"it has {_listed(found)}"
    if any(root.glob(f".{PATTERN}.partial-*")):
        return "a save to it was not finished, and none before"
    return f"it has no complete {PATTERN} directory"


def _listed(found: list[Path]) -> str:
    return ", ".join(path.name for path in found) or f"no complete {PATTERN} directory"


def _is_complete(path: Path) -> bool:
    return bool(_STEP.fullmatch(path.name)) and (path / NAME).is_file()


def _of(path: Path) -> int:
    match = _STEP.fullmatch(path.name)
    assert match is not None, path
    return int(match[1])
