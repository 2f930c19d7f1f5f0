"""The configuration: its sections as typed values, what becomes of every key, and how a mapping or
a YAML file is read. Read `policy_config.py` first; `keys.py` says what each key does.
"""

from megatron_policy.config.fsdp import (
    DTensorConfig,
    Fsdp1Config,
    PytorchOptimizerConfig,
    SchedulerMilestones,
    SinglePytorchSchedulerConfig,
)
from megatron_policy.config.policy_config import PolicyConfig, ignored_keys
from megatron_policy.config.sections import (
    CheckpointConfig,
    DynamicBatchingConfig,
    GenerationConfig,
    MegatronConfig,
    MegatronDDPConfig,
    MegatronOptimizerConfig,
    MegatronSchedulerConfig,
    MetricsConfig,
    RouterReplayConfig,
    SequencePackingConfig,
    TokenizerConfig,
)

__all__ = [
    "CheckpointConfig",
    "DTensorConfig",
    "DynamicBatchingConfig",
    "Fsdp1Config",
    "GenerationConfig",
    "MegatronConfig",
    "MegatronDDPConfig",
    "MegatronOptimizerConfig",
    "MegatronSchedulerConfig",
    "MetricsConfig",
    "PolicyConfig",
    "PytorchOptimizerConfig",
    "RouterReplayConfig",
    "SchedulerMilestones",
    "SequencePackingConfig",
    "SinglePytorchSchedulerConfig",
    "TokenizerConfig",
    "ignored_keys",
]
