"""The sections of a configuration as typed, frozen values."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from megatron_policy.config.fsdp import (
    DTensorConfig,
    Fsdp1Config,
    PytorchOptimizerConfig,
    SchedulerMilestones,
    SinglePytorchSchedulerConfig,
    as_text,
    checked_schedules,
)
from megatron_policy.config.numbers import (
    DEFAULT_BUCKET_BYTES,
    Bytes,
    Count,
    CountOrZero,
    Epsilon,
    Factor,
    Fraction,
    Gib,
    Limit,
    Momentum,
    Norm,
    Probability,
    Rate,
    RateOrNone,
    Seconds,
    Seed,
    Temperature,
)
from megatron_policy.config.section import Dtype, Section, WeightDtype
from megatron_policy.config.trained import ParamGroupConfig, PeftConfig
from megatron_policy.coordination.timeouts import (
    COLLECTIVE_TIMEOUT_S,
    DEFAULT_TIMEOUT_S,
    WORKER_TIMEOUT_S,
)

RopeLength = Literal["maximum", "row", "batch"]
RecomputedModule = Literal["core_attn", "layernorm", "mlp"]

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
    temperature: Temperature = 1.0
    top_p: Probability = 1.0
    top_k: Limit = None
    min_p: Fraction = 0.0
    """Keeps entries of at least this share of the largest probability; 0 keeps all."""
    filter_logprobs: bool = True
    """Whether log-probabilities are of what `top_p`, `top_k` and `min_p` keep, in training too."""
    stop_token_ids: tuple[CountOrZero, ...] = ()
    """Tokens that end a row, in addition to the tokenizer's end of sequence."""
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
    """The data of `train` and log-probabilities must then have `routed_experts`."""
    transport: str = "inline"
    """How they arrive: "inline" is in the data themselves."""


class WandbConfig(Section):
    """A run of Weights & Biases; what is not given is W&B's own default."""

    project: str | None = None
    name: str | None = None
    id: str | None = None
    """Continues the run of this id."""
    mode: Literal["online", "offline", "disabled"] | None = None
    directory: str | None = None


class MetricsConfig(Section):
    """Where a policy writes its metrics; relative paths are those of the process that writes."""

    jsonl: str | None = None
    """A file, to which lines are added."""
    tensorboard: str | None = None
    """A directory."""
    wandb: WandbConfig | None = None


class RewardModelConfig(Section):
    """A head that gives one number for each token, in place of the language model's."""

    enabled: bool = False
    reward_model_type: Literal["bradley_terry", "regression"] = "bradley_terry"
    """Scores of sequences, as AutoModelForSequenceClassification has them, or values of tokens, as
    AutoModelForTokenClassification has them.
    """


class MegatronOptimizerConfig(Section):
    """Adam with decoupled weight decay, or SGD, which adds weight decay to the clipped gradient.

    `lr` and `min_lr` are the ends of the schedule.
    """

    optimizer: Literal["adam", "sgd"] = "adam"
    lr: Rate = 1e-6
    min_lr: Rate = 0.0
    """The learning rate at the end of a schedule that decays."""
    weight_decay: Rate = 0.01
    """Of matrices; norms, biases and sinks have none."""
    decoupled_weight_decay: bool | None = None
    """Follows from `optimizer`."""
    bf16: bool | None = None
    fp16: bool | None = None
    """Follows from `precision`, as `bf16` does."""
    loss_scale: Factor | None = None
    """A fixed factor on losses in float16; by default it moves, from `initial_loss_scale` on."""
    initial_loss_scale: Factor = 65536.0
    """Megatron-Core's own 2 ** 32 overflows in the first steps, each of which costs a batch."""
    min_loss_scale: Factor = 1.0
    """A gradient that overflows even at this factor is an error."""
    loss_scale_window: Count = 1000
    """Steps in a row after which the factor doubles."""
    hysteresis: Count = 2
    """The factor halves at this overflow of those since it last grew, and at each further one."""
    params_dtype: str | None = None
    adam_beta1: Momentum = 0.9
    """Decay of the mean of gradients."""
    adam_beta2: Momentum = 0.999
    """Decay of the mean of their squares."""
    adam_eps: Epsilon = 1e-8
    """Added to the square root of that mean."""
    sgd_momentum: Momentum = 0.9
    """With `optimizer` "sgd"."""
    use_distributed_optimizer: bool = True
    """Main parameters and moments are spread over data-parallel ranks; Adam only, so false for SGD
    if not given.
    """
    use_precision_aware_optimizer: bool = False
    clip_grad: Norm = 1.0
    param_groups: tuple[ParamGroupConfig, ...] = ()
    """Parameters that are trained otherwise, or not; the first group that fits one counts."""
    optimizer_cpu_offload: bool = False
    optimizer_offload_fraction: Fraction = 0.0


