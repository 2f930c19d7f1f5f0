"""Models that also see pictures or hear sound: log-probabilities, and what two steps of training
make of every parameter, the tower's included, are those of transformers under every way to split
and to batch.

Shapes: B rows, S positions.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
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
from megatron_policy.refit.receive.receiver import Receiver
from megatron_policy.refit.transports.ipc.transport import IpcStream
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
from tests.dist.resuming import iteration, paths, read_disk
from tests.dist.test_export import tensors_of
from tests.exact import ROOM, Exact, InDouble, assert_equal, furthest
from tests.invariance import page
from tests.invariance.cases import CLOSEST
from tests.invariance.further import (
    AT_ONCE,
    BF16,
    BY_RAY,
    IN_BF16,
    OF_FAMILIES,
    PICTURES_TABLE,
    RAY,
    RESUMED,
    Collected,
    FurtherCell,
    name_resumed,
)
from tests.invariance.oracle import Choices
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
OF_ALL = "EP2xTP2xPP2xCP2+SP, distributed optimizer, overlaps"
WITH_EXPERTS: dict[str, tuple[Layout, str]] = {
    "one process": (layout(1), "packed"),
    "EP2xTP2+SP": (EXPERT_LAYOUTS["EP2xTP2+SP"], "packed"),
    "PP2": (layout(2, pp=2), "padded"),
    "EP2xCP2": (EXPERT_LAYOUTS["EP2xCP2"], "padded"),
    OF_ALL: (EXPERT_LAYOUTS[OF_ALL], "packed"),
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
    "|make (4|16)|is empty in row"
)
"""What is said to a rank whose rows lack the last four patches, or the last picture."""
FURTHER: dict[str, tuple[Layout, str]] = {
    "PP2xVPP2": (layout(2, pp=2, vpp=2), "packed"),
    "TP2+SP, recomputed": (layout(2, tp=2, **SP, **RECOMPUTED), "packed"),
    "one process, recomputed": (layout(1, **RECOMPUTED), "padded"),
}
SOME = {name: LAYOUTS[name] for name in ("TP2+SP", "PP2", "CP2", "DP2, overlaps")}
SOME |= {"FSDP2": SHARDED["FSDP2"]}
OLDER = {name: LAYOUTS[name] for name in ("TP2+SP", "PP2")} | {"FSDP2": SHARDED["FSDP2"]}
LAYOUTS_OF = {
    "gemma3": LAYOUTS | SHARDED,
    **dict.fromkeys(("glm4v", "idefics3", "llava", "llava_next"), SOME),
    **dict.fromkeys(("llava_onevision", "mistral3"), SOME),
    "internvl": SOME | {n: SHARDED[n] for n in ("FSDP2 x 2", "FSDP2 TP2+SP x 2")},
    "smolvlm": SOME | {n: SHARDED[n] for n in ("FSDP2 x 2", "FSDP1 x 2")},
    "glm4v_moe": WITH_EXPERTS | {"FSDP2": SHARDED["FSDP2"]},
    "kimi_k25": WITH_EXPERTS,
    # Experts have tensor parallelism with sequence parallelism alone.
    "nemotron_h_omni": WITH_EXPERTS | {n: each for n, each in LAYOUTS.items() if n != "TP2"},
    "qwen2_vl": OLDER,
    "qwen2_5_omni_thinker": LAYOUTS | {n: SHARDED[n] for n in ("FSDP2 x 2", "FSDP2 CP2")},
    "qwen2_5_vl": LAYOUTS | SHARDED | FURTHER,
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
    config: dict[str, Any],
    rows: BatchedDataDict,
    root: Path,
    fault: str = "",
    *,
    numbers: Sequence[int] = (0, 1),
    resumed: Path | None = None,
) -> dict[str, Any]:
    """The steps of these numbers, what they leave, of which there is a checkpoint below `root`, and
    the log-probabilities of the rows before and after. Goes on from that below `resumed`, if any.
    """
    with (
        planted(fault),
        seen_patches() as patches,
        open_policy(config) as policy,
    ):
        if resumed is not None:
            policy.load_checkpoint(**paths(resumed))
        share, steps = own_share(policy, rows), own_steps(policy, rows)
        texts = texts_of(share)
        seen: dict[str, Any] = {"dp": policy.coords.dp, "before": policy.logprobs(texts)}
        mbs = 4 if policy.topology.dp == 1 else 1
        seen["refused"] = refuse_pictures(policy, steps[0], mbs)
        seen["steps"] = [
            policy.train(steps[number], LOSSES["token"](), gbs=GLOBAL_BATCH, mbs=mbs)
            for number in numbers
        ]
        seen["after"] = policy.logprobs(texts)
        seen["weights"] = {name: tensor.clone() for name, tensor in policy.export()}
        policy.save_checkpoint(**paths(root))
        return seen | {"patches": patches}


def read_towers(root: Path) -> dict[str, torch.Tensor]:
    """What the checkpoint of two steps has of the gradients of towers, see
    `oracle.Trained.average_of_towers`.
    """
    kept = "optimizer.state.exp_avg.embedding.shell."
    states = read_disk(iteration(paths(root)["optimizer_path"], 2))
    return {n.removeprefix(kept): each for n, each in states.items() if n.startswith(kept)}


Seen = Sequence[dict[str, Any]]
"""What `train_on_pictures` returned on each rank."""


@dataclass(frozen=True)
class Expected:
    """What transformers' class makes of two steps with a checkpoint, and its next-token
    log-probabilities `[B, S - 1]` before and after.
    """

    path: Path
    rows: BatchedDataDict
    hf: oracle.Learned
    before: Exact
    after: Exact
    closest: float
    """See `tests.invariance.oracle.Truth`."""

    def configure(self, case: Layout, batching: str) -> dict[str, Any]:
        """A policy's configuration; in bf16 if the checkpoint is."""
        config = policy_config(self.path, case.megatron, **BATCHINGS[batching])
        if self.hf.dtype is torch.bfloat16:
            config["precision"] = "bfloat16"
        return config | {"max_total_sequence_length": self.rows["input_ids"].size(1)}

    def assert_same(
        self, begun: Seen, ended: Seen, root: Path, context: object
    ) -> dict[str, tuple[float, float]]:
        """What ranks have seen before the first step and after the last, which left a checkpoint
        below `root`, is as close as rounding allows; returns the largest differences.
        """
        with margins.recorded() as record:
            for when, seen in (("before", begun), ("after", ended)):
                for rank in seen:
                    found, exact = self.pair_logprobs(seen, rank, when)
                    assert_equal(f"logprobs {when}", found, exact, context)
            for rank in ended:
                self.hf.assert_same_steps(rank["steps"], context)
                assert rank["weights"].keys() == tensors_of(self.path).keys()
                self.hf.assert_same_weights(rank["weights"])
            apart = self.hf.compare_towers(read_towers(root))
            margins.check("tower's gradients", apart, ROOM * self.hf.towers_rounding, context)
        return record

    def pair_logprobs(
        self, seen: Seen, rank: dict[str, Any], when: str
    ) -> tuple[torch.Tensor, Exact]:
        """Those of a rank, `before` or `after`, inside the rows of its replica, and exact ones."""
        order = BatchedDataDict({"row": torch.arange(self.rows.size)})
        shares = order.shard_by_batch_size(1 + max(each["dp"] for each in seen), GLOBAL_BATCH)
        own = shares[rank["dp"]]["row"]
        places_S = torch.arange(1, self.rows["input_ids"].size(1))
        inside = places_S < self.rows["input_lengths"][own, None]
        exact = self.before if when == "before" else self.after
        return rank[when][:, 1:][inside], exact[own][inside]


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What is expected of a family's checkpoint."""

    @cache
    def made(family: str, dtype: torch.dtype = torch.float32) -> Expected:
        path = make_model(tmp_path_factory.mktemp(family) / "hf", family, dtype)
        if family == "qwen3_5_moe":
            stack_experts(path)
        rows = rows_of(family)
        with Choices() as choices:
            hf = oracle.Learned.of(path, rows, GLOBAL_BATCH, loss_of, dtype, load=load_model)
            before, after = exact_of(path, rows, dtype), hf.read(partial(hf_logprobs, rows=rows))
        return Expected(path, rows, hf, before, after, choices.closest)

    return made


