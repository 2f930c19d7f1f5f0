"""Models that also see pictures, which are not offered yet: log-probabilities, and what two steps
of training make of every parameter, the tower's included, are those of transformers under every
way to split and to batch.

Shapes: B rows, S positions.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_policy.batch import BatchedDataDict
from megatron_policy.engines import composite, shell
from megatron_policy.engines.megatron import assemble
from megatron_policy.engines.megatron.layers.norm import make_replica
from megatron_policy.engines.shell import PictureEmbedder
from megatron_policy.errors import BatchError
from tests import margins, oracle
from tests.dist.cases import GLOBAL_BATCH, LOSSES, open_policy, own_share, own_steps, policy_config
from tests.dist.layouts import (
    EXPERT_LAYOUTS,
    FSDP1_LAYOUTS,
    FSDP2_LAYOUTS,
    FSDP2_TENSOR_LAYOUTS,
    OVERLAPPED,
    SP,
    Layout,
    layout,
)
from tests.dist.resuming import paths
from tests.dist.test_export import tensors_of
from tests.exact import ROOM, Exact, InDouble, assert_equal, furthest
from tests.invariance import page
from tests.invariance.further import PICTURES_TABLE, Collected, FurtherCell
from tests.losses import loss_mask, token_nll
from tests.picture_models import (
    IMAGE,
    KEYS,
    SOUND,
    SOUND_START,
    START,
    hf_logprobs,
    load_model,
    make_model,
    make_rows,
    stack_experts,
)

BATCHINGS: dict[str, dict[str, Any]] = {
    "padded": {},
    "dynamic": {
        "dynamic_batching": {"enabled": True, "train_mb_tokens": 80, "sequence_length_round": 4}
    },
    "packed": {"sequence_packing": {"enabled": True, "train_mb_tokens": 80}},
}
FEW = 40
"""The most patches that a row has, and a microbatch of the following."""
BATCHINGS |= {
    f"{kind}, few patches": BATCHINGS[kind] | {"max_patches_per_microbatch": FEW}
    for kind in ("dynamic", "packed")
}
RECOMPUTED = {"activation_checkpointing": True}
CP2 = {"context_parallel_size": 2}
LAYOUTS: dict[str, tuple[Layout, str]] = {
    "one process": (layout(1), "padded"),
    "one process, packed": (layout(1), "packed"),
    "TP2": (layout(2, tp=2), "dynamic, few patches"),
    "TP2+SP": (layout(2, tp=2, **SP), "packed, few patches"),
    "PP2": (layout(2, pp=2, **RECOMPUTED), "packed"),
    "CP2": (layout(2, **CP2), "packed"),
    # The last microbatch of one rank is of text alone.
    "DP2, overlaps": (layout(2, **OVERLAPPED), "padded"),
    "TP2xCP2+SP": (layout(4, tp=2, **SP, **CP2), "packed"),
    "TP2xPP2xCP2+SP": (layout(8, tp=2, pp=2, **SP, **CP2), "packed"),
}
WITH_EXPERTS: dict[str, tuple[Layout, str]] = {
    "one process": (layout(1), "packed"),
    "EP2xTP2+SP": (EXPERT_LAYOUTS["EP2xTP2+SP"], "packed"),
    "PP2": (layout(2, pp=2), "padded"),
    "EP2xCP2": (EXPERT_LAYOUTS["EP2xCP2"], "padded"),
}
SHARDED: dict[str, tuple[Layout, str]] = {
    "FSDP2": (Layout(1, megatron={"dtensor_cfg": {}}), "packed"),
    # The last microbatch of one rank is of text alone.
    "FSDP2 x 2": (FSDP2_LAYOUTS["FSDP2 x 2"], "padded"),
    "FSDP2 x 4": (FSDP2_LAYOUTS["FSDP2 x 4"], "dynamic"),
    "FSDP2 CP2": (FSDP2_LAYOUTS["FSDP2 CP2"], "packed"),
    "FSDP2 TP2+SP x 2": (FSDP2_TENSOR_LAYOUTS["FSDP2 TP2+SP x 2"], "packed"),
    "FSDP1 x 2": (FSDP1_LAYOUTS["FSDP1 x 2"], "dynamic"),
}
"""Of the engine over transformers' own modules."""
REFUSED_WITHOUT = (
    "(20|28|36) patches in row .* count (24|32|40)|rank has ref|pass (whole pictures|the tiles)"
    "|make (4|16)"
)
"""What is said to a rank whose rows lack the last four patches, or the last picture."""
SOME = {name: LAYOUTS[name] for name in ("TP2+SP", "PP2", "CP2", "DP2, overlaps")}
OLDER = {name: LAYOUTS[name] for name in ("TP2+SP", "PP2")}
LAYOUTS_OF = {
    "gemma3": LAYOUTS | SHARDED,
    **dict.fromkeys(("glm4v", "idefics3", "llava", "llava_next"), SOME),
    **dict.fromkeys(("llava_onevision", "mistral3"), SOME),
    "internvl": SOME | {n: SHARDED[n] for n in ("FSDP2 x 2", "FSDP2 TP2+SP x 2")},
    "smolvlm": SOME | {n: SHARDED[n] for n in ("FSDP2 x 2", "FSDP1 x 2")},
    **dict.fromkeys(("glm4v_moe", "kimi_k25"), WITH_EXPERTS),
    # Experts have tensor parallelism with sequence parallelism alone.
    "nemotron_h_omni": WITH_EXPERTS | {n: each for n, each in LAYOUTS.items() if n != "TP2"},
    "qwen2_vl": OLDER,
    "qwen2_5_omni_thinker": LAYOUTS | {n: SHARDED[n] for n in ("FSDP2 x 2", "FSDP2 CP2")},
    "qwen2_5_vl": LAYOUTS | SHARDED,
    # transformers packs no rows of delta nets.
    "qwen3_5": LAYOUTS | {n: SHARDED[n] for n in ("FSDP2 x 2", "FSDP2 x 4", "FSDP1 x 2")},
    "qwen3_5_moe": WITH_EXPERTS | {"FSDP2 x 2": SHARDED["FSDP2 x 2"]},
    "qwen3_omni_moe_thinker": WITH_EXPERTS | {"FSDP2 x 2": SHARDED["FSDP2 x 2"]},
    "qwen3_vl": LAYOUTS | SHARDED,
    "qwen3_vl_moe": WITH_EXPERTS | {"FSDP2 x 2": SHARDED["FSDP2 x 2"]},
}
DAILY = {
    ("gemma3", "CP2"),
    ("qwen3_vl", "TP2+SP"),
    ("qwen3_5", "CP2"),
    ("qwen2_5_omni_thinker", "PP2"),
    ("qwen3_vl", "FSDP2 x 2"),
}


