"""Megatron-Core loads what we write in its sharded format, and what it saves comes back as HF."""

from __future__ import annotations

import copy
import inspect
import math
import queue
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from megatron_policy.convert import convert, verify
from tests import oracle
from tests.checkpoints import make_checkpoint
from tests.dist.cases import open_policy, policy_config, read_everything
from tests.dist.layouts import SIZES, VOCAB
from tests.dist.shortcuts import UNUSED
from tests.exact import Exact, assert_equal
from tests.families import SAMPLES
from tests.mtp_checkpoints import add_mtp_layers

PP2 = {"pipeline_model_parallel_size": 2}
TP2_PP2 = PP2 | {"tensor_model_parallel_size": 2}
# Family and layout: tied or not, with biases, norms on queries and keys, norms of outputs, experts
# beside dense layers, experts stacked in HF tensors, latent attention.
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen2": ({"tied": True}, TP2_PP2),
    "qwen3": ({}, TP2_PP2),
    "gemma2": ({"tied": True}, TP2_PP2),
    "qwen2_moe": ({}, TP2_PP2 | {"sequence_parallel": True}),
    "gpt_oss": ({}, PP2),
    "deepseek_v3": ({}, PP2),
}


@contextmanager
def models(config: dict[str, Any]) -> Iterator[tuple[Any, list[Any]]]:
    with open_policy(config, **UNUSED) as policy:
        yield policy, list(policy._engine.pipeline.chunks)


def world(layout: dict[str, Any]) -> int:
    return math.prod(n for name, n in layout.items() if name.endswith("_size"))


def sharded(chunk: Any, prefix: str = "", **content: Any) -> Any:
    from megatron.core import parallel_state

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return chunk.sharded_state_dict(prefix, metadata={"dp_cp_group": group, **content})


def load(config: dict[str, Any], path: str, tokens: torch.Tensor) -> dict[str, Any]:
    """Load over other weights; which parameters differ from HF's, and the logits."""
    from megatron.core import dist_checkpointing

    with models(config) as (policy, [chunk]), torch.no_grad():
        wanted = {name: p.detach().clone() for name, p in policy.named_parameters()}
        for _, parameter in policy.named_parameters():
            parameter.normal_()
        content = dist_checkpointing.load_content_metadata(path)
        state = dist_checkpointing.load({"model": sharded(chunk, **content)}, path)
        chunk.load_state_dict(state["model"])
        differ = [n for n, p in policy.named_parameters() if not torch.equal(p, wanted[n])]
        return {"differ": differ, **read_everything(policy, tokens, VOCAB)}


@pytest.mark.parametrize("family", MODELS)
def test_megatron_loads_a_converted_checkpoint_and_gives_the_logits_of_hf(
    ranks, checkpoint, tmp_path, family: str
) -> None:
    options, layout = MODELS[family]
    path = checkpoint(family, **options, **SIZES)
    convert(path, tmp_path / "mcore", "mcore")
    tokens = oracle.make_batch(4, 11, VOCAB)["input_ids"]
    logits = Exact.of(path, lambda m: m(tokens).logits)
    config = policy_config(path, layout)
    for seen in ranks.run(world(layout), load, config, str(tmp_path / "mcore"), tokens):
        assert seen["differ"] == []
        assert_equal("logits", seen["logits"], logits)


def asked_for(config: dict[str, Any], of_mtp: bool) -> tuple[dict[str, Any], set[str]]:
    """What the built model wants of a checkpoint, or Megatron-Core's own with an MTP layer of that
    layer: tensors by key with their shapes, and objects.
    """
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    tensors, objects = {}, set()
    with models(config) as (policy, [chunk]):
        architecture = policy._engine.table.architecture
        model, prefix = chunk, ""
        if of_mtp and architecture.has_single_parts:
            model, prefix = hybrid_mtp_layer(architecture, chunk.config), "mtp."
        elif of_mtp:
            model = with_mtp_layer(architecture, chunk.config)
        state = sharded(model, prefix, non_homogeneous_layers=not architecture.uniform_layers)
        apply_factories(state)
        for value in nested_values(state):
            if of_mtp and not value.key.startswith("mtp."):
                continue
            if isinstance(value, ShardedTensor):
                tensors[value.key] = tuple(value.global_shape)
            else:
                objects.add(value.unique_key)
    return tensors, objects


def with_mtp_layer(architecture: Any, config: Any) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

    from megatron_policy.engines.megatron.layer_spec import block_spec

    own = copy.copy(config)
    own.mtp_num_layers = 1
    block = block_spec("local", architecture, range(architecture.num_layers), own)
    return GPTModel(
        config=own,
        transformer_layer_spec=block,
        vocab_size=256,
        max_sequence_length=64,
        position_embedding_type="rope",
        mtp_block_spec=get_gpt_mtp_block_spec(own, block, use_transformer_engine=False),
    )


