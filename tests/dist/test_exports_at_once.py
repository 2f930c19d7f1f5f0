"""Jobs that export onto one destination at once: what is visible there is always whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.soak.exports import MODEL, soak


@pytest.mark.parametrize("ranks_of_each", [1, 2])
def test_exports_at_once_leave_the_weights_of_one_of_them_whoever_is_killed(
    checkpoint: Callable[..., Path], tmp_path: Path, ranks_of_each: int
) -> None:
    worlds = (ranks_of_each, ranks_of_each)
    assert soak(checkpoint("qwen2", **MODEL), tmp_path / "exports", 6, worlds) == []
