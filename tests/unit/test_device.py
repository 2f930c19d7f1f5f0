"""The CPU platform: what it patches works, and what it must not touch still does."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from megatron_policy.engines.megatron import cpu_platform
from megatron_policy.engines.megatron.platform import prepare_platform


def platform() -> dict[str, Any]:
    """What torch says on a rank, where the platform is prepared."""
    with torch.device("meta"):
        meta = torch.empty(2).device.type
    return {
        "cuda literal": torch.zeros(2, device="cuda").device.type,
        "pinned": torch.empty(2, pin_memory=True).is_pinned(),
        "device context": meta,
        "explicit cpu": torch.ones(2, device="cpu").device.type,
        "type": torch.zeros(1, dtype=torch.bfloat16).type(),
        "conversion": str(torch.zeros(1).type(torch.float64).dtype),
        "device": str(torch.cuda.current_device()),
    }


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="the CPU platform is for machines without GPU"
)
def test_cuda_names_mean_the_cpu_and_device_contexts_still_work(ranks) -> None:
    assert ranks.run(1, platform) == [
        {
            "cuda literal": "cpu",
            "pinned": False,
            "device context": "meta",
            "explicit cpu": "cpu",
            "type": "torch.cuda.BFloat16Tensor",
            "conversion": "torch.float64",
            "device": "cpu",
        }
    ]


def test_every_patch_tells_its_reason() -> None:
    assert all((patch.__doc__ or "").strip() for patch in cpu_platform.PATCHES)


@pytest.mark.nightly
def test_imports_patch_nothing_and_bring_reports_no_megatron_and_megatron_no_compiler() -> None:
    code = (
        "import sys, torch\n"
        "from types import SimpleNamespace\n"
        "before = torch.empty, torch.Tensor.type, torch.cuda.current_device\n"
        "compile_ = torch.compile\n"
        "import megatron_policy.checkpoint.report\n"
        "assert 'megatron' not in sys.modules, 'who reads a report needs it'\n"
        "import megatron_policy.policy.policy, megatron_policy.engines.megatron.cpu_platform\n"
        "assert (torch.empty, torch.Tensor.type, torch.cuda.current_device) == before\n"
        "off = SimpleNamespace(enabled=False)\n"
        "config = SimpleNamespace(fsdp_cfg=off, dtensor_cfg=off)\n"
        "megatron_policy.policy.policy._default_engine(config)\n"
        "assert 'megatron' in sys.modules\n"
        "assert torch.compile is compile_\n"
        "if not torch.cuda.is_available():\n"
        "    assert 'torch._inductor.compile_fx' not in sys.modules, 'a compiler was imported'\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=600)


def test_a_machine_with_a_gpu_keeps_its_functions_and_all_kernels_but_cudnns_attention(
    monkeypatch,
) -> None:
    enabled = torch.backends.cuda.cudnn_sdp_enabled()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = torch.empty, torch.Tensor.type, torch.cuda.current_device
    try:
        torch.backends.cuda.enable_cudnn_sdp(True)
        assert prepare_platform() is False
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        assert torch.backends.cuda.flash_sdp_enabled()
        assert torch.backends.cuda.mem_efficient_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(enabled)
    assert (torch.empty, torch.Tensor.type, torch.cuda.current_device) == before
