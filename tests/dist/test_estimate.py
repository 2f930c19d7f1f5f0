"""What a plan says of memory, against what ranks hold: buffers and states to the byte, and the
tensors that autograd saves within 5 %; and of the bytes that a save writes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_policy.adapters.targets import bind_tables
from megatron_policy.batch import BatchedDataDict
from megatron_policy.checkpoint.contents import Contents
from megatron_policy.config import PolicyConfig
from megatron_policy.config.layout import layer_split, topology_of
from megatron_policy.converters.architecture import DeltaNet, Mamba2, Medium, Shell
from megatron_policy.converters.architecture.part import Kernels
from megatron_policy.converters.formats.hf_config import read_config
from megatron_policy.converters.table import bind
from megatron_policy.engines.megatron.optimizer_shards import optimizer_shards
from megatron_policy.estimate.activations import MicrobatchShape, count_slabs
from megatron_policy.estimate.memory import BatchShape, activation_bytes
from megatron_policy.estimate.states import (
    FP32,
    ModelRows,
    Precisions,
    States,
    stage_states,
    written_bytes,
)
from megatron_policy.estimate.tower import NO_MEDIA, RowMedia, count_tower
from megatron_policy.parallel.topology import Coords
from megatron_policy.recurrence.chunks import Chunks, sequences_of
from megatron_policy.recurrence.delta_rule import delta_rule
from megatron_policy.recurrence.state_space import state_space
from tests.checkpoints import make_checkpoint
from tests.dist.cases import open_policy, policy_config
from tests.dist.layouts import EXPERT_LAYOUTS, OVERLAPPED, Layout, layout
from tests.invariance.cases import LAYOUTS
from tests.losses import SequenceNLL
from tests.mtp_checkpoints import add_mtp_layers

ROWS, LENGTH, TOLERANCE = 8, 32, 0.05
SHARES = 0.01
"""By how much a rank's share of what it saves differs from an equal one."""


@dataclass(frozen=True)
class Measured:
    """On one rank, in bytes."""

    coords: Coords
    states: States
    padding: int
    """Elements of the rank's shares of the distributed optimizer's buffers that no parameter
    fills.
    """
    main_padding: int
    """Those of buffers whose parameters have fp32 copies."""
    saved: int
    """The most that autograd has saved at the same time."""
    written: int
    """What the rank writes to a checkpoint."""


@contextmanager
def live_saved(known: set[int]) -> Iterator[list[int]]:
    """The most bytes that autograd has saved at the same time, of storages that are not at `known`
    addresses. They count with the size that they have then: recomputation empties some of them.
    """
    held: dict[int, tuple[list[int], torch.UntypedStorage]] = {}
    most = [0]

    def look() -> None:
        most[0] = max(most[0], sum(storage.nbytes() for _, storage in held.values()))

    class Kept:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor, storage = tensor, tensor.untyped_storage()
            self.key = None if storage.data_ptr() in known else storage._cdata
            if self.key is None:
                return
            held.setdefault(self.key, ([0], storage))[0][0] += 1
            look()

        def __del__(self) -> None:
            if self.key is None:
                return
            look()
            uses = held[self.key][0]
            uses[0] -= 1
            if not uses[0]:
                del held[self.key]

    with torch.autograd.graph.saved_tensors_hooks(Kept, lambda kept: kept.tensor):
        yield most


def measure(config: dict[str, Any], rows: int, length: int, media: RowMedia = NO_MEDIA) -> Measured:
    """A step on a rank over `rows` rows of `length` tokens, with these media in each."""
    with open_policy(config) as policy:
        trainable = policy._engine.trainable
        chunks = trainable.chunks
        known = {
            tensor.untyped_storage().data_ptr()
            for chunk in chunks
            for tensor in (*chunk.module.parameters(), *chunk.module.buffers())
        } | indices(policy._engine.adapters)
        data = full_rows(rows, length)
        arch = policy._engine.table.architecture
        if media != NO_MEDIA:
            data = add_media(data, arch.shell, media)
        if arch.moe is not None:
            data["routed_experts"] = evenly_routed(rows, length, arch)
        with live_saved(known) as most:
            policy.train(data, SequenceNLL())
        shards = list(optimizer_shards(trainable.optimizer))
        moments = sum(shard.state[name].nbytes for shard in shards for name in shard.moments)
        buffers = [b for chunk in chunks for b in chunk.buffers + chunk.expert_parallel_buffers]
        adapters = policy._engine.adapters
        tensors = [*policy._engine.held, *(adapters.held if adapters is not None else ())]
        held = {t.untyped_storage().data_ptr(): t.untyped_storage() for _, t in tensors}
        return Measured(
            coords=policy.coords,
            states=States(
                parameters=sum(storage.nbytes() for storage in held.values()),
                gradients=sum(b.grad_data.nbytes for b in buffers),
                main_parameters=sum(s.main.nbytes for s in shards if s.separate),
                moments=moments,
            ),
            padding=sum(map(_padding, buffers)),
            main_padding=sum(_padding(b) for b in buffers if b.param_dtype != torch.float32),
            saved=most[0],
            written=_written(policy._engine),
        )


