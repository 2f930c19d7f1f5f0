"""Runs a measuring program in a fresh Python process; knows nothing of what it measures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

# One thread: CPU seconds are then work, not waiting. No GPU: these rows are of the CPU.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONWARNINGS": "ignore",
}


def run_fresh(module: str, *arguments: str | Path) -> dict[str, Any]:
    """Run `python -m module arguments` and return the JSON object on its last line of output.

    RuntimeError with what it wrote to stderr if it failed.
    """
    command = [sys.executable, "-m", module, *map(str, arguments)]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | ENVIRONMENT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(command[2:])} ended with status {done.returncode}:\n{done.stderr[-4000:]}"
        )
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result
