"""Converted layers for multi-token prediction have the keys that Megatron-Core's own modules ask
for.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
from torch.distributed.checkpoint import FileSystemReader

from megatron_policy.convert import convert
from tests.checkpoints import make_checkpoint
from tests.dist.cases import policy_config
from tests.dist.test_dist_checkpoints import models, sharded
from tests.mtp_checkpoints import add_mtp_layers

SMALL = {"hidden": 48, "heads": 4, "layers": 3, "ffn": 40, "vocab": 256, "tokenizer": False}


def asked_by_megatron(config: dict[str, Any]) -> tuple[dict[str, tuple[int, ...]], set[str]]:
    """What Megatron-Core's model with an MTP layer wants of a checkpoint for that layer."""
    with models(config) as (policy, [chunk]):
        from megatron.core.dist_checkpointing.dict_utils import nested_values
        from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

        from megatron_policy.engines.megatron.layer_spec import block_spec

        architecture = policy._engine.table.architecture
        own = copy.copy(chunk.config)
        own.mtp_num_layers = 1
        block = block_spec("local", architecture, range(architecture.num_layers), own)
        built = GPTModel(
            config=own,
            transformer_layer_spec=block,
            vocab_size=256,
            max_sequence_length=64,
            position_embedding_type="rope",
            mtp_block_spec=get_gpt_mtp_block_spec(own, block, use_transformer_engine=False),
        )
        tensors, objects = {}, set()
        state = sharded(built, non_homogeneous_layers=not architecture.uniform_layers)
        apply_factories(state)
        for value in nested_values(state):
            if not value.key.startswith("mtp."):
                continue
            if isinstance(value, ShardedTensor):
                tensors[value.key] = tuple(value.global_shape)
            else:
                objects.add(value.unique_key)
        return tensors, objects


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "mimo"])
def test_keys_and_shapes_are_those_of_megatrons_own_layer(ranks, tmp_path, family: str) -> None:
    path = add_mtp_layers(make_checkpoint(tmp_path / "hf", family, **SMALL))
    convert(path, tmp_path / "mcore", "mcore")
    held = FileSystemReader(tmp_path / "mcore").read_metadata().state_dict_metadata
    shapes = {
        key: tuple(found.size)
        for key, found in held.items()
        if hasattr(found, "size") and key.startswith("mtp.")
    }
    ((tensors, objects),) = ranks.run(1, asked_by_megatron, policy_config(path, {}))
    assert tensors and tensors == {key: shapes.get(key) for key in tensors}
    assert objects <= set(held)
    assert all("norm" in key for key in set(shapes) - set(tensors))
