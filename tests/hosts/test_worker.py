"""NeMo RL's worker without NeMo RL: what it refuses, what it makes of the driver's rank grid, and
what the host's helpers, where there are any, get from it.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
import torch

from megatron_policy.batch import BatchedDataDict
from megatron_policy.config import GenerationConfig, PolicyConfig
from megatron_policy.errors import ConfigError
from megatron_policy.hosts.nemo_rl import refit
from megatron_policy.hosts.nemo_rl.config import (
    AXES,
    check_layout_of_host,
    parse_host_config,
    shares_devices,
)
from megatron_policy.hosts.nemo_rl.host_imports import find_part
from megatron_policy.hosts.nemo_rl.worker import NemoRLWorker
from megatron_policy.interfaces import LossType
from tests.dist.cases import policy_config
from tests.dist.layouts import LENGTH, SIZES, VOCAB
from tests.hosts.fake_host import PARTS, HostBatch, Meeting, Packed, Protocol, host_with
from tests.losses import SequenceNLL
from tests.picture_models import IMAGE, KEYS, VIDEO, make_model, make_rows
from tests.ranks import RankPool

ROWS = 8
TOKENIZER = SimpleNamespace(pad_token_id=0, eos_token_id=None)
TEMPERATURE = 2.0
SAMPLING = {"TrainingSamplingParams": object}


class Sharding:
    """The driver's rank grid, as the worker reads it."""

    def __init__(self, names: list[str], layout: np.ndarray) -> None:
        self.names, self.layout = names, layout


def grid(*sizes: int, names: list[str] | None = None) -> Sharding:
    return Sharding(names or list(AXES), np.arange(np.prod(sizes)).reshape(sizes))