def hybrid_mtp_layer(architecture: Any, config: Any) -> Any:
    """Of a model whose layers have one part each: attention, and experts."""
    from megatron.core.models.hybrid.hybrid_block import HybridStackSubmodules
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear
    from megatron.core.transformer import multi_token_prediction as package
    from megatron.core.transformer.spec_utils import ModuleSpec

    from megatron_policy.engines.megatron.layer_spec import final_norm, layer_spec

    def spec_of(has: Any) -> Any:
        number = next(n for n, layer in enumerate(architecture.layers) if has(layer))
        return layer_spec("local", architecture, own, number)

    own = copy.copy(config)
    own.mtp_num_layers, norm = 1, final_norm("local", architecture)
    given = package.MultiTokenPredictionLayerSubmodules(
        enorm=norm, hnorm=norm, layer_norm=norm, eh_proj=ColumnParallelLinear
    )
    layer = ModuleSpec(module=package.MultiTokenPredictionLayer, submodules=given)
    return package.MultiTokenPredictionBlock(
        own,
        ModuleSpec(
            module=package.MultiTokenPredictionBlock,
            submodules=package.MultiTokenPredictionBlockSubmodules(layer_specs=[layer]),
        ),
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        mtp_layer_pattern="*E",
        mtp_num_depths=1,
        hybrid_submodules=HybridStackSubmodules(
            attention_layer=spec_of(lambda layer: layer.mixer is architecture.mixer),
            moe_layer=spec_of(lambda layer: layer.feed is architecture.moe),
        ),
    )


def assert_has_what_is_asked_for(ranks, path: Path, folder: Path, mtp: bool) -> None:
    """Beside it a converted checkpoint has only Transformer Engine's names of norms."""
    convert(path, folder, "mcore")
    held = FileSystemReader(folder).read_metadata().state_dict_metadata
    shapes = {
        key: tuple(found.size)
        for key, found in held.items()
        if hasattr(found, "size") and key.startswith("mtp." if mtp else "")
    }
    ((tensors, objects),) = ranks.run(1, asked_for, policy_config(path, {}), mtp)
    assert tensors and tensors == {key: shapes.get(key) for key in tensors}
    assert objects <= set(held) - set(shapes)
    assert all("norm" in key for key in set(shapes) - set(tensors))


@pytest.mark.parametrize("family", SAMPLES)
def test_a_converted_checkpoint_has_every_key_that_the_model_asks_for(
    ranks, checkpoint, tmp_path, family: str
) -> None:
    path = checkpoint(family, layers=3, vocab=256)
    assert_has_what_is_asked_for(ranks, path, tmp_path / "mcore", mtp=False)


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "mimo", "nemotron_h"])
def test_a_converted_mtp_layer_has_the_keys_of_megatrons_own(ranks, tmp_path, family: str) -> None:
    if family == "nemotron_h":
        pytest.importorskip("megatron.core.models.hybrid", reason="has such a layer")
    sizes = {"hidden": 48, "heads": 4, "layers": 3, "ffn": 40, "vocab": 256, "tokenizer": False}
    path = add_mtp_layers(make_checkpoint(tmp_path / "hf", family, **sizes))
    assert_has_what_is_asked_for(ranks, path, tmp_path / "mcore", mtp=True)


def save(config: dict[str, Any], path: str, content: dict[str, Any]) -> None:
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    # For results that stay in this process; its own would start a server of queues for each rank.
    filesystem_async._results_queue = queue.Queue()
    options = {"content_metadata": content}
    if "async_strategy" in inspect.signature(dist_checkpointing.save).parameters:
        options["async_strategy"] = "mcore"  # the default needs another package
    with models(config) as (policy, [chunk]):
        if policy.rank == 0:
            Path(path).mkdir()
        torch.distributed.barrier()
        state = {"model": sharded(chunk, **content), "iteration": 7, "args": {"lr": 0.5}}
        dist_checkpointing.save(state, path, **options)


APART = {"non_homogeneous_layers": True}
SAVED: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in MODELS},
    "layers apart": ("qwen2", APART),
    "halves of gated MLPs apart": ("qwen2", APART | {"singleton_local_shards": True}),
    "halves and experts apart": ("qwen2_moe", APART | {"singleton_local_shards": True}),
}


@pytest.mark.parametrize("saved", SAVED)
def test_what_megatron_saves_converts_to_hf_bit_by_bit(ranks, checkpoint, tmp_path, saved) -> None:
    family, content = SAVED[saved]
    options, layout = MODELS[family]
    path = checkpoint(family, **options, **SIZES)
    run = tmp_path / "run"
    run.mkdir()
    (run / "latest_checkpointed_iteration.txt").write_text("7")
    target = str(run / "iter_0000007")
    ranks.run(world(layout), save, policy_config(path, layout), target, content)
    convert(run, tmp_path / "hf", "hf", max_memory=2**20, config=path)
    comparison = verify(path, tmp_path / "hf")
    assert comparison.equal and comparison.tensors > 20
    assert verify(run, path).equal
