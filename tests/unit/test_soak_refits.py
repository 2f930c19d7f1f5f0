"""A few of the refits that `python -m tests.soak.refits 2000` makes many of."""

from __future__ import annotations

import pytest

from tests.soak.refits import PROTOCOLS, soak


@pytest.mark.parametrize("pause_s", [0.0, 0.06])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_refits_that_follow_each_other_at_once_all_succeed(protocol: str, pause_s: float) -> None:
    assert soak(protocol, 20, pause_s).failures == []
