"""The sections of a configuration as typed, frozen values; `megatron_sections.py` has those of
`megatron_cfg`, `fsdp.py` those of the engines over transformers' own modules.

A field is a key that does what its docstring says, unless `keys.py` names it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from megatron_policy.config.fsdp import (
    DTensorConfig,
    Fsdp1Config,
    PytorchOptimizerConfig,
    SchedulerMilestones,
    SinglePytorchSchedulerConfig,
    check_schedules,
)
from megatron_policy.config.megatron_sections import MegatronConfig
from megatron_policy.config.numbers import (
    DEFAULT_BUCKET_BYTES,
    MISMATCH_BOUND,
    Bytes,
    Count,
    CountOrZero,
    Factor,
    Fraction,
    Gib,
    Limit,
    Norm,
    Probability,
    Rate,
    Seconds,
    Seed,
    Temperature,
)
from megatron_policy.config.section import Dtype, Section, WeightDtype
from megatron_policy.coordination.timeouts import (
    COLLECTIVE_TIMEOUT_S,
    DEFAULT_TIMEOUT_S,
    WORKER_TIMEOUT_S,
)

RopeLength = Literal["maximum", "row", "batch"]

ENGINES = ("megatron_cfg", "dtensor_cfg", "fsdp_cfg")
"""The sections that choose an engine; one of them is switched on."""


class TokenizerConfig(Section):
    """Where the tokenizer comes from; an empty name means the model's own."""

    name: str = ""
    chat_template: str | None = None


class GenerationConfig(Section):
    """What the policy's own `generate` does, and of which distribution log-probabilities are;
    settings of other engines are not read here.
    """

    backend: str | None = None
    max_new_tokens: Count
    """Of the policy's own `generate`."""
    temperature: Temperature = 1.0
    """Log-probabilities are at this temperature, too."""
    top_p: Probability = 1.0
    """Log-probabilities are of what it keeps, too."""
    top_k: Limit = None
    """Log-probabilities are of what it keeps, too."""
    min_p: Fraction = 0.0
    """Keeps entries of at least this share of the largest probability; 0 keeps all.
    Log-probabilities are of what it keeps, too.
    """
    filter_logprobs: bool = True
    """Whether log-probabilities are of what `top_p`, `top_k` and `min_p` keep, in training too;
    false: of whole distributions.
    """
    stop_token_ids: tuple[CountOrZero, ...] = ()
    """Of the policy's own `generate`: tokens that end a row, in addition to the tokenizer's end of
    sequence.
    """
    stop_strings: tuple[str, ...] | None = None


class DynamicBatchingConfig(Section):
    """Microbatches by number of tokens instead of rows, with rows of similar length."""

    enabled: bool = False
    """Chooses this way to make microbatches; `sequence_packing` is another. Neither: padded."""
    train_mb_tokens: Count | None = None
    """Tokens of a microbatch, including padding; `logprob_mb_tokens` if not given."""
    logprob_mb_tokens: Count | None = None
    """The same for passes without training; `train_mb_tokens` if not given."""
    sequence_length_round: Count | None = None
    """A microbatch is as wide as its longest row, rounded up to a multiple of this;
    `make_sequence_length_divisible_by` if not given.
    """


class SequencePackingConfig(Section):
    """Several sequences in one row, without padding between them."""

    enabled: bool = False
    """Chooses this way to make microbatches; `dynamic_batching` is another."""
    train_mb_tokens: Count | None = None
    """Tokens of a microbatch; `logprob_mb_tokens` if not given."""
    logprob_mb_tokens: Count | None = None
    """The same for passes without training; `train_mb_tokens` if not given."""
    algorithm: str | None = None
    """How sequences are assigned to rows: one of `packing.bins`, by default `balanced`."""


