"""One rank's part in training checkpoints, under the host's method names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatron_policy.workers.checks import refuse_unknown

if TYPE_CHECKING:
    from megatron_policy.checkpoint.report import LoadReport, SaveReport
    from megatron_policy.policy import MegatronPolicy


class WorkerCheckpoint:
    """Saves and loads training checkpoints, collectively. A refused or failed call leaves this rank
    and the checkpoints on disk as they were.
    """

    policy: MegatronPolicy

    def save_checkpoint(
        self,
        weights_path: str,
        optimizer_path: str | None = None,
        tokenizer_path: str | None = None,
        *,
        host_data: Mapping[str, Any] | None = None,
        hf_export: str | None = None,
        checkpointing_cfg: Any = None,
        **options: Any,
    ) -> SaveReport | None:
        """Write this rank's part of a checkpoint; see `MegatronPolicy.save_checkpoint`.
        `checkpointing_cfg` is the host's and has no effect.

        CheckpointError on every rank if any of them could not write, or if the previous background
        save has failed. State in host memory is first moved to the device, and stays there.
        """
        refuse_unknown("save_checkpoint", options)
        return self.policy.save_checkpoint(
            weights_path,
            optimizer_path,
            tokenizer_path,
            host_data=host_data,
            hf_export=hf_export,
            onload=True,
        )

    def load_checkpoint(
        self,
        weights_path: str,
        optimizer_path: str | None = None,
        *,
        fresh_optimizer: bool | None = None,
    ) -> LoadReport:
        """Resume from a checkpoint saved under any layout; see `MegatronPolicy.load_checkpoint`.

        CheckpointError on every rank, before anything is changed, if any of it is damaged, missing
        or another model's.
        """
        return self.policy.load_checkpoint(
            weights_path, optimizer_path, fresh_optimizer=fresh_optimizer
        )

    def get_load_report(self) -> LoadReport | None:
        """What a start from a checkpoint has restored; None without such a start."""
        return self.policy.loaded

    def finalize_async_save(self) -> SaveReport | None:
        """Wait for a background save to complete, and return the report of the last one;
        CheckpointError if it failed.

        It waits for this rank's writer only, so ranks may call it at different times.
        """
        return self.policy.finalize_async_save()