@cache
def rows_of(family: str) -> BatchedDataDict:
    """Two global batches."""
    return make_rows(family, 2 * GLOBAL_BATCH // 8)


def loss_of(model: Any, rows: BatchedDataDict) -> torch.Tensor:
    return token_nll(hf_logprobs(model, rows), rows, loss_mask(rows).sum())


@contextmanager
def planted(fault: str) -> Iterator[None]:
    """In this context, what is computed has a fault."""
    with ExitStack() as stack:
        if fault == "plain positions":
            stack.enter_context(
                patch.object(PictureEmbedder, "positions", lambda self, microbatch: None)
            )
        if fault == "causal pictures":
            stack.enter_context(
                patch.object(PictureEmbedder, "find_blocks", lambda self, microbatch: ())
            )
        if fault == "nothing deep":
            spread = shell._spread
            stack.enter_context(
                patch.object(shell, "_spread", lambda each, at: 0 * spread(each, at))
            )
        if fault == "partial gradients":

            def unmarked(config: Any, shape: tuple[int, ...]) -> torch.nn.Parameter:
                parameter: Any = make_replica(config, shape)
                parameter.sequence_parallel = False
                return parameter

            stack.enter_context(patch.object(assemble, "make_replica", unmarked))
        yield


def go_on_from(
    saver: dict[str, Any] | None, config: dict[str, Any], rows: BatchedDataDict, root: Path
) -> dict[str, torch.Tensor]:
    """What the first step and a checkpoint leave, as a policy of the config `saver` makes it, or
    what the second step makes of that.
    """
    with open_policy(saver or config) as policy:
        first, second = own_steps(policy, rows)
        if saver is None:
            policy.load_checkpoint(**paths(root))
        policy.train(second if saver is None else first, LOSSES["token"](), gbs=GLOBAL_BATCH, mbs=2)
        if saver is not None:
            policy.save_checkpoint(**paths(root))
        return {name: tensor.clone() for name, tensor in policy.export()}


def refuse_pictures(policy: Any, step: BatchedDataDict, mbs: int) -> str:
    """What is said of a step in which the last replica lacks pixels."""
    pixels = step["pixel_values"]
    if policy.coords.dp == policy.topology.dp - 1:
        pixels = [None if each is None else each[4:] for each in pixels]
    with pytest.raises(BatchError) as error:
        broken = BatchedDataDict({**step, "pixel_values": pixels})
        policy.train(broken, LOSSES["token"](), gbs=GLOBAL_BATCH, mbs=mbs)
    return str(error.value)


def train_on_pictures(
    config: dict[str, Any], rows: BatchedDataDict, fault: str = ""
) -> dict[str, Any]:
    """Two steps, what they leave, and the log-probabilities of the rows before."""
    with (
        planted(fault),
        seen_patches() as patches,
        open_policy(config) as policy,
    ):
        share = own_share(policy, rows)
        keys = ("input_ids", "input_lengths", *(key for key in KEYS if key in share))
        texts = BatchedDataDict({key: share[key] for key in keys})
        seen: dict[str, Any] = {"dp": policy.coords.dp, "logprobs": policy.logprobs(texts)}
        mbs = 4 if policy.topology.dp == 1 else 1
        seen["refused"] = refuse_pictures(policy, own_steps(policy, rows)[0], mbs)
        seen["steps"] = [
            policy.train(step, LOSSES["token"](), gbs=GLOBAL_BATCH, mbs=mbs)
            for step in own_steps(policy, rows)
        ]
        seen["weights"] = {name: tensor.clone() for name, tensor in policy.export()}
        return seen | {"patches": patches}


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The path of a family's checkpoint, and what training it gives."""

    @cache
    def made(family: str) -> tuple[Path, oracle.Learned]:
        path = make_model(tmp_path_factory.mktemp(family) / "hf", family)
        if family == "qwen3_5_moe":
            stack_experts(path)
        learned = oracle.Learned.of(path, rows_of(family), GLOBAL_BATCH, loss_of, load=load_model)
        return path, learned

    return made


@pytest.fixture(scope="module")
def measured() -> Iterator[Collected]:
    """Collects differences; writes them on the page if the environment asks for it."""
    collected = Collected(PICTURES_TABLE)
    yield collected
    if os.environ.get(page.WRITE):
        page.write_further(collected)


def exact_of(path: Path, rows: BatchedDataDict) -> Exact:
    """Next-token log-probabilities `[B, S - 1]` of the checkpoint's model."""
    with torch.no_grad():
        rounded = hf_logprobs(load_model(path), rows)
        exact_model = load_model(path, torch.float64)
        with InDouble():
            return Exact.between(rounded, hf_logprobs(exact_model, rows))


def configured(path: Path, case: Layout, batching: str, rows: BatchedDataDict) -> dict[str, Any]:
    config = policy_config(path, case.megatron, **BATCHINGS[batching])
    return config | {"max_total_sequence_length": rows["input_ids"].size(1)}


@pytest.mark.parametrize(
    ("family", "name"),
    [
        pytest.param(family, name, marks=[pytest.mark.daily] * ((family, name) in DAILY))
        for family in LAYOUTS_OF
        for name in LAYOUTS_OF[family]
    ],
)
def test_pictures_count_as_in_transformers(
    ranks, model_of, measured: Collected, family: str, name: str
) -> None:
    (path, hf), rows = model_of(family), rows_of(family)
    exact = exact_of(path, rows)
    case, batching = LAYOUTS_OF[family][name]
    config = configured(path, case, batching, rows)
    seen = ranks.run(case.world, train_on_pictures, config, rows)
    order = BatchedDataDict({"row": torch.arange(rows.size)})
    shares = order.shard_by_batch_size(1 + max(rank["dp"] for rank in seen), GLOBAL_BATCH)
    with margins.recorded() as record:
        for rank in seen:
            assert re.search(REFUSED_WITHOUT, rank["refused"])
            if "few" in batching:
                assert max(rank["patches"]) <= FEW
            own = shares[rank["dp"]]["row"]
            inside = torch.arange(1, rows["input_ids"].size(1)) < rows["input_lengths"][own, None]
            assert_equal("logprobs", rank["logprobs"][:, 1:][inside], exact[own][inside], name)
            hf.assert_same_steps(rank["steps"], name)
            assert rank["weights"].keys() == tensors_of(path).keys()
            hf.assert_same_weights(rank["weights"])
    measured.add(FurtherCell(name, batching, "pictures, videos", family), record)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("family", "name"), [("qwen3_vl", "TP2+SP"), ("qwen3_vl", "PP2"), ("smolvlm", "TP2+SP")]
)
def test_pictures_in_bf16_are_as_near_to_exact_arithmetic_as_in_transformers(
    ranks, tmp_path: Path, family: str, name: str
) -> None:
    path, rows = make_model(tmp_path, family, torch.bfloat16), rows_of(family)
    exact, rounded = (
        oracle.train(path, rows, GLOBAL_BATCH, loss_of, dtype, load=load_model)
        for dtype in (torch.float64, torch.bfloat16)
    )
    apart = oracle.Rounding.of(rounded, exact)
    hf = oracle.Learned(path, exact, rounded, apart, load_model)
    config = configured(path, *LAYOUTS[name], rows) | {"precision": "bfloat16"}
    for rank in ranks.run(2, train_on_pictures, config, rows):
        hf.assert_same_steps(rank["steps"])
        hf.assert_same_weights(rank["weights"])


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("fault", "family", "name"),
    [
        ("plain positions", "qwen3_vl", "TP2+SP"),
        ("nothing deep", "qwen3_vl", "TP2+SP"),
        ("partial gradients", "qwen3_vl", "TP2+SP"),
        ("causal pictures", "gemma3", "CP2"),
        ("plain positions", "qwen3_vl", "FSDP2 x 2"),
        ("nothing deep", "qwen3_vl", "FSDP2 x 2"),
        ("causal pictures", "gemma3", "FSDP2 x 2"),
    ],
)
def test_a_planted_fault_is_ten_times_further_away_than_all_rounding(
    ranks, model_of, fault: str, family: str, name: str
) -> None:
    (path, hf), rows = model_of(family), rows_of(family)
    config = configured(path, *LAYOUTS_OF[family][name], rows)
    for rank in ranks.run(2, train_on_pictures, config, rows, fault):
        apart = {
            of: max(
                furthest(tensor, hf.exact.weights[name])
                for name, tensor in rank["weights"].items()
                if name.startswith(("model.visual.", "vision_tower.")) == (of == "tower")
            )
            for of in ("tower", "text")
        }
        least = 10 * ROOM * hf.rounding.weights
        assert apart["tower"] > least
        if fault != "partial gradients":
            assert apart["text"] > least


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("saver", "loader"),
    [("TP2+SP", "PP2"), ("PP2", "FSDP2 x 2"), ("FSDP2 x 2", "FSDP1 x 2"), ("FSDP1 x 2", "TP2+SP")],
)
def test_training_goes_on_from_a_checkpoint_under_another_layout(
    ranks, model_of, tmp_path: Path, saver: str, loader: str
) -> None:
    (path, hf), rows = model_of("qwen3_vl"), rows_of("qwen3_vl")
    layouts = LAYOUTS_OF["qwen3_vl"]
    first, then = (configured(path, *layouts[name], rows) for name in (saver, loader))
    ranks.run(2, go_on_from, first, then, rows, tmp_path)
    for weights in ranks.run(2, go_on_from, None, then, rows, tmp_path):
        hf.assert_same_weights(weights)