class RouterReplayConfig(Section):
    """Experts that were chosen before, in place of the routers' own choice."""

    enabled: bool = False
    """The data of `train` and log-probabilities must then have `routed_experts`, which replace the
    routers' own choice.
    """
    transport: str = "inline"
    """How they arrive: "inline" is in the data themselves."""


class WandbConfig(Section):
    """A run of Weights & Biases; what is not given is W&B's own default."""

    project: str | None = None
    """Of this project: rank 0's run of Weights & Biases."""
    name: str | None = None
    """Of this project: rank 0's run of Weights & Biases."""
    id: str | None = None
    """Of this project: rank 0 continues the run of this id."""
    mode: Literal["online", "offline", "disabled"] | None = None
    """Of this project: rank 0's run of Weights & Biases."""
    directory: str | None = None
    """Of this project: rank 0's run of Weights & Biases."""


class MetricsConfig(Section):
    """Where a policy writes its metrics; relative paths are those of the process that writes."""

    jsonl: str | None = None
    """Of this project: a file, to which rank 0 adds lines; see monitoring.md."""
    tensorboard: str | None = None
    """Of this project: a directory for rank 0's event files."""
    wandb: WandbConfig | None = None


class RolloutMismatchConfig(Section):
    """How training's log-probabilities are compared with those of the engine that sampled the rows,
    where the data of `train` have them.
    """

    enabled: bool = True
    """Of this project: false compares nothing; a loss that takes logits then saves a pass over the
    head.
    """
    bound: Factor = MISMATCH_BOUND
    """Of this project: the distance, in nats, beyond which tokens are counted."""
    by_position: bool = False
    """Of this project: also the mean distance in ranges of positions, each from a power of 2 to the
    next.
    """


class RewardModelConfig(Section):
    """A head that gives one number for each token, in place of the language model's."""

    enabled: bool = False
    """Chooses this head: see values.md."""
    reward_model_type: Literal["bradley_terry", "regression"] = "bradley_terry"
    """bradley_terry: scores of sequences, as AutoModelForSequenceClassification has them;
    regression: values of tokens, as AutoModelForTokenClassification has them.
    """


