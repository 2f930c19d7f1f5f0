"""Finds a training run's checkpoints: the tracker of the last one, and the names of directories."""

from __future__ import annotations

import os
import re
from pathlib import Path

from megatron_policy.checkpoint import manifest as manifests
from megatron_policy.checkpoint.manifest import NAME, OPTIMIZER, CheckpointManifest
from megatron_policy.converters.files import contained, publishing
from megatron_policy.converters.files.contained import how_to_convert
from megatron_policy.converters.files.locking import locked
from megatron_policy.converters.formats.hf_config import CONFIG
from megatron_policy.converters.formats.hf_names import ADAPTER_CONFIG
from megatron_policy.errors import CheckpointError, ConversionError

TRACKER = "latest_checkpointed_iteration.txt"
"""Holds the step of the checkpoint committed last; the name is Megatron-LM's."""

MAX_TRACKER_BYTES = 2**16
PATTERN = "iter_*"
_STEP = re.compile(r"iter_(\d{7,})")
_NUMBER = re.compile(r"[0-9]{1,18}")


def directory(root: str | Path, step: int) -> Path:
    """Where the checkpoint of that step is, or will be."""
    return Path(root) / f"iter_{step:07d}"


def find(path: str | Path) -> Path:
    """The directory of a checkpoint: `path`, or the one in it that was committed last.

    Without a tracker it is the highest complete step. CheckpointError if there is none.
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
        return _follow_tracker(root)
    if found := complete(root):
        return found[-1]
    if other := _find_other(root):
        raise CheckpointError(f"{root} has no training checkpoint: {other}")
    raise CheckpointError(
        f"{root} has no checkpoint: {_instead(root)}. Give the directory that checkpoints were "
        f"saved to, or one of its {PATTERN} directories, with {NAME} and .distcp files; a model to "
        "start from is policy.model_name"
    )


def is_saved(path: str | Path) -> bool:
    """Whether a save has left anything in `path` or in one of its directories."""
    root = contained.expanded(path)
    if not root.is_dir():
        return False
    if (root / NAME).is_file() or any(root.glob(f"{PATTERN}/{NAME}")):
        return True
    return not (root / TRACKER).exists() and any(root.glob(f".{PATTERN}.partial-*"))


def complete(root: str | Path) -> list[Path]:
    """The complete checkpoint directories in `root`, ordered by step."""
    found = filter(_is_complete, Path(root).glob(PATTERN))
    return sorted(found, key=lambda path: int(path.name.removeprefix("iter_")))


def commit(root: str | Path, step: int) -> None:
    """Make that step's checkpoint the one to load, atomically; it must already be on disk.

    CheckpointError if the tracker cannot be written: the previous one stays the one to load.
    """
    tracker = Path(root) / TRACKER
    partial = tracker.with_name(f".{TRACKER}.partial")
    try:
        with locked(tracker.parent):
            publishing.write_file(partial, str(step).encode())
            os.replace(partial, tracker)
            publishing.flush_directory(tracker.parent)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise CheckpointError(
            f"{tracker} cannot be written: {error.strerror}. {directory(root, step)} is complete; "
            "load it by this path"
        ) from error


def read_step(root: str | Path) -> int | None:
    """The step that the tracker in `root` names; None if there is none, or it names none."""
    try:
        text = contained.read(Path(root) / TRACKER, MAX_TRACKER_BYTES).decode(errors="replace")
    except (OSError, ConversionError):
        return None
    return int(text) if _NUMBER.fullmatch(text.strip()) else None


def companion(weights: CheckpointManifest, optimizer_path: str | Path) -> Path:
    """The directory with the optimizer's state of the same save.

    `optimizer_path` is that directory or the one it was saved to. NoOptimizer if it has none, or
    only that of another save.
    """
    root = contained.expanded(optimizer_path)
    if not root.is_dir():
        raise manifests.NoOptimizer(
            f"the optimizer's state cannot be read: {root} does not exist. Give the directory it "
            "was saved to, or load with fresh_optimizer=True to start a new one"
        )
    seen: list[str] = []
    # If a second save of the same step was killed before it reached the weights, the state that
    # belongs to them is next to the new one, under a hidden name.
    place = directory(root, weights.step)
    for path in (place, root, *sorted(root.glob(f".{place.name}.*"))):
        if not (path / NAME).is_file():
            continue
        found = manifests.read(path)
        if found.id == weights.id and OPTIMIZER in found.contains:
            return path
        what = "" if OPTIMIZER in found.contains else ", without an optimizer's state"
        seen.append(f"{path} is of step {found.step}, save {found.id}{what}")
    there = "; ".join(seen) or f"it has {_list_names(complete(root))}"
    raise manifests.NoOptimizer(
        f"{root} has no optimizer state for {weights.root or 'the weights'}, which is of step "
        f"{weights.step}, save {weights.id}: {there}. Give the directory it was saved to, or load "
        "with fresh_optimizer=True to start a new one"
    )


def reunite(weights_root: Path, optimizer_root: Path) -> None:
    """Rename the optimizer's state of the checkpoint to load back to its name, if a killed save has
    put its own there.
    """
    if weights_root == optimizer_root or not weights_root.is_dir():
        return
    try:
        weights = manifests.read(find(weights_root))
        if not weights.optimizer_elsewhere:
            return
        held = companion(weights, optimizer_root)
    except CheckpointError:
        return  # there is nothing complete to preserve
    place = directory(optimizer_root, weights.step)
    if held != place and held.name.startswith("."):
        publishing.put(held, place, held.with_name(f"{held.name}-aside"))
        publishing.flush_directory(optimizer_root)


def _follow_tracker(root: Path) -> Path:
    tracker = root / TRACKER
    try:
        text = contained.read(tracker, MAX_TRACKER_BYTES).decode(errors="replace").strip()
    except OSError as error:
        raise CheckpointError(f"{tracker} cannot be read: {error.strerror}") from error
    fix = f"write the step of a checkpoint into it ({_instead(root)}), or load one by its path"
    if not _NUMBER.fullmatch(text):
        raise CheckpointError(f"{tracker} holds {text[:40]!r}, which is not a step; {fix}")
    found = directory(root, int(text))
    if not found.is_dir():
        raise CheckpointError(f"{tracker} names step {text}, but there is no {found}; {fix}")
    if not _is_complete(found):
        raise CheckpointError(
            f"{tracker} names step {text}, but {found} has no {NAME}: another program wrote it, or "
            "files of it are lost. What other programs write is not resumed: give a directory of "
            f"its own for checkpoints, and `megatron-policy convert {found} OUT --to hf --config "
            "MODEL` makes a model to start from. Otherwise " + fix
        )
    try:
        return contained.inside(root, found.name)
    except ConversionError as error:
        raise CheckpointError(str(error)) from error


def _find_other(root: Path) -> str:
    """What a directory has that no save has left, and where to give it; "" if it is none known."""
    if any(root.glob(f".{PATTERN}.partial-*")):
        return ""
    if command := how_to_convert(root):
        return (
            f"what it has, no policy has saved, and it cannot be resumed. {command} makes a model "
            "of it to start from: policy.model_name"
        )
    if (root / ADAPTER_CONFIG).is_file():
        return "it has adapters, which policy.megatron_cfg.peft.start_from starts from"
    if (root / CONFIG).is_file():
        return "it is a Hugging Face model, which policy.model_name starts from"
    return ""


def _instead(root: Path) -> str:
    if found := complete(root):
        return f"it has {_list_names(found)}"
    if any(root.glob(f".{PATTERN}.partial-*")):
        return "a save to it was not finished, and no other before it"
    return f"it has no complete {PATTERN} directory"


def _list_names(found: list[Path]) -> str:
    return ", ".join(path.name for path in found) or f"no complete {PATTERN} directory"


def _is_complete(path: Path) -> bool:
    return bool(_STEP.fullmatch(path.name)) and (path / NAME).is_file()
