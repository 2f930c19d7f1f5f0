"""A model that is built without reading weights shows what was not filled afterwards."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_policy.config import PolicyConfig
from megatron_policy.config.layout import topology_of
from megatron_policy.converters.formats.hf_files import read_config
from megatron_policy.converters.table import bind
from megatron_policy.device.process_groups import join_process_group
from megatron_policy.engines.hugging_face import assemble as fsdp
from megatron_policy.engines.megatron import assemble as megatron
from megatron_policy.engines.megatron.platform import prepare_platform
from megatron_policy.engines.megatron.process_groups import drop_groups
from megatron_policy.errors import CheckpointError
from megatron_policy.interfaces.engine import TrainingEngine
from megatron_policy.weights.load import refuse_unfilled
from tests.dist.cases import policy_config


def assembled(
    config: dict[str, Any], source_dtypes: dict[str, torch.dtype] | None = None
) -> TrainingEngine:
    parsed = PolicyConfig.parse(config)
    builder = fsdp if parsed.dtensor_cfg.enabled else megatron
    return builder.build(
        parsed,
        bind(read_config(parsed.model_name)),
        topology_of(parsed, dist.get_world_size()),
        init_optimizer=True,
        timeout_s=300.0,
        source_dtypes=source_dtypes,
    )


def unread(config: dict[str, Any], bare: Path) -> None:
    """Asserts, on a rank, that a model built from `bare` is refused until all of it is filled."""
    prepare_platform()
    join_process_group(60.0)
    read = assembled(config)
    drop_groups()
    config |= {"model_name": str(bare)}
    first, *others = read.table.hf_shapes()
    with pytest.raises(CheckpointError, match=f"not of the model .* does not have {first}"):
        assembled(config, {name: read.source_dtypes[name] for name in others})
    drop_groups()
    assembly = assembled(config, read.source_dtypes)
    try:
        assert assembly.source_dtypes == read.source_dtypes
        own = [(entry.megatron, p) for entry, p in assembly.held]
        assert assembly.trainable is not None
        state = assembly.trainable.state
        mains = [("its main", each.tensor) for each in state.tensors()]
        assert len(own) == len(read.held)
        # FSDP2 trains the weights themselves, which are fp32.
        assert bool(mains) != ("dtensor_cfg" in config)
        for named in (*own, *mains):
            assert bool(named[1].isnan().all()), named[0]
            with pytest.raises(CheckpointError, match=named[0]):
                refuse_unfilled([named])
        for (_, weight), (_, parameter) in zip(read.held, own, strict=True):
            with pytest.raises(CheckpointError, match="nothing was loaded into"):
                refuse_unfilled(own)
            parameter.data.copy_(weight)
        refuse_unfilled(own)
        state.restart()
        refuse_unfilled(("its main", each.tensor) for each in state.tensors())
    finally:
        assembly.close()
        drop_groups()


@pytest.mark.parametrize("section", [{}, {"dtensor_cfg": {}}], ids=["Megatron-Core", "FSDP2"])
def test_what_nobody_filled_is_named_after_a_start_without_weights(
    ranks, checkpoint, tmp_path, section: dict[str, Any]
) -> None:
    sizes = {"layers": 2, "heads": 4, "groups": 2, "hidden": 32, "ffn": 48, "vocab": 251}
    path = checkpoint("deepseek_v3", dtype="bfloat16", **sizes)
    bare = tmp_path / "bare"
    shutil.copytree(path, bare, ignore=shutil.ignore_patterns("*.safetensors*"))
    assert not list(bare.glob("*.safetensors*"))
    ranks.run(1, unread, policy_config(path, section, precision="bfloat16"), bare)
