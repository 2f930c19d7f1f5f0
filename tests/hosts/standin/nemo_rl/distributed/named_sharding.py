"""The rank grid as drivers and workers share it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class NamedSharding:
    """Ranks in an array with a name for each axis."""

    def __init__(self, layout: np.ndarray, names: Sequence[str]) -> None:
        self.layout, self.names = layout, list(names)

    def get_axis_size(self, name: str) -> int:
        return self.layout.shape[self.names.index(name)]

    def get_worker_coords(self, rank: int) -> dict[str, int]:
        where = np.argwhere(self.layout == rank)[0]
        return dict(zip(self.names, map(int, where), strict=True))
