"""A driver probes an engine with its workers: what a probe calls is called in the driver."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron_policy.errors import RefitError
from megatron_policy.refit.probe import EngineProbe
from megatron_policy.refit.transports.disk import HfDirectory
from tests.dist.test_engine_probe import ModelEngine
from tests.dist.test_export import tensors_of
from tests.losses import TokenNLL
from tests.ray.policies import GBS, PP2, batch, config_of, opened


def test_a_driver_finds_what_is_stale(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    config = config_of(checkpoint, PP2)
    path = Path(config["model_name"])
    engine = ModelEngine(path, tmp_path / "engine")
    with opened(config, init_reference_model=False) as policy:

        def hand_over() -> int:
            step = policy.refit(HfDirectory(tmp_path / "sent", str(path), overwrite=True)).step
            for name, tensor in tensors_of(tmp_path / "sent").items():
                engine.load(name, tensor)
            return step

        probe = EngineProbe(engine.logprobs, hand_over, engine.mark_mixed, every=1)
        assert probe.refit(policy) == 0
        policy.train(batch(rows=GBS), TokenNLL())
        before = policy.worker_group.run_all("return_state_dict")
        engine.stale = {name for name in engine.weights if ".mlp." in name}
        with pytest.raises(RefitError, match=r"of step 1: .*It does not follow its mlp: these"):
            probe.refit(policy)
        after = policy.worker_group.run_all("return_state_dict")
        for old, new in zip(before, after, strict=True):
            assert all(torch.equal(old[name], new[name]) for name in old)
        assert engine.marks == 2
        engine.stale = set()
        assert probe.refit(policy) == 1 and probe.probes == 2
        assert policy.probe(probe).agrees

        def die(rows: object) -> None:
            raise OSError("the engine died")

        with pytest.raises(RefitError, match="could not be asked: OSError: the engine died"):
            policy.probe(EngineProbe(die))