@pytest.fixture(scope="module")
def measured() -> Iterator[Collected]:
    """Collects differences; writes them on the page if the environment asks for it."""
    collected = Collected(PICTURES_TABLE)
    yield collected
    if os.environ.get(page.WRITE):
        page.write_further(collected)


def texts_of(rows: BatchedDataDict) -> BatchedDataDict:
    keys = ("input_ids", "input_lengths", *KEYS)
    return BatchedDataDict({key: rows[key] for key in keys if key in rows})


def exact_of(path: Path, rows: BatchedDataDict, dtype: torch.dtype = torch.float32) -> Exact:
    """Next-token log-probabilities `[B, S - 1]` of the checkpoint's model."""
    with torch.no_grad():
        rounded = hf_logprobs(load_model(path, dtype), rows)
        exact_model = load_model(path, torch.float64)
        with InDouble():
            return Exact.between(rounded, hf_logprobs(exact_model, rows))


@pytest.mark.parametrize(
    ("family", "name"),
    [
        pytest.param(family, name, marks=[pytest.mark.daily] * ((family, name) in DAILY))
        for family in LAYOUTS_OF
        for name in LAYOUTS_OF[family]
    ],
)
def test_pictures_count_as_in_transformers(
    ranks, model_of, measured: Collected, tmp_path: Path, family: str, name: str
) -> None:
    expected = model_of(family)
    case, batching = LAYOUTS_OF[family][name]
    config = expected.configure(case, batching)
    seen = ranks.run(case.world, train_on_pictures, config, expected.rows, tmp_path)
    for rank in seen:
        assert re.search(REFUSED_WITHOUT, rank["refused"])
        if "few" in batching:
            assert max(rank["patches"]) <= FEW
    record = expected.assert_same(seen, seen, tmp_path, name)
    if family in OF_FAMILIES:
        assert expected.closest > CLOSEST, "rounding alone could choose another expert"
    measured.add(FurtherCell(name, batching, AT_ONCE, family), record)