def test_the_drivers_rank_grid_is_ours_or_both_are_named() -> None:
    sizes = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    config = PolicyConfig.parse(policy_config("/nowhere", sizes))
    check_layout_of_host(grid(2, 3, 1, 2), config)
    check_layout_of_host(grid(2, 3, 2, names=[n for n in AXES if AXES[n] != "cp"]), config)
    check_layout_of_host(None, config)
    turned = Sharding(list(AXES), np.arange(12).reshape(2, 3, 1, 2).swapaxes(0, 3))
    swapped = ["data_parallel", "pipeline_parallel", "context_parallel", "tensor_parallel"]
    for wrong in (grid(2, 2, 1, 3), grid(3, 2, 1, 2, names=swapped), turned):
        with pytest.raises(ConfigError, match=r"laid out .*asks for .*'tensor_parallel': 2"):
            check_layout_of_host(wrong, config)
    with pytest.raises(ConfigError, match=r"6"):
        check_layout_of_host(grid(2, 3, 1, 1), config)


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"skip_weight_load": True}, NotImplementedError, "swap_weights_via_reshard"),
        ({"worker_color": "red"}, ConfigError, "no argument worker_color"),
    ],
)
def test_an_argument_that_is_not_for_this_worker_is_refused_before_the_model_is_made(
    arguments: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        NemoRLWorker(policy_config("/nowhere", {}), None, **arguments)


@pytest.mark.parametrize("generation", [None, {"max_new_tokens": 4, "top_p": 0.9, "top_k": 7}])
def test_filters_apply_to_logprobs_where_the_host_trains_on_what_they_leave(
    generation: dict[str, Any] | None,
) -> None:
    config = PolicyConfig.parse(policy_config("/nowhere", {}, generation=generation))
    with host_with({"nemo_rl.algorithms.logits_sampling_utils": SAMPLING}):
        assert parse_host_config(config, None, None) == config
    # An older one only generates by them.
    with host_with({}):
        older = parse_host_config(config, None, None).generation
    if generation is None:
        assert older is None
    else:
        assert older == GenerationConfig(**generation, filter_logprobs=False)


def test_weights_without_an_optimizers_path_start_a_new_optimizer() -> None:
    config = PolicyConfig.parse(policy_config("/nowhere", {}))
    changed = parse_host_config(config, "weights", None)
    assert changed.megatron_cfg.checkpoint.fresh_optimizer
    assert changed.megatron_cfg.checkpoint != config.megatron_cfg.checkpoint
    assert changed.megatron_cfg.optimizer == config.megatron_cfg.optimizer
    for paths in ((None, None), ("weights", "optimizer")):
        assert parse_host_config(config, *paths) == config


BASE_WORKER = "nemo_rl.models.policy.workers.base_policy_worker"


class Waiting:
    """A worker of the newest host."""

    def finalize_async_save(self) -> None: ...


@pytest.mark.parametrize(
    ("parts", "waits"),
    [
        ({}, True),  # no host
        (PARTS, False),
        (PARTS | {BASE_WORKER: {"AbstractPolicyWorker": object}}, False),
        (PARTS | {BASE_WORKER: {"AbstractPolicyWorker": Waiting}}, True),
    ],
)
def test_saves_block_where_the_host_renames_them_without_waiting(
    parts: dict[str, Any], waits: bool, caplog: pytest.LogCaptureFixture
) -> None:
    config = PolicyConfig.parse(policy_config("/nowhere", {"checkpoint": {"async_save": True}}))
    with host_with(parts):
        changed = parse_host_config(config, None, None)
    assert changed.megatron_cfg.checkpoint.async_save == waits
    assert ("async_save has no effect" in caplog.text) != waits


def save_and_rename(path: Path, folder: Path) -> str:
    """What rank 0 logs of a save that the host renames at once, and of the start from it."""
    settings = {"checkpoint": {"async_save": True, "ckpt_assume_constant_structure": True}}
    config, said = policy_config(path, settings), io.StringIO()
    log, handler = logging.getLogger("megatron_policy"), logging.StreamHandler(said)
    log.addHandler(handler)
    with host_with(PARTS):
        worker = NemoRLWorker(config, TOKENIZER)
        worker.save_checkpoint(weights_path=str(folder / "tmp_step_1" / "weights"))
        saved = (folder / "tmp_step_1").rename(folder / "step_1") / "weights"
        worker.shutdown()
        worker = NemoRLWorker(config, TOKENIZER, weights_path=str(saved))
        worker.shutdown()
    log.removeHandler(handler)
    return said.getvalue()


def test_a_host_that_renames_at_once_keeps_its_checkpoint_and_the_log_tells_what_was_restored(
    ranks: RankPool, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    (said,) = ranks.run(1, save_and_rename, checkpoint("qwen2", vocab=VOCAB), tmp_path)
    assert "async_save has no effect" in said
    assert "keys without effect: " in said and "checkpoint.ckpt_assume_constant_structure" in said
    assert "step_1/weights/iter_0000000, step 0: restored weights" in said
    assert "not restored: optimizer (a new one was requested" in said


def name_types(rows: dict[str, Any]) -> dict[str, Any]:
    """Rows with `mm_token_type_ids`."""
    ids_BS = rows["input_ids"]
    return rows | {"mm_token_type_ids": (ids_BS == IMAGE) + 2 * (ids_BS == VIDEO).long()}


def lay_out_as_makers(rows: dict[str, Any]) -> dict[str, Any]:
    """Rows of Nemotron Omni in the layout of its makers' processor."""
    makers: dict[str, Any] = {key: rows.pop(key, [None] * 8) for key in KEYS}
    layout = ("pixel_values", "imgs_sizes", "num_frames", "sound_clips", "sound_length")
    for key in layout:
        rows[key] = [None] * 8
    for row in range(8):
        if (grids := makers["image_grid_hw"][row]) is not None:
            cut = makers["pixel_values"][row].split(grids.prod(1).tolist())
            seen = [
                patches.view(*grid, 3, 2, 2).permute(2, 0, 3, 1, 4).reshape(3, *(2 * grid))
                for patches, grid in zip(cut, grids, strict=True)
            ]
            rows["imgs_sizes"][row], rows["num_frames"][row] = 2 * grids, torch.ones(len(grids))
            most = (2 * grids).max(0).values.tolist()
            filled = torch.zeros(len(seen), 3, *most)
            for place, each in zip(filled, seen, strict=True):
                place[:, : each.size(1), : each.size(2)] = each
            rows["pixel_values"][row] = filled
        if (video := makers["pixel_values_videos"][row]) is not None:
            frames = video.unflatten(2, (2, 3)).flatten(0, 2)
            rows["pixel_values"][row], count = frames, torch.tensor([len(frames)])
            rows["imgs_sizes"][row] = torch.tensor([[*frames.shape[2:]]] * len(frames))
            rows["num_frames"][row] = count
        if (clips := makers["input_features"][row]) is not None:
            rows["sound_clips"][row] = clips
            rows["sound_length"][row] = makers["input_features_mask"][row].sum(1)
    return rows


FORMS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "qwen3_vl": name_types,
    "nemotron_h_omni": lay_out_as_makers,
}


def read_pictures(path: Path, family: str, packed: Callable[..., Any]) -> None:
    """The host's worker makes of pictures that are `packed` what its policy makes of lists of them,
    in reading, in a step and in a step in parts.
    """
    rows = make_rows(family)
    ids_BS = rows["input_ids"]
    given = FORMS[family](dict(rows))
    lists = {key: packed(value, 0) for key, value in given.items() if isinstance(value, list)}
    host_rows = HostBatch({**given, **lists})
    config = policy_config(path, {}) | {"max_total_sequence_length": ids_BS.size(1)}
    with host_with(PARTS):
        worker = NemoRLWorker(config | {"is_vlm": True}, TOKENIZER, processor=object())
        read = worker.get_logprobs(data=host_rows)
        assert type(read) is HostBatch
        assert torch.equal(read["logprobs"], worker.policy.logprobs(rows))
        expected = worker.policy.train(rows, SequenceNLL(), eval_mode=True, gbs=8, mbs=8)
        call = {"loss_fn": SequenceNLL(), "gbs": 8, "mbs": 8}
        trained = worker.train(data=host_rows, eval_mode=True, **call)
        assert torch.equal(trained["global_loss"], expected["loss"])
        worker.begin_train_step(**call)
        worker.train_microbatch(data=host_rows)
        assert torch.equal(worker.finish_train_step()["global_loss"], expected["loss"])
        worker.shutdown()


@pytest.mark.parametrize("family", FORMS)
def test_what_the_host_packs_for_towers_is_read_row_by_row(
    ranks: RankPool, tmp_path: Path, family: str
) -> None:
    ranks.run(1, read_pictures, make_model(tmp_path / "hf", family), family, Packed)


def batch() -> BatchedDataDict:
    generator = torch.Generator().manual_seed(3)
    return BatchedDataDict(
        {
            "input_ids": torch.randint(0, VOCAB, (ROWS, LENGTH), generator=generator),
            "input_lengths": torch.full((ROWS,), LENGTH),
            "token_mask": torch.ones(ROWS, LENGTH),
            "sample_mask": torch.ones(ROWS),
            # Not along the sequence: 3 places, and none where the row is.
            "places": torch.arange(ROWS * 3).reshape(ROWS, 3),
        }
    )


class AsksTheHost(SequenceNLL):
    """Its data are the host's, with every key as the driver has sent it."""

    def __call__(self, data: Any, **kwargs: Any) -> Any:
        assert type(data) is HostBatch
        first = data["places"][0, 0]
        rows = data["sample_mask"].numel()
        assert torch.equal(data["places"], first + torch.arange(rows * 3).reshape(rows, 3))
        return super().__call__(data, **kwargs)


class Unfed:
    loss_type, input_type = LossType.TOKEN_LEVEL, "draft"


def of_one_rank(path: Path) -> dict[str, Any]:
    """Everything that needs a model, on a rank of two."""
    generation = {"max_new_tokens": 4, "temperature": TEMPERATURE}
    config = policy_config(path, {"tensor_model_parallel_size": 2}, generation=generation)
    data, found = batch(), {}
    with host_with(PARTS):
        worker = NemoRLWorker(config, TOKENIZER, worker_sharding_annotations=grid(1, 1, 1, 2))
        found["logprobs"] = worker.get_logprobs(data=data)
        check_reading(worker, data)
        found["trained"] = check_training(worker, data, found["logprobs"]["logprobs"])
        check_refit(worker)
        worker.offload_after_refit()
        info = worker.get_gpu_info()
        assert info["rank"] == info["local_device_id"] + worker.policy.rank
        assert not ray.is_initialized(), "a process without Ray has started it"
        assert info["memory_allocated_mb"] == 0 and info["device_name"].startswith("CPU ")
        prompts = {"input_ids": data["input_ids"][:, :4], "input_lengths": torch.full((ROWS,), 4)}
        generated = worker.generate(data=prompts, greedy=True)  # with nothing on the device
        assert generated["generation_lengths"].tolist() == [4] * ROWS
        worker.prepare_for_lp_inference(keep_train_buffers=True)
        attributes = worker.check_tensor_parallel_attributes()
        worker.zero_out_weights()
        assert not any(tensor.any() for tensor in worker.return_state_dict().values())
        worker.start_gpu_profiling()
        worker.stop_gpu_profiling()
        worker.shutdown()
    return found | {"attributes": attributes}


def check_reading(worker: NemoRLWorker, data: BatchedDataDict) -> None:
    found = worker.get_topk_logits(data=data, k=VOCAB)
    assert type(found) is HostBatch
    # All of the vocabulary: at the temperature of the policy they are what it reads.
    scores = found["topk_logits"].log_softmax(-1)
    order = found["topk_indices"].argsort(-1)
    next_tokens = data["input_ids"][:, 1:].unsqueeze(-1)
    read = scores.gather(-1, order)[:, :-1].gather(-1, next_tokens).squeeze(-1)
    torch.testing.assert_close(read, worker.get_logprobs(data=data)["logprobs"][:, 1:])
    # The data plane: what it fetches is read and written back by the one rank that is to.
    cfg: dict[str, Any] = {}
    worker.setup_data_plane(cfg=cfg)
    worker.get_logprobs_presharded(meta=data, micro_batch_size=4)
    assert cfg["read"] == ("float32", TOKENIZER)
    assert ("prev_logprobs" in cfg) == (worker.policy.rank == 0)
    with pytest.raises(NotImplementedError, match="train_microbatch_presharded is not implemented"):
        worker.train_microbatch_presharded(meta=data)


def check_training(worker: NemoRLWorker, data: Any, logprobs: torch.Tensor) -> dict[str, Any]:
    call = {"gbs": ROWS, "mbs": 2, "check_dim_skip_keys": ["places"]}
    with pytest.raises(NotImplementedError, match="'draft': training a draft model"):
        worker.train(data=data, loss_fn=Unfed(), **call)
    result = worker.train(data=data, loss_fn=AsksTheHost(), eval_mode=True, **call)
    expected = -logprobs[:, 1:].mean()
    torch.testing.assert_close(result["global_loss"], expected.reshape(1))
    with_rollouts = HostBatch(dict(data) | {"generation_logprobs": logprobs + 0.25})
    sampled = worker.train(data=with_rollouts, loss_fn=AsksTheHost(), eval_mode=True, **call)
    mismatch = sampled["rollout_mismatch"]
    # At the temperature of the host's rollouts.
    assert abs(mismatch["train_rollout_logprob_abs_diff"] - 0.25) < 1e-5
    assert abs(mismatch["train_rollout_logprob_abs_diff_max"] - 0.25) < 1e-5
    assert mismatch["train_rollout_tokens"] == ROWS * (LENGTH - 1)
    return {name: result[name] for name in ("gpu_name", "model_dtype", "rank")}


def check_refit(worker: NemoRLWorker) -> None:
    """The host's producer gets every tensor, as announced and in that order."""
    announced = worker.prepare_refit_info()
    sinks: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(refit, "serves_host_engines", lambda: True)
        worker.init_collective(
            ip="127.0.0.1", port=1, world_size=3, train_world_size=2, nccl_peer="vllm"
        )
        group = worker.refits._engines
        assert group.made == ("127.0.0.1", 1, worker.policy.rank, 3) and group.peer == "vllm"
        worker.broadcast_weights_for_collective(kv_scales=None, buffer_size_bytes=7, num_buffers=2)
        patch.setattr(worker.policy, "refit", lambda sink, adapters: sinks.append(sink))
        worker.stream_weights_via_ipc_zmq(buffer_size_bytes=2**20, kv_scales=None)
        check_refit_of_one_rank(worker, announced)
    assert group.buffer_size_bytes == 7
    assert [name for name, _ in group.sent] == list(announced)
    for name, tensor in group.sent:
        shape, dtype = announced[name]
        assert shape.numel() == tensor.numel() and (tensor.shape, tensor.dtype) == (shape, dtype)
    assert sinks[0]._dialect.end is Protocol.COMPLETE
    assert worker.get_zmq_address() == f"ipc:///tmp/{worker.report_device_id()}.sock"


def check_refit_of_one_rank(worker: NemoRLWorker, announced: dict[str, Any]) -> None:
    """A host that packs nothing (0.3): the first rank alone is in the group with the engines."""
    without = {name: found for name, found in PARTS.items() if "packed_tensor" not in name}
    with host_with(without):
        worker.init_collective(ip="127.0.0.1", port=1, world_size=2)
        worker.broadcast_weights_for_collective()
    group = worker.refits._engines
    assert (group is not None) == (worker.policy.rank == 0)
    if group is not None:
        assert [tensor.shape for _, tensor in group.sent] == [s for s, *_ in announced.values()]


def test_a_worker_answers_in_the_hosts_types_and_serves_the_hosts_helpers(
    ranks: Any, checkpoint: Callable[..., Path]
) -> None:
    one, other = ranks.run(2, of_one_rank, checkpoint("qwen2", **SIZES))
    assert type(one["logprobs"]) is HostBatch
    assert torch.equal(one["logprobs"]["logprobs"], other["logprobs"]["logprobs"])
    assert one["trained"]["model_dtype"] == torch.float32
    assert one["trained"]["gpu_name"].startswith("CPU ")
    split = {each["name"]: each["partition_dim"] for each in one["attributes"]["tp_params"]}
    assert split["module.decoder.layers.0.mlp.linear_fc1.weight"] == 0
    assert split["module.decoder.layers.0.mlp.linear_fc2.weight"] == 1
    whole = [each["name"] for each in one["attributes"]["non_tp_params"]]
    assert "module.decoder.final_layernorm.weight" in whole
    assert one["attributes"]["tp_size"] == 2
    assert one["attributes"]["total_params"] == len(split) + len(whole)


class FormerGroup:
    @staticmethod
    def create(host: str, port: int, rank: int, world_size: int) -> tuple[Any, ...]:
        return host, port, rank, world_size


def test_a_host_before_its_own_group_takes_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = {
        ("vllm.distributed.utils", "StatelessProcessGroup"): FormerGroup,
        (
            "vllm.distributed.device_communicators.pynccl",
            "PyNcclCommunicator",
        ): lambda met, device: ("communicator", met),
    }
    monkeypatch.setattr(refit, "find_part", lambda *name: parts.get(name))
    joined = refit.join_engines("here", 7, 1, 4, {})
    assert joined == ("communicator", ("here", 7, 1, 4))
    parts.clear()
    with pytest.raises(NotImplementedError, match="vLLM, whose group would be used"):
        refit.join_engines("here", 7, 1, 4, {})


def test_a_host_with_a_group_of_its_own_makes_it_in_its_own_way() -> None:
    with host_with(PARTS):
        group = refit.join_engines("here", 7, 1, 4, {"nccl_peer": None})
    assert isinstance(group, Meeting) and group.peer == "nemo"


@pytest.mark.parametrize(
    ("generation", "shared"),
    [
        (None, False),
        ({"temperature": 1.0}, True),
        ({"colocated": {"enabled": True}}, True),
        ({"colocated": {"enabled": False, "resources": {}}}, False),
    ],
)
def test_engines_share_devices_unless_the_host_has_none_or_places_them_apart(
    generation: Any, shared: bool
) -> None:
    assert shares_devices({"generation": generation}) == shared


def test_a_part_that_lacks_what_it_needs_is_not_taken_for_missing(tmp_path: Path) -> None:
    package = tmp_path / "a_host"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "whole.py").write_text("NAME = 1")
    (package / "lacking.py").write_text("import not_installed_anywhere\nNAME = 1")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        assert find_part("a_host.whole", "NAME") == 1
        assert find_part("a_host.whole", "OTHER") is None
        assert find_part("a_host.absent.deeper", "NAME") is None
        assert find_part("no_host.at_all", "NAME") is None
        with pytest.raises(ImportError, match=r"a_host\.lacking.*not_installed_anywhere.*Install"):
            find_part("a_host.lacking", "NAME")