def full_rows(rows: int, length: int) -> BatchedDataDict:
    """Rows of `length` tokens, of which each but the first is predicted."""
    torch.manual_seed(0)
    return BatchedDataDict(
        input_ids=torch.randint(5, 200, (rows, length)),
        input_lengths=torch.full((rows,), length),
        token_mask=torch.ones(rows, length),
        sample_mask=torch.ones(rows),
    )


def indices(adapters: Any) -> set[int]:
    """Where adapters keep which outputs are of which part."""
    parts = [] if adapters is None else [each.parts for each in adapters.modules.values()]
    places = (each.places_Q for each in parts if each is not None)
    return {tensor.untyped_storage().data_ptr() for tensor in places if tensor is not None}


def add_media(data: BatchedDataDict, shell: Shell, media: RowMedia) -> BatchedDataDict:
    """The rows with a picture in each, as high as it is wide, and a clip of sound."""
    side, at = math.isqrt(media.patches), 1
    makers: list[tuple[Medium, Any]] = []
    if media.patches:
        seen, size = shell.pictures, (side, side)
        makers.append((seen, lambda: seen.make_picture(size, torch.randn)))
    if media.frames:
        clips = shell.sounds[0]
        makers.append((clips, lambda: clips.make_clip(media.frames, torch.randn)))
    for medium, make in makers:
        found = [make() for _ in range(data.size)]
        tokens = medium.count_tokens(found[0])
        if medium.start is not None:
            data["input_ids"][:, at - 1] = medium.start
        data["input_ids"][:, at : at + tokens] = medium.placeholder
        data["token_mask"][:, at : at + tokens] = 0
        at += tokens + 2
        data = BatchedDataDict({**data, **{key: [each[key] for each in found] for key in found[0]}})
    return data


def _written(engine: Any) -> int:
    contents = Contents(engine, engine.place.topology, {})
    held = contents.held(with_states=True)
    return sum(item.tensor.nbytes for item in contents._items(held))


def _padding(buffer: Any) -> int:
    """Elements of this rank's shares of the buffer's buckets that no parameter fills."""
    own = 0
    for bucket in buffer.buckets:
        size = bucket.grad_data.numel() // buffer.data_parallel_world_size
        first = bucket.offset + buffer.data_parallel_group.rank() * size
        own += size
        for parameter in bucket.params:
            start, end, _ = buffer.param_index_map[parameter]
            own -= max(0, min(end, first + size) - max(start, first))
    return own


def evenly_routed(rows: int, length: int, arch: Any) -> torch.Tensor:
    """Choices `[B, S, L, K]` that give each expert equally many tokens."""
    number, chosen = arch.moe.experts, arch.moe.chosen
    shape = rows, length, len(arch.expert_layers), chosen
    tokens = torch.arange(rows * length).view(rows, length, 1, 1)
    choices = tokens * chosen + torch.arange(chosen)
    return (choices % number).expand(shape).contiguous()