TOWER, PROJECTORS = "model.visual.*", "model.visual.*merger*"
SLOWER = {"lr": oracle.LR / 10}
GROUPS: dict[str, list[dict[str, Any]]] = {
    "frozen tower": [{"roles": ["vision"], "freeze": True}],
    "slow tower": [{"names": [PROJECTORS], "freeze": True}, {"roles": ["vision"], **SLOWER}],
    "frozen decoder": [{"names": ["model.language_model.*", "lm_head.weight"], "freeze": True}],
}

FROZEN = {
    "vision_tower": ("qwen3_vl", "model.visual.*"),
    "audio_tower": ("qwen2_5_omni_thinker", "audio_tower.*"),
    "language_model": ("qwen3_vl", "model.language_model.*"),
}
"""Of each key of `automodel_kwargs.freeze_config` a family, and what is frozen."""


def own_rates(groups: str, name: str) -> dict[str, float] | None:
    """What is changed for a parameter, see `oracle.train`."""
    of_tower = fnmatchcase(name, TOWER)
    if groups == "slow tower" and of_tower:
        return None if fnmatchcase(name, PROJECTORS) else SLOWER
    return None if of_tower == (groups == "frozen tower") and groups != "slow tower" else {}


def train_groups(config: dict[str, Any], rows: BatchedDataDict) -> dict[str, Any]:
    """As `train_on_pictures`, and whether there is a graph of what made features."""
    graphs, call = set[bool](), PictureEmbedder._call

    def watched(*args: Any) -> dict[str, Any]:
        given = call(*args)
        graphs.add(given["inputs_embeds"].requires_grad)
        return given

    with patch.object(PictureEmbedder, "_call", watched):
        return train_on_pictures(config, rows) | {"graph": True in graphs}


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["TP2+SP", "FSDP2 x 2", "FSDP1 x 2"])
@pytest.mark.parametrize("groups", GROUPS)
def test_what_is_frozen_keeps_its_values_and_all_else_learns(
    ranks, model_of, groups: str, name: str
) -> None:
    """A tower that is frozen leaves no graph behind."""
    (path, _), rows = model_of("qwen3_vl"), rows_of("qwen3_vl")
    own = partial(own_rates, groups)
    hf = oracle.Learned.of(path, rows, GLOBAL_BATCH, loss_of, load=load_model, own=own)
    config = configured(path, *LAYOUTS_OF["qwen3_vl"][name], rows)
    section = config if name.startswith("FSDP") else config["megatron_cfg"]
    section["optimizer"]["param_groups"] = GROUPS[groups]
    for rank in ranks.run(2, train_groups, config, rows):
        hf.assert_same_steps(rank["steps"])
        hf.assert_same_weights(rank["weights"])
        assert rank["graph"] == (groups != "frozen tower")


