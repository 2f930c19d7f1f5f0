"""Copies of checkpoints with other tensors, other fields in their configs, or a flipped bit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]


def edit(
    source: Path, path: Path, change: Callable[[Tensors], object] | None = None, **fields: Any
) -> Path:
    """A copy of a Hugging Face checkpoint in one file, with a change of its tensors, and with other
    fields in its config.
    """
    shutil.copytree(source, path)
    if change is not None:
        change_tensors(path / "model.safetensors", change)
    set_fields(path / "config.json", **fields)
    return path


def change_tensors(file: Path, change: Callable[[Tensors], object]) -> None:
    """Write a file of tensors anew, after `change` has changed their dictionary."""
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def rename(names: Mapping[str, str]) -> Callable[[Tensors], object]:
    """The change that puts something else in the place of these parts of names."""

    def change(tensors: Tensors) -> None:
        for name in [*tensors]:
            for part, other in names.items():
                if part in name:
                    tensors[name.replace(part, other)] = tensors.pop(name)

    return change


def set_fields(file: Path, **fields: Any) -> None:
    """Set fields of a JSON file."""
    if fields:
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))
