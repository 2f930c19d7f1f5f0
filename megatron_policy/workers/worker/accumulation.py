"""One rank's part in steps trained in parts, under the host's method names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_policy.interfaces import LossFunction
    from megatron_policy.policy import MegatronPolicy


class WorkerAccumulation:
    """Trains one step at a time in parts; see `GradientAccumulator`.

    All ranks are called in the same order.
    """

    policy: MegatronPolicy

    def begin_train_step(
        self, loss_fn: LossFunction, gbs: int | None = None, mbs: int | None = None
    ) -> None:
        """Open a step that advances the schedule by `gbs` samples; padded data are split into
        microbatches of `mbs` rows. ConfigError while one is open.
        """
        self.policy.begin_train_step(loss_fn, gbs, mbs)

    def train_microbatch(self, data: Mapping[str, Any]) -> None:
        """Add the gradients of any number of this data-parallel rank's rows. A BatchError leaves
        the step as it was; after any other error it can only be aborted.
        """
        self.policy.train_microbatch(data)

    def finish_train_step(self) -> dict[str, Any]:
        """Take the step; return what `train` does for one global batch."""
        result: dict[str, Any] = self.policy.finish_train_step()
        return result

    def abort_train_step(self) -> None:
        """Drop the open step, if any, and its gradients."""
        self.policy.abort_train_step()