@pytest.mark.nightly
@pytest.mark.parametrize("part", FROZEN)
def test_what_the_hosts_dtensor_keys_freeze_keeps_its_values_and_all_else_learns(
    ranks, model_of, part: str
) -> None:
    family, frozen = FROZEN[part]
    (path, _), rows = model_of(family), rows_of(family)

    def choose(name: str) -> dict[str, float] | None:
        return None if fnmatchcase(name, frozen) else {}

    hf = oracle.Learned.of(path, rows, GLOBAL_BATCH, loss_of, load=load_model, own=choose)
    config = configured(path, *LAYOUTS_OF[family]["FSDP2 x 2"], rows)
    said = {"freeze_vision_tower": False, f"freeze_{part}": True}
    config["dtensor_cfg"] |= {"automodel_kwargs": {"freeze_config": said}}
    for rank in ranks.run(2, train_on_pictures, config, rows):
        hf.assert_same_steps(rank["steps"])
        hf.assert_same_weights(rank["weights"])


@contextmanager
def seen_patches() -> Iterator[list[int]]:
    """In this context, how many patches a tower gets at each call."""
    seen: list[int] = []
    build = composite.build_composite

    def build_watched(config: Any) -> Any:
        whole: Any = build(config)
        names = {"visual", "vision_tower", "vision_model"}
        (tower,) = (each for name, each in whole.named_children() if name in names)
        tower.register_forward_pre_hook(
            lambda _, args, given: seen.append(len((*args, *given.values())[0])), with_kwargs=True
        )
        return whole

    with patch.object(assemble, "build_composite", build_watched):
        yield seen


