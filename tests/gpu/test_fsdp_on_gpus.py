"""FSDP's own offload, which is refused on GPUs."""

from __future__ import annotations

import pytest

from megatron_policy.errors import ConfigError
from tests.dist.cases import fsdp_config, open_policy
from tests.dist.layouts import SIZES


def refused(config: dict[str, object]) -> str:
    with pytest.raises(ConfigError) as raised, open_policy(config):
        pass
    return str(raised.value)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("section", "key"), [("dtensor_cfg", "cpu_offload"), ("fsdp_cfg", "fsdp_offload_enabled")]
)
def test_offload_of_fsdp_is_refused_by_name(gpu_ranks, checkpoint, section: str, key: str) -> None:
    config = fsdp_config(checkpoint("llama", **SIZES), {key: True}, section=section)
    (message,) = gpu_ranks.run(1, refused, config)
    assert message.startswith(f"policy.{section}.{key} is not supported on GPUs: use")