class MegatronSchedulerConfig(Section):
    """Learning rate and weight decay over time.

    The schedule counts samples: an iteration is `train_global_batch_size` of them, and one `train`
    call counts as one iteration.
    """

    start_weight_decay: Rate = 0.01
    end_weight_decay: Rate = 0.01
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = "constant"
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root"] = "constant"
    lr_decay_iters: Count | None = None
    """0 until `PolicyConfig.parse` has filled it in."""
    lr_warmup_iters: CountOrZero = 0
    """Iterations in which the learning rate rises to `lr`."""
    lr_warmup_init: Rate = 0.0
    """Where it starts."""


class MegatronDDPConfig(Section):
    """How gradients, which are always summed, and parameters travel between data-parallel ranks."""

    grad_reduce_in_fp32: bool = False
    """Gradients are kept and summed in fp32: twice the memory of bfloat16."""
    overlap_grad_reduce: bool = False
    """They are summed while the backward pass goes on."""
    overlap_param_gather: bool = False
    average_in_collective: bool = False
    use_custom_fsdp: bool = False
    use_megatron_fsdp: bool = False
    data_parallel_sharding_strategy: str | None = None


class CheckpointConfig(Section):
    """How training checkpoints are written and read back."""

    async_save: bool = False
    """A save returns when all ranks have begun to copy; copying and writing go on in the
    background, and anything that changes the policy waits for the copies.
    """
    fresh_optimizer: bool = False
    """If a checkpoint has no optimizer state, loading continues with a new optimizer."""


class MegatronConfig(Section):
    """Layout, kernels, optimizer and schedule of the Megatron worker."""

    enabled: bool = False
    """Chooses Megatron-Core as the engine; `dtensor_cfg` and `fsdp_cfg` are the others."""
    tensor_model_parallel_size: Count = 1
    """Ranks that share out each layer (TP)."""
    pipeline_model_parallel_size: Count = 1
    """Stages that share out the layers (PP)."""
    virtual_pipeline_model_parallel_size: Count = 1
    """Model chunks per pipeline stage."""
    num_layers_in_first_pipeline_stage: Count | None = None
    """If it has another number of layers than the stages between."""
    num_layers_in_last_pipeline_stage: Count | None = None
    """The same for the last stage."""
    context_parallel_size: Count = 1
    """Ranks that share out the positions of each row (CP)."""
    expert_model_parallel_size: Count = 1
    expert_tensor_parallel_size: Count | None = None
    sequence_parallel: bool = False
    """Tensor-parallel ranks share out positions between layers, which saves memory."""
    pipeline_dtype: Dtype | None = None
    activation_checkpointing: bool = False
    """The backward pass computes activations again instead of keeping them."""
    recompute_granularity: Literal["full", "selective"] | None = None
    """None after parsing unless `activation_checkpointing` is on."""
    recompute_method: Literal["uniform", "block"] | None = None
    recompute_num_layers: Count | None = None
    recompute_modules: tuple[RecomputedModule, ...] | None = None
    transformer_impl: Literal["auto", "local", "transformer_engine"] = "auto"
    attention_backend: str | None = None
    apply_rope_fusion: bool = False
    bias_activation_fusion: bool = False
    defer_fp32_logits: bool = False
    empty_unused_memory_level: Literal[0, 1, 2] = 0
    converter_type: str | None = None
    freeze_moe_router: bool = False
    """The weights of routers are not trained."""
    moe_router_dtype: str | None = None
    moe_router_load_balancing_type: str | None = None
    moe_router_bias_update_rate: Rate | None = None
    moe_router_enable_expert_bias: bool | None = None
    moe_aux_loss_coeff: Rate | None = None
    """The model's own if not given; of use with a type of load balancing loss."""
    moe_z_loss_coeff: Rate | None = None
    moe_per_layer_logging: bool = False
    moe_token_dispatcher_type: Literal["alltoall", "allgather", "flex"] | None = None
    moe_flex_dispatcher_backend: Literal["deepep", "hybridep"] | None = None
    moe_expert_capacity_factor: RateOrNone = None
    """An expert takes at most this many times the mean of a rank's tokens in a microbatch; None or
    -1 sets no limit.
    """
    moe_pad_expert_input_to_capacity: bool = False
    moe_token_drop_policy: Literal["probs", "position"] = "probs"
    moe_permute_fusion: bool = False
    moe_shared_expert_overlap: bool = False
    mtp_num_layers: CountOrZero = 0
    """Further tokens that layers for multi-token prediction predict, one layer each; 0 leaves these
    layers out.
    """
    mtp_loss_scaling_factor: Rate = 0.1
    """Factor on the mean of these layers' losses in what is differentiated."""
    mtp_use_repeated_layer: bool = False
    """One layer predicts all of the `mtp_num_layers` tokens, one after another."""
    mtp_detach_heads: bool = False
    """These losses have no gradient in the rest of the model, its embedding and its head."""
    train_iters: Count | None = None
    env_vars: Annotated[dict[str, str], BeforeValidator(as_text)] = Field(default_factory=dict)
    peft: PeftConfig = PeftConfig()
    optimizer: MegatronOptimizerConfig = MegatronOptimizerConfig()
    scheduler: MegatronSchedulerConfig = MegatronSchedulerConfig()
    distributed_data_parallel_config: MegatronDDPConfig = MegatronDDPConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()


