"""Counts of floating-point operations against torch's own counter on transformers' models."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from megatron_policy.adapters.targets import bind_tables
from megatron_policy.config import PolicyConfig
from megatron_policy.config.model_table import bind_model
from megatron_policy.converters.architecture import Architecture, Recurrence
from megatron_policy.converters.architecture.attention import count_visible_pairs
from megatron_policy.converters.formats.hf_config import read_config
from megatron_policy.converters.table import bind
from megatron_policy.estimate.adapters import ModelAdapters
from megatron_policy.estimate.flops import forward_flops, layer_flops, model_flops
from megatron_policy.estimate.states import ModelRows
from megatron_policy.estimate.tower import RowMedia, count_tower
from tests.checkpoints import IS_OLDER, class_of_model, hf_config
from tests.dist.cases import policy_config
from tests.families import SAMPLES
from tests.picture_models import CLIPS, STILL

LENGTH, RANK = 48, 4


def multiplies_angles() -> bool:
    """Whether this release of transformers makes angles of positions by a product of matrices."""
    rotary = LlamaRotaryEmbedding(LlamaConfig())
    with FlopCounterMode(display=False) as counter:
        rotary(torch.ones(1, 2, 8), torch.arange(2)[None])
    return counter.get_total_flops() > 0


pytestmark = pytest.mark.skipif(
    IS_OLDER and multiplies_angles(), reason="torch counts angles of positions"
)
WINDOWED = ("gemma2", "gemma3_text", "gpt_oss", "olmo3")


def reference(path: Path) -> Any:
    config = hf_config(path)
    kernels = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = class_of_model(config).from_config(config, **kernels)
    for name, mixer in model.named_modules():
        convolves = any(isinstance(child, torch.nn.Conv1d) for child in mixer.children())
        if convolves and "audio_tower" not in name:
            mixer.forward = partial(pass_linears, mixer)
    return model.float().train()


def pass_linears(mixer: Any, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
    """Stands in for a recurrence, which transformers computes in another way than token by token:
    its linear layers alone.
    """
    last = mixer.o_proj if hasattr(mixer, "o_proj") else mixer.out_proj
    first = [m for m in mixer.modules() if isinstance(m, torch.nn.Linear) and m is not last]
    own = [linear(hidden_states[..., : linear.in_features]) for linear in first]
    return last(torch.cat(own, -1)[..., : last.in_features])


def architecture_of(path: Path) -> Architecture:
    return bind(read_config(path)).architecture


def counted(model: Any, rows: int, backward: bool) -> int:
    """What torch's counter sees in a pass over `rows` sequences. It counts all pairs of tokens."""
    tokens = torch.randint(0, model.config.get_text_config().vocab_size, (rows, LENGTH))
    with FlopCounterMode(display=False) as counter:
        logits = model(input_ids=tokens, use_cache=False).logits
        if backward:
            logits.float().logsumexp(-1).sum().backward()
    return int(counter.get_total_flops())


def adapted(model: Any, modules: list[str]) -> Any:
    lora = LoraConfig(r=RANK, lora_alpha=8, target_modules=modules, task_type="CAUSAL_LM")
    return get_peft_model(model, lora).train()


ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
LATENT = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
ADAPTED = {
    "all, llama": ("llama", [*ATTENTION, *MLP]),
    "all, qwen3": ("qwen3", [*ATTENTION, *MLP]),
    "all, gemma2": ("gemma2", [*ATTENTION, *MLP]),
    "attention, cohere": ("cohere", ATTENTION),
    "attention, qwen3_moe": ("qwen3_moe", ATTENTION),
    "MLPs, llama": ("llama", MLP),
    "outputs, llama": ("llama", ["o_proj", "down_proj"]),
    "some, qwen2": ("qwen2", ["q_proj", "v_proj", "up_proj"]),
    "latent, deepseek_v3": ("deepseek_v3", LATENT),
}


