"""What would send wrong weights, or train what is not there, is refused and costs nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_policy.errors import ConfigError, RefitError
from megatron_policy.policy import MegatronPolicy
from megatron_policy.refit.transports.ipc.handles import IpcHandles
from tests.dist.test_refit_export import config_of
from tests.dist.test_refit_faults import KeepingTransport
from tests.losses import TokenNLL
from tests.oracle import make_batch
from tests.ranks import RankPool

ROWS = 2


def misuse(path: Path) -> dict[str, torch.Tensor]:
    optimizer = {"optimizer": {"optimizer": "adam", "lr": 0.01}}
    policy = MegatronPolicy(config_of(path, optimizer))
    batch = make_batch(ROWS, 8, 256)
    try:
        policy.train(batch, TokenNLL())
        with policy.reference():
            for call in (
                lambda: policy.refit(KeepingTransport()),
                lambda: next(policy.export()),
                lambda: policy.export_hf(path.with_name("never")),
                lambda: policy.train(batch, TokenNLL()),
            ):
                with pytest.raises(ConfigError, match="has to wait until the reference policy"):
                    call()
            policy.logprobs(batch)
        assert policy.steps == 1
        half_read = policy.export()
        next(half_read)
        with pytest.raises(ConfigError, match=r"train\(\) has to wait until export\(\)"):
            policy.train(batch, TokenNLL())
        with pytest.raises(ConfigError, match="has to wait until"), policy.reference():
            pass
        half_read.close()
        _mixed_handles(policy, batch)
        transport = KeepingTransport()
        assert policy.refit(transport).step == policy.steps == 2
        with pytest.raises(ConfigError, match=r"cannot be handed over as torch\.int8"):
            next(policy.export(torch.int8))
        assert transport.session is not None
        return {"sent": transport.session.found, "exported": dict(policy.export())}
    finally:
        policy.shutdown()


def _mixed_handles(policy: MegatronPolicy, batch: Any) -> None:
    handles = IpcHandles(policy.exporter)
    names = list(policy.exporter.plan().info())
    with pytest.raises(RefitError, match="nothing was exported"):
        handles.manifest(policy.steps)
    handles.weights(names[:3], policy.steps)
    policy.train(batch, TokenNLL())
    with pytest.raises(RefitError, match=r"exported at step 1, and this is step 2.*Begin again"):
        handles.weights(names[3:], policy.steps)
    handles.weights(names, policy.steps)
    assert list(handles.manifest(policy.steps).tensors) == names
    handles.release()


def test_neither_reference_weights_nor_those_of_two_steps_are_sent(
    ranks: RankPool, checkpoint: Any
) -> None:
    (result,) = ranks.run(1, misuse, checkpoint("qwen2"))
    assert result["sent"].keys() == result["exported"].keys()
    for name, tensor in result["sent"].items():
        assert torch.equal(tensor, result["exported"][name])


def handed_over(path: Path, dtype: str) -> Any:
    config = config_of(path, {}) | {"refit_dtype": dtype}
    policy = MegatronPolicy(config, init_optimizer=False, init_reference_model=False)
    try:
        transport = KeepingTransport()
        policy.refit(transport)
        policy.export_hf(path.with_name("as-stored"))
        assert transport.session is not None
        return policy.exporter.plan().info(), {
            n: t.dtype for n, t in transport.session.found.items()
        }
    finally:
        policy.shutdown()


def test_one_setting_says_what_engines_are_told_and_handed(
    ranks: RankPool, checkpoint: Any, tmp_path: Path
) -> None:
    from tests.checkpoints import make_checkpoint
    from tests.dist.test_export import tensors_of

    path = make_checkpoint(tmp_path / "model", "deepseek_v3", tokenizer=False)
    ((info, found),) = ranks.run(1, handed_over, path, "bfloat16")
    assert {name: dtype for name, (_, dtype) in info.items()} == found
    bias = {name for name in found if name.endswith("e_score_correction_bias")}
    assert bias and {found[name] for name in bias} == {torch.float32}
    assert {found[name] for name in found.keys() - bias} == {torch.bfloat16}
    stored = tensors_of(tmp_path / "as-stored")
    assert {tensor.dtype for tensor in stored.values()} == {torch.float32}