class PolicySection(Section):
    """The keys of a policy."""

    model_name: str
    """A Hugging Face checkpoint: a directory, or the name of a repository on the hub."""
    reference_model_name: str | None = None
    """The reference policy: a Hugging Face checkpoint of the same architecture or, with
    `megatron_cfg.peft`, a directory of such adapters. By default the weights that training starts
    from, with adapters the model without them.
    """
    tokenizer: TokenizerConfig = TokenizerConfig()
    precision: Dtype = "bfloat16"
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
    rope_length: RopeLength = "maximum"
    """Which length of text decides on rotary frequencies that depend on it (`rope_scaling` of the
    types `longrope` and `dynamic`): the longest possible one, as engines have it that choose once
    (`max_total_sequence_length`, which an engine calls `max_model_len`; for `dynamic` what its
    factor stretches to), that of each row, or the width of the batch.
    """
    make_sequence_length_divisible_by: Count = 1
    """The width of a padded batch is rounded up to a multiple of this."""
    max_grad_norm: Norm = 1.0
    """Used if `megatron_cfg.optimizer.clip_grad` is not given."""
    learning_rate: Rate | None = None
    """Used if `megatron_cfg.optimizer.lr` is not given."""
    skip_empty_steps: bool = True
    """A step for which no token counts, or with a loss of sequences no sequence, is not taken:
    weights, optimizer and schedule stay. False takes it, by weight decay and earlier gradients.
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
    hf_config_overrides: dict[str, Any] | None = None
    """Values in place of those in the model's config.json, also in what is exported."""
    refit_buffer_size_gb: Gib | None = None
    """GiB, on each rank, of the buffers in which weights travel to an engine on the same device; a
    fifth of the free memory if not given.
    """
    refit_bucket_bytes: Bytes = DEFAULT_BUCKET_BYTES
    """The most bytes that one collective of a refit moves."""
    refit_dtype: WeightDtype | None = None
    """Dtype of the weights handed to engines; the checkpoint's if not given."""
    refit_timeout_s: Seconds = DEFAULT_TIMEOUT_S
    """The longest time that a refit waits for another rank or an engine."""
    checkpoint_timeout_s: Seconds = DEFAULT_TIMEOUT_S
    """The longest time that a save or a load waits for another rank that gives no sign of life."""
    collective_timeout_s: Seconds = COLLECTIVE_TIMEOUT_S
    """The longest time that any other collective waits for another rank, however busy it is."""
    worker_timeout_s: Annotated[Seconds, Field(ge=1.0)] = WORKER_TIMEOUT_S
    """How long a Ray worker can be stopped or out of reach before the driver's call fails."""
    ignore_unknown_keys: tuple[str, ...] = ()
    """Paths below `policy` that are allowed to be unknown and then have no effect: keys of a newer
    host.
    """
    fsdp_offload_enabled: bool = False
    activation_checkpointing_enabled: bool = False
    optimizer: PytorchOptimizerConfig | None = None
    scheduler: Annotated[
        tuple[SinglePytorchSchedulerConfig | SchedulerMilestones, ...]
        | SinglePytorchSchedulerConfig
        | SchedulerMilestones
        | None,
        BeforeValidator(checked_schedules),
    ] = None