@pytest.mark.dear
@pytest.mark.parametrize("case", ADAPTED)
def test_adapters_cost_what_torch_counts_on_pefts(checkpoint, monkeypatch, case: str) -> None:
    """The base has gradients of its inputs alone, and none before the first adapter."""
    family, modules = ADAPTED[case]
    path = checkpoint(family)
    torch.manual_seed(0)
    model = adapted(reference(path), modules)
    peft = {"enabled": True, "dim": RANK, "alpha": 8, "target_modules": modules}
    config = PolicyConfig.parse(policy_config(path, {"peft": peft}))
    table = bind_model(config)
    adapters = ModelAdapters.of_model(config, table)
    monkeypatch.setattr(
        "megatron_policy.converters.architecture.attention.count_visible_pairs", lambda n, _: n * n
    )
    ours = forward_flops(table.architecture, [LENGTH] * 2, adapters=adapters)
    plain = forward_flops(table.architecture, [LENGTH] * 2)
    assert counted(model, 2, backward=False) == ours.total
    both = counted(model, 2, backward=True)
    assert ours.total + ours.backward == pytest.approx(both, rel=0.02)
    assert ours.backward < plain.backward
    both_plain = plain.total + plain.backward
    assert both < 0.9 * both_plain, "the difference would not be seen"


def with_all_pairs(architecture: Architecture, rows: int) -> int:
    """Our count of a forward pass if attention looked at all pairs of tokens of a sequence, without
    what recurrences compute between their linear layers.
    """
    found = forward_flops(architecture, [LENGTH] * rows)
    total = found.total
    for number, layer in enumerate(found.layers):
        total -= layer.attention
        for mixer in architecture.layers[number].mixers:
            if not isinstance(mixer, Recurrence):
                core = mixer.count_core_flops([LENGTH] * rows)
                share, left = divmod(core, count_visible_pairs(LENGTH, mixer.window))
                assert left == 0
                total += share * LENGTH**2
    return total


@pytest.mark.dear
@pytest.mark.parametrize("family", sorted(SAMPLES))
def test_forward_and_backward_are_what_torch_counts_on_the_reference(checkpoint, family) -> None:
    path = checkpoint(family)
    model, architecture = reference(path), architecture_of(path)
    ours = with_all_pairs(architecture, rows=2)
    assert counted(model, 2, backward=False) == ours
    assert counted(model, 2, backward=True) == 3 * ours


@pytest.mark.parametrize("family", {"glm4v_moe": 0, "qwen2_5_vl": 0, "qwen3_vl": 0} | STILL | CLIPS)
def test_towers_cost_what_torch_counts_on_the_reference(checkpoint, family: str) -> None:
    path = checkpoint(family)
    config = PolicyConfig.parse(policy_config(path, {}))
    rows = ModelRows.of(bind_model(config))
    shell = rows.architecture.shell
    picture = shell.pictures.make_picture((8, 12), torch.randn)
    patches = shell.media[0].count_patches(picture)
    with FlopCounterMode(display=False) as counter:
        given = shell.join({key: [value] for key, value in picture.items()})
        whole = reference(path)
        getattr(whole, "model", whole).get_image_features(**given)
    found = count_tower(config, rows, RowMedia(patches))
    assert found.flops == counter.get_total_flops() and found.kept > 0
    assert found.trained_flops == found.flops and found.patches == patches
    groups = [{"roles": ["vision"], "freeze": True}]
    frozen = policy_config(path, {"optimizer": {"param_groups": groups}})
    found = count_tower(PolicyConfig.parse(frozen), rows, RowMedia(patches))
    assert found.flops == counter.get_total_flops() and found.kept == found.trained_flops == 0


@pytest.mark.parametrize(
    ("family", "frames"),
    [*itertools.product(CLIPS, (8, 100, 263)), ("nemotron_h_omni", 5)],  # one place for statistics
)
def test_towers_that_hear_cost_what_torch_counts_on_the_reference(
    checkpoint, family: str, frames: int
) -> None:
    path = checkpoint(family)
    names = ["sound_*"] if family == "nemotron_h_omni" else ["audio_tower.*"]
    groups = [{"names": names, "freeze": True}]
    frozen, trained = (
        PolicyConfig.parse(policy_config(path, {"optimizer": {"param_groups": each}}))
        for each in (groups, [])
    )
    rows = ModelRows.of(bind_model(trained))
    (medium,) = rows.architecture.shell.sounds
    clip = medium.make_clip(frames, torch.randn)
    with FlopCounterMode(display=False) as counter:
        whole = reference(path).eval()
        getattr(whole, "model", whole).get_audio_features(**clip)
    found = count_tower(trained, rows, RowMedia(frames=frames))
    assert found.flops == found.trained_flops == counter.get_total_flops() and found.kept > 0
    assert found.patches == medium.count_tokens(clip)
    seen = count_tower(trained, rows, RowMedia(patches=64))
    both = count_tower(trained, rows, RowMedia(64, frames))
    assert both.flops == seen.flops + found.flops and both.kept == seen.kept + found.kept
    assert both.patches == seen.patches + found.patches
    other = count_tower(frozen, rows, RowMedia(64, frames))
    assert (other.flops, other.trained_flops, other.kept) == (both.flops, seen.flops, seen.kept)


