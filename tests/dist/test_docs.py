"""The code in the documents runs as it is written there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.dist.test_launch import ROOT


def python_blocks(document: str) -> list[str]:
    """The Python blocks of a document, in order."""
    return re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)


def test_the_readmes_examples_train_with_the_loss_of_the_loss_document(
    checkpoints, tmp_path: Path
) -> None:
    alone, under_ray = python_blocks("README.md")
    # One policy at a time in a process: the first is closed before workers take over.
    example = alone + "policy.shutdown()\n" + under_ray
    assert example.count("path/or/hub-id") == 1
    loss, *_ = python_blocks("docs/losses.md")
    (tmp_path / "my_losses.py").write_text(loss)
    (tmp_path / "example.py").write_text(example.replace("path/or/hub-id", str(checkpoints[True])))
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, "example.py"],
        cwd=tmp_path,
        env=environment | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("tensor([") >= 2
    assert (tmp_path / "trained" / "model.safetensors").is_file()
