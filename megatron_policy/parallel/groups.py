"""The process groups of a rank, for any engine."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True)
class Groups:
    """The process groups this rank belongs to; `dp` excludes context parallelism, `dp_cp` includes
    it.
    """

    tp: dist.ProcessGroup
    pp: dist.ProcessGroup
    dp: dist.ProcessGroup
    cp: dist.ProcessGroup
    dp_cp: dist.ProcessGroup

    @property
    def last_stage(self) -> int:
        """Global rank of this pipeline's last stage."""
        return dist.get_global_rank(self.pp, self.pp.size() - 1)