@dataclass(frozen=True)
class Case:
    """A family under a layout, of `rows` rows of `length` tokens; `together` of them make a
    microbatch, which is packed or not.
    """

    family: str
    layout: Layout
    length: int = LENGTH
    rows: int = ROWS
    together: int = 1
    packed: bool = False
    sizes: dict[str, Any] = field(default_factory=dict)
    further: int = 0
    """Tokens that are predicted besides the next one."""
    media: RowMedia = NO_MEDIA
    """Beside text in each row."""

    def config(self, path: Path) -> dict[str, Any]:
        """A configuration in bf16."""
        top: dict[str, Any] = {
            "precision": "bfloat16",
            "max_total_sequence_length": self.length,
            "train_micro_batch_size": 1 if self.packed else self.together,
            "train_global_batch_size": self.rows,
        }
        if self.media.frames:
            sound = "audio_token_id" if self.family.startswith("qwen3") else "audio_token_index"
            tokens = {"vision_start_token_id": 250, "audio_start_token_id": 251, sound: 252}
            top["hf_config_overrides"] = tokens
        if self.packed:
            tokens = self.together * self.length
            top["sequence_packing"] = {"enabled": True, "train_mb_tokens": tokens}
        if bind(read_config(path)).architecture.moe is not None:
            top["router_replay"] = {"enabled": True}
        return policy_config(path, self.layout.megatron | {"mtp_num_layers": self.further}, **top)


FAMILIES = ("qwen3_moe", "deepseek_v3", "gpt_oss", "mixtral")
OF_STATES = {
    **{
        name: Case("qwen2" if "PP2" in name else "qwen3", of, sizes={"tied": "PP2" in name})
        for name, of in LAYOUTS.items()
    },
    "one process, packed": Case("qwen3", LAYOUTS["one process"], packed=True, together=2),
    "TP2+SP, packed": Case("qwen3", LAYOUTS["TP2+SP"], packed=True, together=2),
    **{
        f"{name}, {family}": Case(family, of)
        for (name, of), families in zip(
            EXPERT_LAYOUTS.items(), cycle((FAMILIES[:2], FAMILIES[2:])), strict=False
        )
        for family in families
        if family != "gpt_oss" or "ETP2" not in name  # its experts have biases
    },
    "constants of activations": Case("apertus", LAYOUTS["DP2, distributed optimizer, overlaps"]),
    "norms over heads of all ranks": Case("olmo3", LAYOUTS["TP2+SP"]),
    "further tokens": Case("deepseek_v3", layout(1), further=1),
    "further tokens, nemotron_h": Case("nemotron_h", LAYOUTS["TP2+SP"], further=1),
    "further tokens, PP2": Case("deepseek_v3", layout(2, pp=2, **OVERLAPPED), further=1),
}
PP2 = {"pp": 2}
VPP2 = {"pp": 2, "vpp": 2}
CP2 = {"context_parallel_size": 2}


def recomputed(modules: str = "", world: int = 1, **more: Any) -> Layout:
    """A layout under which these modules are recomputed, or all."""
    how: dict[str, Any] = {"recompute_granularity": "full"}
    if modules:
        how = {"recompute_granularity": "selective", "recompute_modules": modules.split("+")}
    return layout(world, activation_checkpointing=True, **how, **more)


def block(layers: int, **more: Any) -> Layout:
    return recomputed(recompute_method="block", recompute_num_layers=layers, **more)