class PolicySection(Section):
    """The keys of a policy."""

    model_name: str
    """A Hugging Face checkpoint: a directory, or the name of a repository on the hub."""
    reference_model_name: str | None = None
    """Of this project: the reference policy, a Hugging Face checkpoint of the same architecture or,
    with `megatron_cfg.peft`, a directory of such adapters. By default the weights that training
    starts from, with adapters the model without them.
    """
    tokenizer: TokenizerConfig = TokenizerConfig()
    precision: Dtype = "bfloat16"
    """float32, bfloat16, or float16 with a factor on losses."""
    train_global_batch_size: Count
    """Rows of an optimizer step, over all ranks."""
    train_micro_batch_size: Count
    """Rows of one forward and backward pass on a rank."""
    logprob_batch_size: Count = 1
    """Rows of one forward pass; `train_micro_batch_size` if not given."""
    logprob_chunk_size: Count = 1024
    """Tokens whose logits over the vocabulary exist at the same time if only log-probabilities are
    needed; changes memory, not results.
    """
    generation_batch_size: Count = 1
    """Rows generated at once; `logprob_batch_size` if not given."""
    generation: GenerationConfig | None = None
    max_total_sequence_length: Count = 4096
    """The most tokens of a row, and of a prompt with its continuation: longer rows are refused, and
    `generate` stops here at the latest. The model's positions are a limit as well.
    """
    max_patches_per_microbatch: Count | None = None
    """Of this project: the most patches of pictures and videos that a microbatch has, those that
    rows share counted for each of them; bounds the memory of towers. Microbatches by tokens are
    made so, others are refused if they have more.
    """
    rope_length: RopeLength = "maximum"
    """Of this project: which length of text decides on rotary frequencies that depend on it
    (`rope_scaling` of the types `longrope` and `dynamic`): the longest possible one, as engines
    have it that choose once (`max_total_sequence_length`, which an engine calls `max_model_len`;
    for `dynamic` what its factor stretches to), that of each row, or the width of the batch.
    """
    make_sequence_length_divisible_by: Count = 1
    """The width of a padded batch is rounded up to a multiple of this."""
    max_grad_norm: Norm = 1.0
    """Used if `megatron_cfg.optimizer.clip_grad` is not given."""
    learning_rate: Rate | None = None
    """Used if the engine's optimizer is not given its own (`megatron_cfg.optimizer.lr`,
    `optimizer.kwargs.lr`).
    """
    skip_empty_steps: bool = True
    """Of this project: a step for which no token counts, or with a loss of sequences no sequence,
    is not taken: weights, optimizer and schedule stay. False takes it, by weight decay and earlier
    gradients.
    """
    seed: Seed = 1234
    """For sampling and dropout."""
    megatron_cfg: MegatronConfig = MegatronConfig()
    dtensor_cfg: DTensorConfig = DTensorConfig()
    fsdp_cfg: Fsdp1Config = Fsdp1Config()
    dynamic_batching: DynamicBatchingConfig = DynamicBatchingConfig()
    sequence_packing: SequencePackingConfig = SequencePackingConfig()
    router_replay: RouterReplayConfig = RouterReplayConfig()
    reward_model_cfg: RewardModelConfig = RewardModelConfig()
    metrics: MetricsConfig = MetricsConfig()
    rollout_mismatch: RolloutMismatchConfig = RolloutMismatchConfig()
    hf_config_overrides: dict[str, Any] | None = None
    """Values in place of those in the model's config.json, also in exports and checkpoints; those
    that change weights are refused. `router_aux_loss_coef` counts where
    `megatron_cfg.moe_aux_loss_coeff` is not given.
    """
    refit_buffer_size_gb: Gib | None = None
    """GiB, on each rank, of the buffers in which weights travel to an engine on the same device; a
    fifth of the free memory if not given.
    """
    refit_bucket_bytes: Bytes = DEFAULT_BUCKET_BYTES
    """Of this project: the most bytes that one collective of a refit moves."""
    refit_dtype: WeightDtype | None = None
    """Of this project: dtype of the weights handed to engines; the checkpoint's if not given."""
    refit_timeout_s: Seconds = DEFAULT_TIMEOUT_S
    """Of this project: the longest time that a refit waits for another rank or an engine."""
    checkpoint_timeout_s: Seconds = DEFAULT_TIMEOUT_S
    """Of this project: the longest time that a save or a load waits for another rank that gives no
    sign of life.
    """
    collective_timeout_s: Seconds = COLLECTIVE_TIMEOUT_S
    """Of this project: the longest time that any other collective waits for another rank, however
    busy it is.
    """
    worker_timeout_s: Annotated[Seconds, Field(ge=1.0)] = WORKER_TIMEOUT_S
    """Of this project, in its own driver: how long a Ray worker can be stopped or out of reach
    before the driver's call fails.
    """
    ignore_unknown_keys: tuple[str, ...] = ()
    """Of this project: paths below `policy` that are allowed to be unknown and then have no effect,
    which are keys of a newer host.
    """
    fsdp_offload_enabled: bool = False
    """With `fsdp_cfg`, where it is not given there."""
    activation_checkpointing_enabled: bool = False
    """With `fsdp_cfg`, where it is not given there."""
    optimizer: PytorchOptimizerConfig | None = None
    """With `dtensor_cfg` or `fsdp_cfg`: an import path and its kwargs; AdamW if not given."""
    scheduler: Annotated[
        tuple[SinglePytorchSchedulerConfig | SchedulerMilestones, ...]
        | SinglePytorchSchedulerConfig
        | SchedulerMilestones
        | None,
        BeforeValidator(check_schedules),
    ] = None
    """With `dtensor_cfg` or `fsdp_cfg`: schedules with milestones; constant if not given."""
