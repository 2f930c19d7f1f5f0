"""Checkpoints of models with recurrences: Megatron-Core loads what is converted, under the keys of
its own layers, and training goes on from what is saved.
"""

from __future__ import annotations

import copy
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megatron_policy.convert import convert, verify
from tests import oracle
from tests.dist.cases import policy_config
from tests.dist.layouts import FSDP2_LAYOUTS, LAYOUTS, VOCAB, layout
from tests.dist.resuming import CONSTANT
from tests.dist.test_dist_checkpoints import (
    PP2,
    TP2_PP2,
    assert_has_what_is_asked_for,
    load,
    models,
    save,
    world,
)
from tests.dist.test_hybrids import HYBRIDS
from tests.dist.test_resume import BF16, SHARDED, Case, assert_goes_on, on_disk
from tests.exact import Exact, assert_equal
from tests.families import SAMPLES

CONVERTED = {"qwen3_next": PP2, "nemotron_h": TP2_PP2, "lfm2": TP2_PP2}


@pytest.mark.nightly
@pytest.mark.parametrize("family", CONVERTED)
def test_megatron_loads_a_converted_checkpoint_and_gives_the_logits_of_hf(
    ranks, checkpoint, tmp_path: Path, family: str
) -> None:
    path = checkpoint(family, **HYBRIDS[family])
    convert(path, tmp_path / "mcore", "mcore")
    tokens = oracle.make_batch(4, 11, VOCAB)["input_ids"]
    logits = Exact.of(path, lambda m: m(tokens).logits)
    sizes = CONVERTED[family]
    given = (policy_config(path, sizes), str(tmp_path / "mcore"), tokens)
    for seen in ranks.run(world(sizes), load, *given):
        assert seen["differ"] == []
        assert_equal("logits", seen["logits"], logits)


@pytest.mark.nightly
@pytest.mark.parametrize("family", [name for name in HYBRIDS if name in SAMPLES])
def test_a_converted_checkpoint_has_every_key_that_the_model_asks_for(
    ranks, checkpoint, tmp_path: Path, family: str
) -> None:
    path = checkpoint(family, vocab=256)
    assert_has_what_is_asked_for(ranks, path, tmp_path / "mcore", mtp=False)


@pytest.mark.nightly
@pytest.mark.parametrize("family", CONVERTED)
def test_what_megatron_saves_converts_to_hf_bit_by_bit(
    ranks, checkpoint, tmp_path: Path, family: str
) -> None:
    path, sizes = checkpoint(family, **HYBRIDS[family]), CONVERTED[family]
    run = tmp_path / "run"
    run.mkdir()
    (run / "latest_checkpointed_iteration.txt").write_text("7")
    target = str(run / "iter_0000007")
    content = {"non_homogeneous_layers": True}
    ranks.run(world(sizes), save, policy_config(path, sizes), target, content)
    convert(run, tmp_path / "hf", "hf", max_memory=2**20, config=path)
    comparison = verify(path, tmp_path / "hf")
    assert comparison.equal and comparison.tensors > 20
    assert verify(run, path).equal


class Scale(torch.nn.Module):
    """Stands for the weight of a norm that a package would compute."""

    def __init__(self, hidden_size: int, **_: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(hidden_size))


class SharedScale(Scale):
    """The same, which ranks share."""

    def sharded_state_dict(self, prefix: str, sharded_offsets: Any, metadata: Any) -> Any:
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        state = self.state_dict(keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, {"weight": 0}, sharded_offsets)


def their_delta_net(part: Any, config: Any, given: dict[str, Any]) -> Any:
    from megatron.core.ssm import gated_delta_net as package
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    modules = package.GatedDeltaNetSubmodules(ColumnParallelLinear, Scale, RowParallelLinear)
    config.linear_conv_kernel_dim, config.deterministic_mode = part.taps, True  # in torch
    for name in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim"):
        setattr(config, f"linear_{name}", getattr(part, name))
    home: ModuleType = getattr(package, "common", package)
    with patch.object(home, "HAVE_FLA", True):
        return package.GatedDeltaNet(config, modules, **given)


