"""The one door for configuration: a mapping or YAML in, a complete, consistent PolicyConfig out.

Knows neither models nor ranks; whether a layout fits them is for layout.py to say.
"""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from megatron_policy.config import yaml_file
from megatron_policy.config.classify import classify
from megatron_policy.config.numbers import Bytes, Count, Gib, Norm, Rate, Seconds, Seed
from megatron_policy.config.resolve import check, complete
from megatron_policy.config.sections import (
    DTensorConfig,
    Dtype,
    DynamicBatchingConfig,
    GenerationConfig,
    MegatronConfig,
    PytorchOptimizerConfig,
    SchedulerMilestones,
    Section,
    SequencePackingConfig,
    SinglePytorchSchedulerConfig,
    TokenizerConfig,
)
from megatron_policy.coordination.timeouts import (
    COLLECTIVE_TIMEOUT_S,
    DEFAULT_TIMEOUT_S,
    WORKER_TIMEOUT_S,
)
from megatron_policy.errors import ConfigError
from megatron_policy.refit.plan import DEFAULT_BUCKET_BYTES

_log = logging.getLogger(__name__)


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 200


class PolicyConfig(Section):
    """A policy: model, batch sizes in samples, and one section per concern.

    Make it with `parse` or `from_yaml`. It pickles, and `PolicyConfig.parse(config.model_dump())`
    gives it back.
    """

    model_name: str
    tokenizer: TokenizerConfig = TokenizerConfig()
    precision: Dtype = "bfloat16"
    train_global_batch_size: Count
    train_micro_batch_size: Count
    logprob_batch_size: Count = 1
    """Rows of one forward pass; `train_micro_batch_size` when not given."""
    logprob_chunk_size: Count = 1024
    """Tokens whose logits, over the vocabulary, exist at one time where log-probabilities are all
    that is asked for; changes memory, not results."""
    generation_batch_size: Count = 1
    """Rows generated at once; `logprob_batch_size` when not given."""
    generation: GenerationConfig | None = None
    max_total_sequence_length: Count = 4096
    """The most tokens of a row, and of a prompt and its continuation together: longer rows are
    refused, and `generate` ends here at the latest. So do the model's positions."""
    make_sequence_length_divisible_by: Count = 1
    max_grad_norm: Norm = 1.0
    """Counts where `megatron_cfg.optimizer.clip_grad` is not given."""
    learning_rate: Rate | None = None
    """Counts where `megatron_cfg.optimizer.lr` is not given."""
    seed: Seed = 1234
    """Of sampling and dropout."""
    megatron_cfg: MegatronConfig = MegatronConfig()
    dtensor_cfg: DTensorConfig = DTensorConfig()
    dynamic_batching: DynamicBatchingConfig = DynamicBatchingConfig()
    sequence_packing: SequencePackingConfig = SequencePackingConfig()
    refit_buffer_size_gb: Gib | None = None
    """GiB, on each rank, of the buffers that weights travel in to an engine on the same device;
    a fifth of the free memory when not given."""
    refit_bucket_bytes: Bytes = DEFAULT_BUCKET_BYTES
    """The most that one collective of a refit moves."""
    refit_dtype: Dtype | None = None
    """Of the weights that engines are handed; the checkpoint's when not given."""
    refit_timeout_s: Seconds = DEFAULT_TIMEOUT_S
    """The longest wait of a refit for another rank or an engine."""
    checkpoint_timeout_s: Seconds = DEFAULT_TIMEOUT_S
    """The longest wait of a save or a load for another rank that gives no sign of life."""
    collective_timeout_s: Seconds = COLLECTIVE_TIMEOUT_S
    """The longest that any other collective waits for another rank, however busy that is."""
    worker_timeout_s: Annotated[Seconds, Field(ge=1.0)] = WORKER_TIMEOUT_S
    """How long a Ray worker may be stopped, or out of reach, before the driver's call fails."""
    ignore_unknown_keys: tuple[str, ...] = ()
    """Paths below `policy` that may be unknown, and then have no effect: keys of a newer host."""
    fsdp_offload_enabled: bool = False
    activation_checkpointing_enabled: bool = False
    optimizer: PytorchOptimizerConfig | None = None
    scheduler: (
        tuple[SinglePytorchSchedulerConfig | SchedulerMilestones, ...] | SchedulerMilestones | None
    ) = None

    @classmethod
    def parse(cls, raw: Mapping[str, Any] | PolicyConfig) -> PolicyConfig:
        """Check a host's `policy` section and fill in what follows from other keys.

        Raises ConfigError for unknown keys, wrong types, contradictions, and keys that ask for
        what is not built.
        """
        if isinstance(raw, PolicyConfig):
            config = raw
        elif isinstance(raw, Mapping):
            classified = classify(raw, cls)
            if classified.ignored:
                _log.info("keys without effect: %s", ", ".join(sorted(classified.ignored)))
            config = _validate(cls, classified.kept)
            unknown = classified.ignored.keys() & set(config.ignore_unknown_keys)
            if unknown:
                _log.warning("unknown keys, ignored as asked for: %s", ", ".join(sorted(unknown)))
        else:
            raise ConfigError(f"a policy's configuration is a mapping, not a {type(raw).__name__}")
        config = complete(config)
        check(config)
        return config

    @classmethod
    def from_yaml(cls, path: str | PathLike[str]) -> PolicyConfig:
        """Parse the `policy` section of a YAML file, as in configs/; other sections are not read.

        Raises ConfigError, also for what only the host resolves (`defaults`, `${...}`).
        """
        file = Path(path)
        document = yaml_file.load(file)
        if not isinstance(document, Mapping) or not isinstance(document.get("policy"), Mapping):
            raise ConfigError(f"{file} has no section `policy`; see configs/ for examples")
        unresolved = list(_interpolations(document["policy"], "policy"))
        if "defaults" in document or unresolved:
            what = f"{unresolved[0]} is an interpolation" if unresolved else "it has `defaults`"
            raise ConfigError(f"{file}: {what}, which only the host resolves; write the values out")
        return cls.parse(document["policy"])


def ignored_keys(raw: Mapping[str, Any]) -> dict[str, str]:
    """The keys of a `policy` mapping that have no effect here: path below `policy` -> reason."""
    return classify(raw, PolicyConfig).ignored


def _validate(cls: type[PolicyConfig], kept: dict[str, Any]) -> PolicyConfig:
    try:
        return cls.model_validate(kept)
    except ValidationError as error:
        lines = []
        for item in error.errors():
            path = ".".join(str(part) for part in item["loc"])
            got = "" if item["type"] == "missing" else f", not {_shown(item['input'])}"
            said = item["msg"].removeprefix("Value error, ")
            lines.append(f"policy.{path}: {said}{got}")
        raise ConfigError("\n".join(lines)) from None


def _shown(value: Any) -> str:
    """A value for a message, of bounded length."""
    try:
        return _SHORT.repr(value)
    except ValueError:  # an integer of more digits than Python writes
        return f"a {type(value).__name__} too long to write"


def _interpolations(value: Any, path: str) -> Iterator[str]:
    """Paths of strings with an unresolved `${...}`."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _interpolations(item, f"{path}.{key}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _interpolations(item, f"{path}[{index}]")
    elif isinstance(value, str) and "${" in value:
        yield path