LONG, WIDE = {"max_position": 2048}, {"max_position": 2048, "window": 96}
ALL = "core_attn+layernorm+mlp"
OF_RECOMPUTATION = {
    f"{name}, {family}": Case(family, of, length=128, rows=4)
    for name, of in {
        "layernorm": recomputed("layernorm"),
        "mlp": recomputed("mlp"),
        "layernorm and mlp": recomputed("layernorm+mlp"),
        "core attention": recomputed("core_attn"),
        "every module": recomputed(ALL),
        "two layers at once": recomputed(recompute_num_layers=2),
        "two layers of four": block(2),
        "PP2xVPP2, layernorm and mlp": recomputed("layernorm+mlp", 2, **VPP2),
        "PP2, a layer of two": block(1, world=2, **PP2),
        "TP2+SP, every module": recomputed(ALL, 2, tp=2, sequence_parallel=True),
    }.items()
    for family in ("qwen3", "qwen3_moe", "deepseek_v3")
    if family != "deepseek_v3" or of.world == 1 or "TP2" in name
} | {
    "further tokens, all layers": Case("deepseek_v3", recomputed(), 128, 4, further=1),
    "further tokens, layernorm": Case("deepseek_v3", recomputed("layernorm"), 128, 4, further=1),
    "every module, cohere": Case("cohere", recomputed(ALL), 128, 2),
    "every module, olmo3": Case("olmo3", recomputed(ALL), 128, 2),
}
"""Where the backward pass holds most: what is computed again, beside what is kept."""
OF_LENGTHS = {
    "scores, sinks": Case("gpt_oss", layout(1), 1088, 2),
    "scores, CP2, sinks": Case("gpt_oss", layout(2, **CP2), 1088, 2),
    "scores, window": Case("gemma2", layout(1), 1088, 2, sizes=WIDE),
    "scores, CP2, window": Case("gemma2", layout(2, **CP2), 1088, 2, sizes=WIDE),
    "scores, two rows": Case("gemma2", layout(1), 640, 2, together=2, sizes=LONG),
    "scores, packed": Case("gpt_oss", layout(1), 640, 2, together=2, packed=True),
    "scores, core attention": Case("gemma2", recomputed("core_attn"), 640, 2, sizes=LONG),
    "masks, window": Case("gemma3_text", layout(1), 1088, 2, sizes=WIDE),
    "masks, CP2": Case("qwen3", layout(2, **CP2), 1088, 2, sizes=LONG),
    "masks, CP2, window": Case("mistral", layout(2, **CP2), 1088, 2, sizes=WIDE),
    "masks, CP2, MLA": Case("deepseek_v3", layout(2, **CP2), 1088, 2, sizes=LONG),
    "masks, CP2, core attention": Case(
        "qwen3", recomputed("core_attn", 2, **CP2), 1088, 2, sizes=LONG
    ),
    "copies, packed": Case("qwen3", layout(1), 640, 2, together=2, packed=True, sizes=LONG),
    "tiles, olmo3": Case("olmo3", layout(1), 1088, 2, sizes=WIDE),
    "one tile, apertus": Case("apertus", layout(1), 1088, 2, sizes=LONG),
}
"""Sequences longer than a tile of attention, whose scores and masks grow with the square."""
OF_RECURRENCES = {
    f"{family}, {name}": Case(family, of, length, rows, together, packed, sizes=LONG | more)
    for name, (of, length, rows, together, packed, more) in {
        "packed": (layout(1), 160, 8, 4, True, {}),
        "padded": (layout(1), 160, 8, 4, False, {}),
        "several slabs": (layout(1), 2304, 2, 1, False, {"max_position": 4096}),
        "TP2+SP": (LAYOUTS["TP2+SP"], 128, 4, 1, False, {}),
        "PP2": (LAYOUTS["PP2"], 128, 4, 1, False, {}),
        "CP2, packed": (layout(2, **CP2), 256, 4, 2, True, {}),
        "every module": (recomputed(ALL), 128, 4, 1, False, {}),
        "two layers at once": (recomputed(recompute_num_layers=2), 128, 4, 1, False, {}),
    }.items()
    for family in ("qwen3_next", "nemotron_h", "lfm2", "falcon_h1", "olmo_hybrid", "kimi_linear")
} | {
    "nemotron_h, smaller slabs": Case(
        "nemotron_h",
        layout(1),
        2304,
        1,
        sizes=LONG
        | {"max_position": 4096, "mamba_num_heads": 64, "mamba_head_dim": 64}
        | {"ssm_state_size": 128},
    ),
    "qwen3_next, gated attention": Case(
        "qwen3_next", layout(1), 256, 4, sizes={"layer_types": ["full_attention"] * 4}
    ),
}
"""What a scan computes again in its backward pass is held beside what is kept."""
OF_MEDIA = {
    f"{family}, {what}, {name}": Case(family, of, 96, 4, together, packed, media=media)
    for family, what, media in (
        ("qwen3_vl", "pictures", RowMedia(256)),
        ("qwen2_5_vl", "pictures", RowMedia(256)),
        ("qwen2_5_omni_thinker", "sound", RowMedia(frames=300)),
        ("qwen3_omni_moe_thinker", "sound", RowMedia(frames=400)),
        ("qwen2_5_omni_thinker", "both", RowMedia(64, 200)),
    )
    for name, (of, together, packed) in {
        "one process": (layout(1), 2, False),
        "packed": (layout(1), 2, True),
        "TP2+SP": (LAYOUTS["TP2+SP"], 1, False),
        "PP2": (LAYOUTS["PP2"], 1, False),
        "all layers": (recomputed(), 1, False),
    }.items()
}
"""What towers keep is counted by a run of transformers' own code."""
CASES = OF_STATES | OF_RECOMPUTATION | OF_LENGTHS | OF_RECURRENCES | OF_MEDIA
DAILY = ("one process", "qwen3_next, packed", "qwen3_vl, pictures, packed")


