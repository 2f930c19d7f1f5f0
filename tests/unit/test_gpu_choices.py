"""What is decided differently on a GPU, as far as it can be told without one."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import megatron.core.optimizer as mcore_optimizer
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from megatron_policy import device
from megatron_policy.attention import tile_attention
from megatron_policy.attention.tile_attention import AttentionTile, mask
from megatron_policy.config import PolicyConfig
from megatron_policy.config.layout import topology_of
from megatron_policy.config.model_table import bind_model
from megatron_policy.device import process_groups, shared
from megatron_policy.engines import megatron
from megatron_policy.engines.megatron import cpu_platform, model_config
from megatron_policy.engines.megatron.layers import grouped_experts
from megatron_policy.engines.megatron.optimizer import fuse_weight_gradients
from megatron_policy.errors import ConfigError, RefitError
from megatron_policy.lm_head.fused_tiles import LEAST_WIDTH, WIDTH_MULTIPLE, tiling
from megatron_policy.memory import pinned_pool
from megatron_policy.refit.buffers import Buffer
from megatron_policy.refit.transports.ipc.shared_memory import ExportedBuffer
from megatron_policy.training.reference import Reference
from megatron_policy.workers import assigned_gpu, worker
from tests.conftest import reason_to_fail
from tests.dist.cases import policy_config
from tests.dist.layouts import layout

WATCHDOG = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


@pytest.mark.parametrize("before", [None, "1"])
def test_no_watchdog_ends_the_process_before_a_wait_of_a_private_group_raises(
    monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    seen: dict[str, Any] = {}

    class Nccl:
        class Options:
            _timeout = timedelta()

        def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
            seen.update(watchdog=os.environ[WATCHDOG], timeout=options._timeout)

    monkeypatch.delenv(WATCHDOG, raising=False)
    if before is not None:
        monkeypatch.setenv(WATCHDOG, before)
    monkeypatch.setattr(process_groups, "is_accelerated", lambda: True)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    process_groups.private_group(dist.HashStore(), 0, 2, 10.0)
    assert seen["watchdog"] == "0" and seen["timeout"] > timedelta(seconds=10)
    assert os.environ.get(WATCHDOG) == before


def test_host_memory_is_exchanged_by_gloo_where_there_are_gpus_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[tuple[int, int]] = []

    def gloo(store: Any, rank: int, size: int, timeout: timedelta) -> None:
        made.append((rank, size))

    monkeypatch.setattr(process_groups, "is_accelerated", lambda: True)
    monkeypatch.setattr(dist, "ProcessGroupGloo", gloo)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", None, raising=False)
    process_groups.private_group(dist.HashStore(), 1, 2, 10.0, on_host=True)
    assert made == [(1, 2)]


def on_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> list[int]:
    taken: list[int] = []
    monkeypatch.setattr(device, "is_accelerated", lambda: True)
    monkeypatch.setattr(device, "current_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(device, "_chosen", None)
    monkeypatch.setenv("LOCAL_RANK", "5")
    return taken


def test_kernels_start_in_the_order_of_their_launches_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    on_gpus(monkeypatch, 8)
    monkeypatch.setenv(name, "")  # so that it is put back
    for asked, before, after in ((True, None, "1"), (True, "8", "8"), (False, None, None)):
        monkeypatch.delenv(name)
        if before is not None:
            monkeypatch.setenv(name, before)
        device.place_process(in_launch_order=asked)
        assert os.environ.get(name) == after
        monkeypatch.setenv(name, "")


def test_a_process_without_ray_was_given_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    assert assigned_gpu.find_own_gpu("0,1") is None and "ray" not in sys.modules


@pytest.mark.parametrize(
    ("given", "visible", "count", "index"),
    [
        ([6], None, 8, 6),  # all GPUs of the node are visible
        ([3], None, 8, 3),
        (["6"], "4,5,6,7", 4, 2),  # those that Ray was started with
        (["6"], "4, 5, 6", 4, 2),
        (["6"], "6", 4, 0),  # Ray left its own
        (["GPU-1f"], "GPU-07,GPU-1f", 3, 1),
        ([], None, 8, 5),  # Ray gave none: LOCAL_RANK's
        ([], None, 4, 1),
        ([], "0,1", 8, 5),
        ([6], "0,1", 8, 5),
        (["GPU-1f"], None, 8, 5),
        (["1", "0"], "0,1", 8, 5),  # what Ray says where fewer are visible than it counts
    ],
)
def test_a_worker_binds_to_the_gpu_that_ray_gave_it_before_it_makes_a_policy(
    monkeypatch: pytest.MonkeyPatch,
    given: list[Any],
    visible: str | None,
    count: int,
    index: int,
) -> None:
    """LOCAL_RANK is the number of its bundle, which Ray does not place in the order of GPUs; no
    count gives by it what Ray gave.
    """
    taken = on_gpus(monkeypatch, count)
    ray = SimpleNamespace(is_initialized=lambda: True, get_gpu_ids=lambda: given)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible or "")
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(worker, "MegatronPolicy", lambda *_, **__: device.place_process())
    worker.MegatronPolicyWorkerImpl(policy_config("a-model", {}))
    assert taken == [index]


def test_kernels_are_compiled_and_run_only_where_triton_and_a_compiler_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(device, "_headers", lambda: Path(__file__))
    here = {"triton": True, "clang": True}
    monkeypatch.setattr(
        device.importlib.util, "find_spec", lambda name: object() if here["triton"] else None
    )
    monkeypatch.setattr(device.shutil, "which", lambda name: name if here.get(name) else None)
    for triton, compiler in product((False, True), repeat=2):
        here |= {"triton": triton, "clang": compiler}
        assert device.can_compile() == (triton and compiler)
    here["clang"] = False
    monkeypatch.setenv("CC", "/opt/cc")
    assert device.can_compile()
    monkeypatch.setattr(device, "_headers", lambda: tmp_path / "Python.h")
    assert not device.can_compile()
    (tmp_path / "Python.h").touch()
    assert device.can_compile()
    for value, interprets in (("1", True), ("on", True), ("0", False), ("", False)):
        monkeypatch.setenv("TRITON_INTERPRET", value)
        assert device.can_compile() == (not interprets)
    for compiled in (False, True):
        monkeypatch.setattr(device, "can_compile", lambda c=compiled: c)
        on_gpu: Any = SimpleNamespace(device=torch.device("cuda"))
        assert device.runs_triton(on_gpu) == compiled
        assert not device.runs_triton(torch.empty(1))


def told_of_groups(*, scale: float, window_size: tuple[int, int], enable_gqa: bool = False) -> bool:
    return enable_gqa


def groups_unasked(*, scale: float, window_size: tuple[int, int]) -> bool:
    """As in torch 2.11."""
    return True


def without_windows(*, scale: float) -> None: ...


def test_attention_of_many_sequences_is_one_call_where_torch_and_the_gpu_have_the_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told, older = (SimpleNamespace(varlen_attn=each) for each in (told_of_groups, without_windows))
    for cuda, capability, built, module, found in (
        ("13.0", (9, 0), True, told, True),
        ("13.0", (9, 0), True, SimpleNamespace(varlen_attn=groups_unasked), True),
        ("13.0", (8, 0), True, told, True),
        ("13.0", (7, 5), True, told, False),
        ("13.0", (9, 0), False, told, False),
        (None, (9, 4), True, told, False),
        ("12.8", (9, 0), True, older, False),
        ("12.8", (9, 0), True, SimpleNamespace(), False),
        ("12.4", (9, 0), True, None, False),
    ):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(device, "compute_capability", lambda each=capability: each)
        monkeypatch.setattr(
            torch.backends.cuda, "is_flash_attention_available", lambda each=built: each
        )
        # None in the place of a module: importing it raises ImportError.
        monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", module)
        device._varlen_attn.cache_clear()
        try:
            kernel = device.varlen_kernel()
        finally:
            device._varlen_attn.cache_clear()
        assert (kernel is not None) == found, (cuda, capability, built, module)
        assert kernel is None or kernel(scale=1.0, window_size=(-1, 0))


@pytest.mark.parametrize("shape", [(3, 7), (5, 6), (4, 4), (16, 64)])
def test_the_bias_of_a_rectangle_has_no_elements_and_masks_what_its_mask_does(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int]
) -> None:
    monkeypatch.setattr(tile_attention, "is_accelerated", lambda: True)
    long = AttentionTile(0, 2**17, 0, 2**18, None)  # torch's constructor asks for 275 GB
    assert tile_attention.fused_bias(long, torch.zeros(1)).untyped_storage().nbytes() == 0
    queries, keys = shape
    tile = AttentionTile(0, queries, 0, keys, None)
    random = torch.Generator().manual_seed(queries)
    query, key, value = (
        torch.randn(2, 3, length, 8, generator=random) for length in (queries, keys, keys)
    )
    bias = tile_attention.fused_bias(tile, query)
    assert bias is None or bias.numel() == 0
    ours = F.scaled_dot_product_attention(query, key, value, bias, is_causal=bias is None)
    plain = F.scaled_dot_product_attention(query, key, value, mask(tile, query))
    torch.testing.assert_close(ours, plain, rtol=1e-6, atol=1e-6)


@given(
    tokens=st.integers(0, 100_000),
    vocab=st.integers(1, 300_000),
    missing=st.integers(0, 300),
    chunk=st.integers(1, 4096),
)
def test_rows_of_all_tiles_but_the_last_start_at_multiples_of_a_kernels_block(
    tokens: int, vocab: int, missing: int, chunk: int
) -> None:
    real = max(1, vocab - missing)
    grid = tiling(tokens, vocab, real, chunk)
    assert grid.height * grid.width <= max(chunk * vocab, 1)
    assert grid.width == real or grid.width < WIDTH_MULTIPLE or grid.width % WIDTH_MULTIPLE == 0
    # Rounding costs at most half of what tiles may be narrowed to.
    assert grid.width >= min(real, LEAST_WIDTH, chunk * vocab) - WIDTH_MULTIPLE + 1


@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", None])
def test_memory_that_cannot_be_shared_names_the_variable_that_makes_it_so(
    monkeypatch: pytest.MonkeyPatch, variable: str | None
) -> None:
    def fails(tensor: torch.Tensor) -> Any:
        raise RuntimeError("invalid argument")

    for name in shared._ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    if variable:
        monkeypatch.setenv(variable, "max_split_size_mb:64,expandable_segments:True")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr("torch.multiprocessing.reductions.reduce_tensor", fails)
    exported = ExportedBuffer(64, torch.device("cpu"))
    with contextlib.closing(exported._host):
        exported._host = None  # as on a GPU
        exported.buffer = Buffer(torch.zeros(64, dtype=torch.uint8))
        for share in (exported.handle, lambda: exported.rebuild(torch.bfloat16)):
            with pytest.raises(RefitError, match="cannot share its GPU memory: invalid") as caught:
                share()
            advised = "remove expandable_segments:True from it" in str(caught.value)
            assert advised == (variable is not None) and (variable or "") in str(caught.value)


def test_experts_that_a_gpu_computes_one_by_one_are_reported_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    nothing = torch.zeros(()), None
    monkeypatch.setattr(grouped_experts.SequentialMLP, "forward", lambda *_: nothing)
    monkeypatch.setattr(grouped_experts.GroupedExperts, "_are_grouped", lambda *_: False)
    grouped_experts._say_that_experts_loop.cache_clear()
    experts: Any = object.__new__(grouped_experts.GroupedExperts)
    for accelerated, tokens, reports in ((False, 3, 0), (True, 0, 0), (True, 3, 1), (True, 4, 1)):
        monkeypatch.setattr(grouped_experts, "is_accelerated", lambda found=accelerated: found)
        grouped_experts.GroupedExperts.forward(
            experts, torch.zeros(tokens, 8), torch.tensor([tokens]), torch.ones(tokens)
        )
        assert caplog.text.count("one by one, which is slow") == reports


def test_a_run_for_gpus_fails_where_torch_does_not_see_the_one_that_is_there() -> None:
    for wanted, driver, visible in product((True, False), (True, False), (0, 1)):
        said = reason_to_fail(wanted=wanted, driver=driver, visible=visible)
        assert bool(said) == (wanted and driver and not visible)
        assert said is None or "torch sees none" in said


@pytest.mark.parametrize("accelerated", [True, False])
@pytest.mark.parametrize("installed", [True, False])
def test_megatron_core_finds_no_libraries_of_gpus_where_there_is_no_gpu(
    monkeypatch: pytest.MonkeyPatch, accelerated: bool, installed: bool
) -> None:
    told: list[str] = []
    monkeypatch.setattr(megatron, "is_accelerated", lambda: accelerated)
    monkeypatch.setattr(megatron, "load_torchs_cudnn", lambda: told.append("cuDNN"))
    found = {"transformer_engine": object() if installed else None}
    monkeypatch.setattr(importlib.util, "find_spec", found.__getitem__)
    before: dict[str, Any] = {"apex": object()}
    modules = dict(before)
    megatron.prepare_imports(modules)
    hidden = ("transformer_engine", "transformer_engine_torch", "apex", "amp_C")
    assert modules == (before if accelerated else dict.fromkeys(hidden))
    assert told == (["cuDNN"] if accelerated and installed else [])


@pytest.mark.nightly
def test_without_a_gpu_an_installed_transformer_engine_gives_no_optimizer(tmp_path: Path) -> None:
    package = tmp_path / "transformer_engine" / "pytorch"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("raise RuntimeError('there is no GPU')")
    program = "import megatron_policy.engines.megatron, megatron.core.optimizer as o; print(o.Adam)"
    paths = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    environment = os.environ | {"PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0 and "torch.optim" in done.stdout, done.stderr


def test_an_optimizer_that_needs_a_gpu_is_refused_without_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fused = type("FusedAdam", (), {"__module__": "transformer_engine.pytorch.optimizers"})
    monkeypatch.setattr(mcore_optimizer, "Adam", fused)
    with pytest.raises(ConfigError, match=r"from transformer_engine, which .* import megatron_pol"):
        cpu_platform.refuse_gpu_optimizers()


def test_every_part_of_torchs_cudnn_is_loaded_for_those_who_name_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "torch" / "__init__.py"))
    loaded: list[tuple[str, int]] = []
    monkeypatch.setattr(ctypes, "CDLL", lambda name, mode: loaded.append((name, mode)))
    device.load_torchs_cudnn()
    assert loaded == []
    folder = tmp_path / "nvidia" / "cudnn" / "lib"
    folder.mkdir(parents=True)
    parts = [folder / f"libcudnn{part}.so.9" for part in ("", "_graph", "_heuristic")]
    for part in [*parts, folder / "libcublas.so.13"]:
        part.touch()
    device.load_torchs_cudnn()
    assert loaded == [(str(part), ctypes.RTLD_GLOBAL) for part in sorted(parts)]


@pytest.mark.parametrize("accelerated", [True, False])
@pytest.mark.parametrize("compiled", [True, False])
def test_what_is_compiled_is_fused_where_a_compiler_is_and_else_said(
    checkpoint: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    accelerated: bool,
    compiled: bool,
) -> None:
    monkeypatch.setattr(model_config, "is_accelerated", lambda: accelerated)
    monkeypatch.setattr(model_config, "can_compile", lambda: compiled)
    megatron = {"bias_activation_fusion": True}
    config = PolicyConfig.parse(policy_config(checkpoint("qwen2"), megatron))
    found = model_config._describe_kernels(
        bind_model(config).architecture, config.megatron_cfg, "local"
    )
    fused = accelerated and compiled
    assert found["bias_dropout_fusion"] is found["bias_activation_fusion"] is fused
    said = "bias, dropout and activation are not fused" in caplog.text
    assert said == (accelerated and not compiled)


@pytest.mark.parametrize("accelerated", [True, False])
@pytest.mark.parametrize(("pp", "vpp"), [(1, 1), (2, 1), (2, 2)])
def test_stages_exchange_without_waiting_and_free_what_they_have_sent(
    checkpoint: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    accelerated: bool,
    pp: int,
    vpp: int,
) -> None:
    monkeypatch.setattr(model_config, "is_accelerated", lambda: accelerated)
    megatron = layout(pp, pp=pp, vpp=vpp).megatron
    config = PolicyConfig.parse(policy_config(checkpoint("qwen2"), megatron))
    topology = topology_of(config, pp)
    found = model_config._describe_parallelism(config.megatron_cfg, topology, torch.bfloat16)
    assert found["batch_p2p_sync"] is False
    assert found["deallocate_pipeline_outputs"] == (accelerated and pp > 1)
    assert found["overlap_p2p_comm"] == (vpp > 1) != found["batch_p2p_comm"]


def test_layers_that_can_add_weight_gradients_to_buffers_do() -> None:
    fuses, plain = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    fuses.fuse_wgrad_accumulation = False  # as Transformer Engine's are before they are told
    fuse_weight_gradients([torch.nn.Sequential(plain, torch.nn.Sequential(fuses))])
    assert fuses.fuse_wgrad_accumulation is True
    assert not hasattr(plain, "fuse_wgrad_accumulation")


@pytest.mark.parametrize("accelerated", [True, False])
def test_releasing_caches_drops_exported_buffers_that_nobody_opened(
    monkeypatch: pytest.MonkeyPatch, accelerated: bool
) -> None:
    """After what is unreachable, which can hold such buffers, and before their memory goes."""
    calls: list[str] = []
    monkeypatch.setattr(device, "is_accelerated", lambda: accelerated)
    monkeypatch.setattr(gc, "collect", lambda: calls.append("cycles"))
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: calls.append("exported"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("unused"))
    device.release_cached()
    assert calls == (["cycles", "exported", "unused"] if accelerated else [])


def test_a_reference_takes_no_more_pinned_memory_than_its_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch pins powers of two: tensor by tensor these would take almost twice their bytes."""
    asked: list[int] = []

    def allocate(nbytes: int) -> torch.Tensor:
        asked.append(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8)

    real = pinned_pool.PinnedMemoryPool

    def pool(block_bytes: int) -> Any:
        return real(allocate, block_bytes=1 << 16)

    monkeypatch.setattr(pinned_pool, "PinnedMemoryPool", pool)
    parameters = [torch.randn((1 << 12) + 1) for _ in range(20)]
    kept = [each.clone() for each in parameters]
    frozen = Reference(parameters)
    for each in parameters:
        each.zero_()
    with frozen.active():
        assert all(map(torch.equal, parameters, kept))
    own = sum(each.nbytes for each in parameters)
    assert set(asked) == {1 << 16} and own <= sum(asked) < own + (1 << 16) + 20 * 512
    assert sum(1 << (each.nbytes - 1).bit_length() for each in parameters) > 1.9 * own
