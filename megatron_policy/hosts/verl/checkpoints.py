"""Checkpoints inside verl's folders.

verl owns `global_step_N`, or `global_step_N/actor`, and writes files of its own there. Ours are in
`weights/`, `optimizer/` and, with `hf_model`, `huggingface/` below it.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Collection, Iterable
from pathlib import Path

from megatron_policy.errors import CheckpointError, ConfigError
from megatron_policy.policy import MegatronPolicy

_log = logging.getLogger(__name__)

WEIGHTS, OPTIMIZER, HUGGING_FACE = "weights", "optimizer", "huggingface"
_FOLDERS = {"model": WEIGHTS, "optimizer": OPTIMIZER, "hf_model": HUGGING_FACE}
"""Of verl's contents."""
LATEST = "latest_checkpointed_iteration.txt"
"""The file beside verl's folders that says which step to resume from."""


class VerlFolders:
    """Writes and reads an engine's checkpoints, and keeps the newest of those that it wrote."""

    def __init__(self) -> None:
        self._written: dict[Path, list[str]] = {}
        """The names below each folder, the newest last."""

    def save(
        self,
        policy: MegatronPolicy,
        folder: str,
        contents: Collection[str],
        *,
        most: int | None = None,
        names_latest: bool = False,
    ) -> None:
        """Write what `contents` names into `folder`. Once all of it is there, remove the oldest
        that this object wrote, until there are `most`. With `names_latest` also write the step of
        the folder's name where verl resumes from. Every rank calls it; rank 0 removes and names.

        ConfigError, before anything is written, for an optimizer without its model, and where the
        model for Hugging Face would be written over what the policy started from.
        """
        path = Path(folder).expanduser().absolute()
        if "optimizer" in contents and "model" not in contents:
            raise ConfigError(
                "checkpoint.save_contents has 'optimizer' without 'model': they are one "
                "checkpoint, so add 'model', or leave 'optimizer' out"
            )
        if "model" in contents:
            optimizer = path / OPTIMIZER if "optimizer" in contents else None
            export = path / HUGGING_FACE if "hf_model" in contents else None
            policy.save_checkpoint(path / WEIGHTS, optimizer, hf_export=export)
            policy.finalize_async_save()
        elif "hf_model" in contents:
            policy.export_hf(path / HUGGING_FACE, overwrite=True)
        if names_latest and policy.rank == 0:
            name_latest(path)
        self._written.pop(path, None)
        self._written[path] = [name for each, name in _FOLDERS.items() if each in contents]
        while most is not None and 0 < most < len(self._written):
            oldest = next(iter(self._written))
            written = self._written.pop(oldest)
            if policy.rank == 0:
                remove(oldest, written)

    def load(self, policy: MegatronPolicy, folder: str, contents: Collection[str]) -> None:
        """Read what `contents` names. CheckpointError if it is not in `folder`, ConfigError for
        contents without a model.
        """
        path = Path(folder).expanduser().absolute()
        if "model" not in contents:
            raise ConfigError(
                f"checkpoint.load_contents is {sorted(contents)}: add 'model', or set "
                "trainer.resume_mode to disable"
            )
        if not (path / WEIGHTS).is_dir():
            raise CheckpointError(
                f"{path} has no folder {WEIGHTS!r}: it is not a checkpoint of this engine. Another "
                "engine's cannot be gone on with: start from its model by model.path, with a new "
                "trainer.default_local_dir. The model is in model/huggingface/ (Megatron), or what "
                "`python -m verl.model_merger merge` makes (FSDP, use_dist_checkpointing)"
            )
        if "optimizer" not in contents:
            policy.load_checkpoint(path / WEIGHTS, fresh_optimizer=True)
            return
        if not (path / OPTIMIZER).is_dir():
            raise CheckpointError(
                f"{path} has no folder {OPTIMIZER!r}: it was saved without. To begin with a new "
                "optimizer set checkpoint.load_contents to [model]"
            )
        policy.load_checkpoint(path / WEIGHTS, path / OPTIMIZER)


def name_latest(path: Path) -> None:
    """Write the step of `global_step_N`, which is `path` or above it, to verl's file beside it."""
    for each in (path, *path.parents):
        if found := re.fullmatch(r"global_step_(\d+)", each.name):
            partial = each.with_name(f".{LATEST}")
            partial.write_text(found[1])
            os.replace(partial, each.with_name(LATEST))
            return
    _log.warning("%s is not within a folder global_step_N: %s is not written", path, LATEST)


def remove(path: Path, written: Iterable[str]) -> None:
    """Remove what was written of a checkpoint, and the folder unless there is more in it: files of
    verl's, or a model that a run started from. A folder that cannot be removed is named in the log.
    """
    try:
        for name in written:
            if (path / name).is_dir():
                shutil.rmtree(path / name)
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()
    except OSError as error:
        _log.warning("the checkpoint in %s could not be removed: %s", path, error)
        return
    _log.info("removed the checkpoint in %s", path)