def test_adapters_of_towers_cost_what_torch_counts_with_peft(checkpoint) -> None:
    path, modules = checkpoint("qwen3_vl"), ["qkv", "merger.linear_fc1"]
    section = {"peft": {"enabled": True, "dim": RANK, "alpha": 8, "target_modules": modules}}
    config = PolicyConfig.parse(policy_config(path, section))
    rows = ModelRows.of(bind_tables(config)[1])
    shell = rows.architecture.shell
    picture = shell.pictures.make_picture((8, 12), torch.randn)
    model = adapted(reference(path), modules)
    with FlopCounterMode(display=False) as counter:
        model.base_model.model.model.get_image_features(**picture)
    found = count_tower(config, rows, RowMedia(shell.pictures.count_patches(picture)))
    assert found.flops == found.trained_flops == counter.get_total_flops() and found.kept > 0


@pytest.mark.parametrize("family", ["llama", "deepseek_v3", *WINDOWED])
def test_attention_counts_the_pairs_that_the_reference_looks_at(checkpoint, family: str) -> None:
    path = checkpoint(family)
    model, architecture = reference(path).eval(), architecture_of(path)
    tokens = torch.randint(0, model.config.vocab_size, (1, LENGTH))
    seen = model(input_ids=tokens, use_cache=False, output_attentions=True).attentions
    sizes = 2 * (architecture.mixer.query_size + architecture.mixer.context_size)
    for layer, weights in zip(architecture.layers, seen, strict=True):
        pairs = int((weights[0, 0, :, :LENGTH] > 0).sum())
        assert layer_flops(architecture, layer, [LENGTH]).attention == pairs * sizes
    windows = {layer.mixer.window is not None for layer in architecture.layers}
    assert (True in windows) == (family in WINDOWED)


@pytest.mark.parametrize("window", [None, 1, 4, 5, 6, 100])
def test_visible_pairs_are_those_of_the_mask(window: int | None) -> None:
    for length in (0, 1, 2, 5, 17):
        queries, keys = torch.arange(length).view(-1, 1), torch.arange(length)
        mask = (keys <= queries) & (keys > queries - (length + 1 if window is None else window))
        assert count_visible_pairs(length, window) == int(mask.sum())


def test_packed_sequences_do_not_look_at_each_other_and_the_head_is_for_predicted_tokens_only(
    checkpoint,
) -> None:
    architecture, parts = architecture_of(checkpoint("llama")), [3, 10, 0, 7]
    assert model_flops(architecture, parts) == sum(model_flops(architecture, [n]) for n in parts)
    assert model_flops(architecture, parts) < model_flops(architecture, [sum(parts)])
    everywhere, nowhere = (forward_flops(architecture, [10], n) for n in (None, 0))
    per_token = 2 * architecture.hidden_size * architecture.vocab_size
    assert everywhere.head == 10 * per_token and nowhere.head == 0
    assert everywhere.layers == nowhere.layers
    assert model_flops(architecture, [10], 4) == 3 * (nowhere.total + 4 * per_token)


def test_a_layer_for_multi_token_prediction_is_a_layer_a_projection_and_the_head(
    checkpoint,
) -> None:
    path = checkpoint("deepseek_v3", num_nextn_predict_layers=1)
    raw = json.loads((path / "config.json").read_text())
    architecture = bind(raw, mtp_layers=1).architecture
    found = forward_flops(architecture, [10])
    projection = 2 * 10 * 2 * architecture.hidden_size**2
    assert found.mtp == projection + found.layers[-1].total + found.head
    assert forward_flops(architecture, [10], further=3).mtp == 3 * found.mtp
    assert forward_flops(replace(architecture, mtp_layers=0), [10]).mtp == 0