def their_mamba(part: Any, config: Any, given: dict[str, Any]) -> Any:
    from megatron.core.ssm import mamba_mixer as package
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    modules = package.MambaMixerSubmodules(ColumnParallelLinear, RowParallelLinear)
    config.mamba_state_dim, config.mamba_head_dim = part.state_size, part.head_dim
    config.mamba_num_groups, config.mamba_num_heads = part.groups, part.num_heads
    there = {"HAVE_MAMBA_SSM": True, "HAVE_EINOPS": True, "ExtendedRMSNorm": SharedScale}
    with patch.multiple(package, **there, MambaContextParallel=lambda **_: None):
        return package.MambaMixer(config, modules, config.hidden_size, d_conv=part.taps, **given)


THEIRS = {
    "qwen3_next": ("self_attention", their_delta_net),
    "nemotron_h": ("mixer", their_mamba),
}


def load_into_their_layer(config: dict[str, Any], path: str, family: str) -> dict[str, bool]:
    """What Megatron-Core's own layer asks for, and whether it has what our first layer has."""
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    place, make = THEIRS[family]
    prefix = f"decoder.layers.0.{place}."
    with models(config) as (policy, [chunk]), torch.no_grad():
        groups = ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])
        given = {"layer_number": 1, "pg_collection": groups}
        part = policy._engine.table.architecture.find_layer(0).mixer
        theirs = make(part, copy.copy(chunk.config), given)
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        state = theirs.sharded_state_dict(prefix, metadata={"dp_cp_group": group})
        loaded = dist_checkpointing.load(state, path)
        held = {name: p for name, p in policy.named_parameters() if name.startswith(prefix)}
        # Newer releases hold a convolution's parameters themselves.
        names = {name: name.replace("conv1d_", "conv1d.") for name, _ in theirs.named_parameters()}
        assert {prefix + name for name in names.values()} == held.keys()
        return {
            name: torch.equal(loaded[prefix + name], held[prefix + own])
            for name, own in names.items()
        }


@pytest.mark.parametrize("family", THEIRS)
def test_layers_of_megatron_core_load_what_is_converted(
    ranks, checkpoint, tmp_path: Path, family: str
) -> None:
    """In the installed release, without the kernels that they would compute with."""
    if family == "nemotron_h":
        pytest.importorskip("triton")
    path = checkpoint(family, **HYBRIDS[family])
    convert(path, tmp_path / "mcore", "mcore")
    config = policy_config(path, {"tensor_model_parallel_size": 2, "sequence_parallel": True})
    for seen in ranks.run(2, load_into_their_layer, config, str(tmp_path / "mcore"), family):
        assert all(seen.values()), seen


CP2, FSDP2 = layout(2, context_parallel_size=2), FSDP2_LAYOUTS["FSDP2 x 2"]
MOVES = {
    "qwen3_next, TP2+SP -> CP2": ("qwen3_next", LAYOUTS["TP2+SP"], CP2, {}),
    "nemotron_h, TP2 -> PP2xVPP2": ("nemotron_h", LAYOUTS["TP2"], LAYOUTS["PP2xVPP2"], {}),
    "nemotron_h, CP2 -> TP2": ("nemotron_h", CP2, LAYOUTS["TP2"], {}),
    "qwen3_next, FSDP2 x 2 -> TP2+SP": ("qwen3_next", FSDP2, LAYOUTS["TP2+SP"], {}),
    "nemotron_h, PP2xVPP2 -> FSDP2 x 2": ("nemotron_h", LAYOUTS["PP2xVPP2"], FSDP2, {}),
    "qwen3_next, bf16, DP2 -> TP2xPP2": (
        "qwen3_next",
        layout(2, **SHARDED),
        layout(4, tp=2, pp=2, sequence_parallel=True),
        BF16,
    ),
    "nemotron_h, bf16, TP2 -> DP2": ("nemotron_h", LAYOUTS["TP2"], layout(2, **SHARDED), BF16),
}


@pytest.mark.parametrize("name", MOVES)
def test_training_goes_on_under_another_layout(
    ranks, checkpoint, tmp_path: Path, name: str
) -> None:
    """In bf16 what is held in fp32 has no main parameters of its own."""
    family, *layouts, top = MOVES[name]
    saver, loader = (Case(each, CONSTANT, top, family) for each in layouts)
    assert_goes_on(ranks, checkpoint(family, **HYBRIDS[family]), saver, loader, tmp_path)
    wide = ("A_log", ".D", "out_norm.weight")
    main = [key for key in on_disk(tmp_path / "saved", 2) if "fp32_param" in key]
    assert bool(main) == bool(top) and not any(key.endswith(wide) for key in main)
