"""The host's own mixin fetches rows for our worker and writes back what one rank has read."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_policy.hosts.nemo_rl.worker import NemoRLWorker
from tests.dist.cases import GLOBAL_BATCH, policy_config
from tests.dist.layouts import LENGTH, SIZES, VOCAB
from tests.losses import SequenceNLL

IDS = [f"row-{number}" for number in range(GLOBAL_BATCH)]


class Client:
    """The data plane of one process: the rows of a batch, and what comes back."""

    def __init__(self) -> None:
        made = torch.Generator().manual_seed(11)
        shape = (GLOBAL_BATCH, LENGTH)
        self.asked = 0
        self.written: dict[str, torch.Tensor] = {}
        self.rows = {
            "input_ids": torch.randint(0, VOCAB, shape, generator=made),
            "input_lengths": torch.full((GLOBAL_BATCH,), LENGTH),
            "token_mask": torch.ones(shape, dtype=torch.long),
            "sample_mask": torch.ones(GLOBAL_BATCH),
        }

    def get_samples(self, **call: Any) -> Any:
        self.asked += 1
        tensordict = importlib.import_module("tensordict")
        return tensordict.TensorDict(dict(self.rows), batch_size=[GLOBAL_BATCH])


def of_one_rank(path: Path) -> dict[str, Any]:
    """Reads and trains on rows that come from the data plane; what it has asked and written."""
    plane = importlib.import_module("nemo_rl.data_plane")
    columns = importlib.import_module("nemo_rl.data_plane.column_io")
    client = Client()
    meta = SimpleNamespace(
        sample_ids=IDS,
        partition_id="train",
        fields=list(client.rows),
        extra_info={},
        task_name="test",
    )
    config = policy_config(path, {"tensor_model_parallel_size": 2})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plane, "build_data_plane_client", lambda cfg, bootstrap: client)
        patch.setattr(columns, "write_columns", lambda to, meta, found: to.written.update(found))
        worker = NemoRLWorker(config)
        worker.setup_data_plane(cfg={})
        worker.get_logprobs_presharded(meta=meta)
        call = {"loss_fn": SequenceNLL(), "gbs": GLOBAL_BATCH, "mbs": 4}
        read = worker.get_logprobs(data=client.rows)["logprobs"]
        result = worker.train_presharded(meta=meta, **call)
        found = {"loss": result["global_loss"], "read": read, "split": in_parts(worker, meta, call)}
        worker.shutdown()
    return found | {"asked": client.asked, "written": client.written}


def in_parts(worker: NemoRLWorker, meta: Any, call: dict[str, Any]) -> dict[str, Any] | None:
    """The same step once more through the calls of the newest hosts, if this is one."""
    mixin = importlib.import_module("nemo_rl.data_plane.worker_mixin").TQWorkerMixin
    if not hasattr(mixin, "begin_train_step_presharded"):
        return None
    worker.begin_train_step_presharded(**call)
    worker.train_microbatch_presharded(meta=meta)
    return worker.finish_train_step_presharded()


def test_rows_are_fetched_once_and_answers_written_back_once(
    ranks: Any, checkpoint: Callable[..., Path]
) -> None:
    pytest.importorskip("nemo_rl.data_plane.worker_mixin", reason="this NeMo RL has no data plane")
    first, second = ranks.run(2, of_one_rank, checkpoint("qwen2", **SIZES))
    # The first rank of the replica fetches for both, and is the one that writes.
    assert first["asked"] >= 2 and second["asked"] == 0
    assert set(first["written"]) == {"prev_logprobs"} and not second["written"]
    assert torch.equal(first["written"]["prev_logprobs"], first["read"])
    assert torch.equal(first["loss"], second["loss"])
    torch.testing.assert_close(first["loss"], -first["read"][:, 1:].mean().reshape(1))
    if first["split"] is not None:
        assert first["split"]["is_replica_leader"] and not second["split"]["is_replica_leader"]
        assert first["split"]["global_loss"] < first["loss"]
