"""The engine's configuration for verl, by which users choose it: importing this module registers
the engines with verl, so that an error in it reaches the user.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from verl.workers.config.engine import EngineConfig, McoreEngineConfig
from verl.workers.engine.base import EngineRegistry

from megatron_policy.device import DEVICE_TYPES
from megatron_policy.hosts.verl.engine import MegatronPolicyEngine, MegatronPolicyValueEngine

NAME = "megatron_policy"
ENGINES = {"language_model": MegatronPolicyEngine, "value_model": MegatronPolicyValueEngine}


@dataclass
class MegatronPolicyEngineConfig(McoreEngineConfig):  # type: ignore[misc]
    """verl's keys of a Megatron engine, of which docs/verl-keys.md says what becomes, with dtype
    float32 as well, `grad_offload`, which verl's own section lacks in 0.9.1, and `policy`: keys of
    a policy's own configuration, which come last.
    """

    strategy: str = NAME
    grad_offload: bool = False
    policy: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        EngineConfig.__post_init__(self)
        if self.tensor_model_parallel_size == 1:
            self.sequence_parallel = False


for _kind, _engine in ENGINES.items():
    EngineRegistry.register(model_type=_kind, backend=NAME, device=[*DEVICE_TYPES])(_engine)