@pytest.mark.parametrize(
    "case", [pytest.param(each, marks=[pytest.mark.daily] * (each in DAILY)) for each in CASES]
)
def test_plan_says_what_ranks_hold(ranks, checkpoint, tmp_path, case: str) -> None:
    of = CASES[case]
    if of.further:
        path = add_mtp_layers(make_checkpoint(tmp_path, of.family, **of.sizes), of.further)
    else:
        path = checkpoint(of.family, **of.sizes)
    raw = of.config(path)
    found = ranks.run(of.layout.world, measure, raw, of.rows, of.length, of.media)
    assert_plan(PolicyConfig.parse(raw), of, found)


@pytest.mark.parametrize("groups", [2, 4])
def test_what_is_computed_at_once_holds_what_its_part_says(groups: int) -> None:
    """In a scan's backward pass, over three sequences of three chunks."""
    length, heads, keys, values = 160, 4, 16, 24
    tokens, chunks = 3 * length, Chunks.of(sequences_of([length] * 3))
    narrow = torch.randn(2, tokens, groups, keys, dtype=torch.bfloat16)
    x = torch.randn(tokens, heads, values, dtype=torch.bfloat16)
    steps, head = torch.rand(2, tokens, heads), torch.rand(2, heads)
    delta = DeltaNet(
        num_key_heads=groups,
        num_value_heads=heads,
        key_head_dim=keys,
        value_head_dim=values,
        taps=4,
    )
    mamba = Mamba2(num_heads=heads, head_dim=values, groups=groups, state_size=keys, taps=4)
    batch = MicrobatchShape(tokens, length, tokens)
    for part, scan, inputs in (
        (delta, delta_rule, (*narrow, x, -steps[0], steps[1])),
        (mamba, state_space, (x, steps[0], head[0], *narrow, head[1])),
    ):
        slabs = count_slabs(batch, 1, part.count_slab)
        leaves = [each.clone().requires_grad_() for each in inputs]
        with live_saved(set()) as most:
            given, _ = scan(*leaves, chunks)
            kept = most[0]
            given.float().sum().backward()
        assert FP32 * part.count_slab(slabs) == pytest.approx(most[0] - kept, rel=0.01)


def assert_plan(config: PolicyConfig, of: Case, found: list[Measured]) -> None:
    """What ranks hold is what a plan of the configuration says."""
    assert_states(config, of, found)
    model, topology = ModelRows.of(bind_tables(config)[1]), topology_of(config, of.layout.world)
    workload = BatchShape.of(config, of.length, count_tower(config, model, of.media))
    for each in found:
        kernels, at = Kernels(transformer_engine=False, fused_activation=False), each.coords
        kept = activation_bytes(config, model, topology, workload, at.pp, kernels, at.cp)
        assert kept == pytest.approx(each.saved, rel=TOLERANCE)


def assert_states(config: PolicyConfig, of: Case, found: list[Measured]) -> None:
    """The same of what ranks hold from step to step, and of what they save."""
    model = ModelRows.of(bind_tables(config)[1])
    topology = topology_of(config, of.layout.world)
    split = layer_split(config, model.architecture, topology)
    precisions = Precisions.of(config)
    for each in found:
        stage = each.coords.pp
        expected = stage_states(model, split, topology, stage, precisions)
        assert each.states.parameters == expected.parameters
        assert each.states.gradients == expected.gradients
        # A share of the buffers has their alignment in it, of which no state is held.
        padding, main_padding = (
            FP32 * number if precisions.distributed else 0
            for number in (each.padding, each.main_padding)
        )
        assert each.states.main_parameters == expected.main_parameters - main_padding
        assert each.states.moments == expected.moments - padding * precisions.moments
    writes = [
        written_bytes(
            stage_states(model, split, topology, stage, precisions),
            topology,
            precisions.distributed,
            config.megatron_cfg.peft.enabled,
        )
        for stage in range(topology.pp)
    ]
    assert max(each.written for each in found) == pytest.approx(max(writes), rel=SHARES)
