"""The stand-in of NeMo RL, importable here and in workers."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

STANDIN = Path(__file__).parent / "standin"


@pytest.fixture(scope="module")
def nemo_rl_standin() -> Iterator[None]:
    """`import nemo_rl` finds the stand-in, and the host again afterwards, where there is one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(STANDIN)
        inherited = os.environ.get("PYTHONPATH")
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(STANDIN), inherited))))
        patch.delenv("MEGATRON_POLICY_PY", raising=False)
        patch.setenv("TORCH_CUDA_ARCH_LIST", "")
        patch.delenv("TORCH_CUDA_ARCH_LIST")
        unload("nemo_rl")
        yield
        unload("nemo_rl")


def unload(package: str) -> None:
    """Forget a package that was imported, with all that is in it."""
    for name in [name for name in sys.modules if f"{name}.".startswith(f"{package}.")]:
        del sys.modules[name]