@pytest.mark.nightly
@pytest.mark.parametrize(("family", "name"), IN_BF16)
def test_pictures_in_bf16_are_as_near_to_exact_arithmetic_as_in_transformers(
    ranks, model_of, measured: Collected, tmp_path: Path, family: str, name: str
) -> None:
    expected = model_of(family, torch.bfloat16)
    case, batching = LAYOUTS_OF[family][name]
    config = expected.configure(case, batching)
    seen = ranks.run(case.world, train_on_pictures, config, expected.rows, tmp_path)
    record = expected.assert_same(seen, seen, tmp_path, name)
    measured.add(FurtherCell(name, batching, BF16, family), record)


@pytest.mark.nightly
@pytest.mark.parametrize(("family", "saver", "loader"), RESUMED)
def test_training_goes_on_from_a_checkpoint_under_another_layout(
    ranks, model_of, measured: Collected, tmp_path: Path, family: str, saver: str, loader: str
) -> None:
    """Each layout takes one of the two steps."""
    expected, half, whole = model_of(family), tmp_path / "half", tmp_path / "whole"
    (first, _), (then, batching) = (LAYOUTS_OF[family][name] for name in (saver, loader))
    configs = [expected.configure(*LAYOUTS_OF[family][name]) for name in (saver, loader)]
    begun = ranks.run(
        first.world, partial(train_on_pictures, numbers=[0]), configs[0], expected.rows, half
    )
    go_on = partial(train_on_pictures, numbers=[1], resumed=half)
    seen = ranks.run(then.world, go_on, configs[1], expected.rows, whole)
    seen = [rank | {"steps": begun[0]["steps"] + rank["steps"]} for rank in seen]
    record = expected.assert_same(begun, seen, whole, (saver, loader))
    measured.add(FurtherCell(loader, batching, name_resumed(saver), family), record)


@pytest.mark.nightly
@pytest.mark.parametrize(("family", "name"), BY_RAY)
def test_an_engine_is_sent_what_ray_workers_have_learnt_as_transformers_does(
    ray_instance: Any, model_of, measured: Collected, tmp_path: Path, family: str, name: str
) -> None:
    from tests.ray.policies import opened

    expected, (case, batching) = model_of(family), LAYOUTS_OF[family][name]
    rows, address = expected.rows, f"ipc://{tmp_path}/engine.sock"
    received: dict[str, torch.Tensor] = {}
    receiver = Receiver(
        lambda weights: received.update((name, each.clone()) for name, each in weights)
    )
    with opened(expected.configure(case, batching)) as policy:
        seen: dict[str, Any] = {"before": policy.get_logprobs(texts_of(rows))["logprobs"]}
        seen["steps"] = [
            policy.train(rows.get_batch(number, GLOBAL_BATCH), LOSSES["token"](), mbs=1)
            for number in range(2)
        ]
        seen["after"] = policy.get_logprobs(texts_of(rows))["logprobs"]
        with ThreadPoolExecutor(1) as threads:
            done = threads.submit(receiver.receive_ipc_stream, address)
            assert policy.refit(IpcStream(address)) == done.result()
        policy.save_checkpoint(**paths(tmp_path))
    ended = [seen | {"dp": 0, "weights": received}]
    record = expected.assert_same(ended, ended, tmp_path, name)
    measured.add(FurtherCell(name, batching, RAY, family), record)