def read_together(config: dict[str, Any], rows: BatchedDataDict) -> torch.Tensor:
    with open_policy(config) as policy:
        found: torch.Tensor = policy.logprobs(rows)
        return found


def test_short_clips_are_read_without_those_of_other_rows(ranks, model_of) -> None:
    """Among others the class of Qwen3-Omni reads the end of a clip that is shorter than a chunk
    otherwise than alone.
    """
    family = "qwen3_omni_moe_thinker"
    (path, _), rows = model_of(family), make_rows(family).select_indices([0, 1, 6])
    config = policy_config(path, {}) | {"max_total_sequence_length": 64, "logprob_batch_size": 3}
    (found,) = ranks.run(1, read_together, config, rows)
    inside = torch.arange(1, found.size(1)) < rows["input_lengths"].unsqueeze(1)
    assert_equal("logprobs", found[:, 1:][inside], exact_of(path, rows)[inside])


def read_answers(
    config: dict[str, Any], rows: BatchedDataDict, ids_BS: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Log-probabilities of `rows`, of the same with the tokens `ids_BS`, and the patches at each
    call of the tower for the first ones.
    """
    with seen_patches() as seen, open_policy(config) as policy:
        found, patches = policy.logprobs(rows), list(seen)
        return found, policy.logprobs(BatchedDataDict({**rows, "input_ids": ids_BS})), patches


@pytest.mark.parametrize(
    ("family", "drawn"),
    [
        pytest.param("qwen2_5_vl", [IMAGE], marks=pytest.mark.daily),
        ("qwen2_5_omni_thinker", [START, SOUND, SOUND_START, IMAGE]),
        ("qwen3_omni_moe_thinker", [SOUND_START, START]),
        ("nemotron_h_omni", [SOUND, IMAGE]),
    ],
)
def test_a_picture_is_read_once_for_all_its_answers_and_a_drawn_placeholder_is_text(
    ranks, tmp_path: Path, family: str, drawn: list[int]
) -> None:
    """Copies of rows 1, a picture, and 4, two of them, go on in their own ways. What is drawn, last
    tokens first, is embedded as token 5 is, whose place it takes in one answer.
    """
    path, other = make_model(tmp_path / "hf", family), 5
    weights = load_file(path / "model.safetensors")
    for name in weights:
        if name.endswith(("embed_tokens.weight", "lm_head.weight", "backbone.embeddings.weight")):
            weights[name][drawn] = weights[name][other].clone()
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    prompts = make_rows(family).select_indices([1, 4])
    keys = [key for key in KEYS if key in prompts]
    rows = BatchedDataDict({key: [*prompts[key], *prompts[key]] for key in keys})
    for key in ("input_ids", "input_lengths", "token_mask", "sample_mask"):
        rows[key] = torch.cat([prompts[key], prompts[key]])
    rows["pixel_values"][2:] = [pixels.clone() for pixels in prompts["pixel_values"]]
    rows["input_ids"][3, rows["input_lengths"][3] - 2] = 9
    last = rows["input_lengths"][2] - 1
    replaced_BS = rows["input_ids"].clone()
    for back, token in enumerate(drawn):
        rows["input_ids"][2, last - back], replaced_BS[2, last - back] = token, other
    config = policy_config(path, {}) | {"max_total_sequence_length": 64, "logprob_batch_size": 4}
    ((found, replaced, patches),) = ranks.run(1, read_answers, config, rows, replaced_BS)
    if family == "qwen2_5_vl":
        assert patches == [sum(len(pixels) for pixels in prompts["pixel_values"])]
    inside = torch.arange(1, found.size(1)) < rows["input_lengths"].unsqueeze(1)
    exact = exact_of(path, BatchedDataDict({**rows, "input_ids": replaced_BS}))
    assert_equal("logprobs", found[:, 1:][inside], exact[inside])
    assert torch.equal(found, replaced)
