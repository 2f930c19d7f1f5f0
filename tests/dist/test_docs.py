"""The code in the documents runs as it stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.dist.test_launch import ROOT


def python_block(document: str) -> str:
    """The first Python block of a document."""
    match = re.search(r"```python\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)
    assert match is not None, document
    return match[1]


def test_the_readmes_example_trains_with_the_loss_of_the_loss_document(
    checkpoints, tmp_path: Path
) -> None:
    example = python_block("README.md")
    assert example.count("path/or/hub-id") == 1
    (tmp_path / "my_losses.py").write_text(python_block("docs/losses.md"))
    (tmp_path / "example.py").write_text(example.replace("path/or/hub-id", str(checkpoints[True])))
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, "example.py"],
        cwd=tmp_path,
        env=environment | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "tensor([" in done.stdout
    assert (tmp_path / "trained" / "model.safetensors").is_file()
