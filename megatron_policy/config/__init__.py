"""The configuration: its sections as typed values, what becomes of every key, and how a mapping or
a YAML file is read. Read `policy_config.py` first; a field's docstring says what its key does.
"""

from megatron_policy.config.fsdp import (
    DTensorConfig,
    Fsdp1Config,
    PytorchOptimizerConfig,
    SchedulerMilestones,
    SinglePytorchSchedulerConfig,
)
from megatron_policy.config.megatron_sections import (
    CheckpointConfig,
    MegatronConfig,
    MegatronDDPConfig,
    MegatronOptimizerConfig,
    MegatronSchedulerConfig,
)
from megatron_policy.config.policy_config import PolicyConfig, ignored_keys
from megatron_policy.config.sections import (
    DynamicBatchingConfig,
    GenerationConfig,
    MetricsConfig,
    RolloutMismatchConfig,
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
    "RolloutMismatchConfig",
    "RouterReplayConfig",
    "SchedulerMilestones",
    "SequencePackingConfig",
    "SinglePytorchSchedulerConfig",
    "TokenizerConfig",
    "ignored_keys",
]
