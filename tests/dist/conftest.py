"""Checkpoints that the layout tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoints import make_checkpoint
from tests.dist.layouts import FAMILIES, VOCAB


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    root = tmp_path_factory.mktemp("layouts")
    return {
        tied: make_checkpoint(
            root / family, family, tied=tied, layers=4, heads=4, groups=2, hidden=64, vocab=VOCAB
        )
        for tied, family in FAMILIES.items()
    }