@pytest.mark.parametrize(
    ("fault", "family", "name"),
    [
        ("partial gradients", "qwen3_vl", "TP2+SP"),
        ("plain positions", "qwen3_vl", "TP2+SP"),
        ("nothing deep", "qwen3_vl", "TP2+SP"),
        ("plain positions", "qwen2_5_vl", "TP2+SP"),
        ("partial gradients", "qwen2_5_vl", "TP2+SP"),
        ("plain positions", "qwen3_vl_moe", "EP2xTP2+SP"),
        ("nothing deep", "qwen3_vl_moe", "EP2xTP2+SP"),
        ("partial gradients", "qwen3_vl_moe", "EP2xTP2+SP"),
        ("causal pictures", "gemma3", "CP2"),
        ("plain positions", "qwen3_vl", "FSDP2 x 2"),
        ("nothing deep", "qwen3_vl", "FSDP2 x 2"),
        ("causal pictures", "gemma3", "FSDP2 x 2"),
    ],
)
def test_a_planted_fault_is_ten_times_further_away_than_all_rounding(
    ranks, model_of, tmp_path: Path, fault: str, family: str, name: str
) -> None:
    """Gradients of towers that ranks do not add up are seen in nothing else before a step."""
    expected = model_of(family)
    hf, config = expected.hf, expected.configure(*LAYOUTS_OF[family][name])
    seen = ranks.run(2, train_on_pictures, config, expected.rows, tmp_path, fault)
    with margins.apart(), pytest.raises(AssertionError, match="that rounding can explain"):
        expected.assert_same(seen, seen, tmp_path, fault)
    assert hf.compare_towers(read_towers(tmp_path)) > 10 * ROOM * hf.towers_rounding
    for rank in seen:
        found, exact = expected.pair_logprobs(seen, rank, "before")
        apart = furthest(found, exact.value) / (ROOM * exact.rounding)
        assert apart < 1 if fault == "partial gradients" else apart > 10


@pytest.mark.nightly
@pytest.mark.parametrize("fault", ["plain positions", "nothing deep", "partial gradients"])
def test_a_planted_fault_is_further_away_than_rounding_in_bf16(
    ranks, model_of, tmp_path: Path, fault: str
) -> None:
    expected = model_of("qwen3_vl", torch.bfloat16)
    config = expected.configure(*LAYOUTS["TP2+SP"])
    ranks.run(2, train_on_pictures, config, expected.rows, tmp_path, fault)
    apart = expected.hf.compare_towers(read_towers(tmp_path))
    assert apart > ROOM * expected.hf.towers_rounding


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


def train_groups(config: dict[str, Any], rows: BatchedDataDict, root: Path) -> dict[str, Any]:
    """As `train_on_pictures`, and whether there is a graph of what made features."""
    graphs, call = set[bool](), PictureEmbedder._call

    def watched(*args: Any) -> dict[str, Any]:
        given = call(*args)
        graphs.add(given["inputs_embeds"].requires_grad)
        return given

    with patch.object(PictureEmbedder, "_call", watched):
        return train_on_pictures(config, rows, root) | {"graph": True in graphs}


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["TP2+SP", "FSDP2 x 2", "FSDP1 x 2"])
@pytest.mark.parametrize("groups", GROUPS)
def test_what_is_frozen_keeps_its_values_and_all_else_learns(
    ranks, model_of, tmp_path: Path, groups: str, name: str
) -> None:
    """A tower that is frozen leaves no graph behind."""
    expected, own = model_of("qwen3_vl"), partial(own_rates, groups)
    path, rows = expected.path, expected.rows
    hf = oracle.Learned.of(path, rows, GLOBAL_BATCH, loss_of, load=load_model, own=own)
    config = expected.configure(*LAYOUTS_OF["qwen3_vl"][name])
    section = config if name.startswith("FSDP") else config["megatron_cfg"]
    section["optimizer"]["param_groups"] = GROUPS[groups]
    for rank in ranks.run(2, train_groups, config, rows, tmp_path):
        hf.assert_same_steps(rank["steps"])
        hf.assert_same_weights(rank["weights"])
        assert rank["graph"] == (groups != "frozen tower")


@pytest.mark.nightly
@pytest.mark.parametrize("part", FROZEN)
def test_what_the_hosts_dtensor_keys_freeze_keeps_its_values_and_all_else_learns(
    ranks, model_of, tmp_path: Path, part: str
) -> None:
    family, frozen = FROZEN[part]
    expected = model_of(family)
    path, rows = expected.path, expected.rows

    def choose(name: str) -> dict[str, float] | None:
        return None if fnmatchcase(name, frozen) else {}

    hf = oracle.Learned.of(path, rows, GLOBAL_BATCH, loss_of, load=load_model, own=choose)
    config = expected.configure(*LAYOUTS_OF[family]["FSDP2 x 2"])
    said = {"freeze_vision_tower": False, f"freeze_{part}": True}
    config["dtensor_cfg"] |= {"automodel_kwargs": {"freeze_config": said}}
    for rank in ranks.run(2, train_on_pictures, config, rows, tmp_path):
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
    path, rows = model_of(family).path, make_rows(family).select_indices([0, 1, 6])
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
    rows["token_mask"][:, :2] = 0  # of a prompt
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
