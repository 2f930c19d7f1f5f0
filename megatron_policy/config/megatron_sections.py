"""The sections of `megatron_cfg` as typed, frozen values."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from megatron_policy.config.fsdp import as_text
from megatron_policy.config.numbers import (
    Count,
    CountOrZero,
    Epsilon,
    Factor,
    Fraction,
    Momentum,
    Norm,
    Rate,
    RateOrNone,
)
from megatron_policy.config.section import Dtype, Section
from megatron_policy.config.trained import FreezeConfig, ParamGroupConfig, PeftConfig

RecomputedModule = Literal["core_attn", "layernorm", "mlp"]


class MegatronOptimizerConfig(Section):
    """Adam with decoupled weight decay, or SGD, which adds weight decay to the clipped gradient.

    `lr` and `min_lr` are the ends of the schedule.
    """

    optimizer: Literal["adam", "sgd"] = "adam"
    """'adam' or 'sgd'."""
    lr: Rate = 1e-6
    """`policy.learning_rate` if not given."""
    min_lr: Rate = 0.0
    """The learning rate at the end of a schedule that decays."""
    weight_decay: Rate = 0.01
    """Of matrices; norms, biases and sinks have none."""
    decoupled_weight_decay: bool | None = None
    """True of Adam, whose weight decay is always decoupled, false of SGD, which adds it to the
    gradient; no other is built. Follows from `optimizer` if not given.
    """
    bf16: bool | None = None
    """Follows from `precision`; main parameters are always fp32."""
    fp16: bool | None = None
    """Follows from `precision`, and has to agree with it."""
    loss_scale: Factor | None = None
    """A fixed factor on losses, with `precision` float16; by default it moves, from
    `initial_loss_scale` on.
    """
    initial_loss_scale: Factor = 65536.0
    """With `precision` float16. Megatron-Core's own 2 ** 32 overflows in the first steps, each of
    which costs a batch.
    """
    min_loss_scale: Factor = 1.0
    """With `precision` float16: a gradient that overflows even at this factor is an error."""
    loss_scale_window: Count = 1000
    """With `precision` float16: steps in a row after which the factor doubles."""
    hysteresis: Count = 2
    """With `precision` float16: the factor halves at this overflow of those since it last grew, and
    at each further one.
    """
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
    """`policy.max_grad_norm` if not given."""
    param_groups: tuple[ParamGroupConfig, ...] = ()
    """Parameters that are trained otherwise, or frozen; the first group that fits one counts."""
    optimizer_cpu_offload: bool = False
    optimizer_offload_fraction: Fraction = 0.0


class MegatronSchedulerConfig(Section):
    """Learning rate and weight decay over time.

    The schedule counts samples: an iteration is `train_global_batch_size` of them, and one `train`
    call counts as one iteration.
    """

    start_weight_decay: Rate = 0.01
    """`optimizer.weight_decay` if not given."""
    end_weight_decay: Rate = 0.01
    """`optimizer.weight_decay` if not given."""
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = "constant"
    """'constant', 'linear' or 'cosine', from its start to its end."""
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root"] = "constant"
    """'constant', 'linear', 'cosine' or 'inverse-square-root', from `lr` to `min_lr`."""
    lr_decay_iters: Count | None = None
    """`megatron_cfg.train_iters` if not given; 0 until `PolicyConfig.parse` has filled it in."""
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
    """Parameters are gathered while the forward pass goes on, where the distributed optimizer
    spreads them.
    """
    average_in_collective: bool = False
    use_custom_fsdp: bool = False
    use_megatron_fsdp: bool = False
    data_parallel_sharding_strategy: str | None = None


class CheckpointConfig(Section):
    """How training checkpoints are written and read back."""

    async_save: bool = False
    """A save returns when all ranks have begun to copy; copying and writing go on in the
    background, and anything that changes the policy waits for the copies. It takes a NeMo RL that
    waits for a save before it renames its directory (`finalize_async_save` in its workers); with
    others saves block, and a warning says so.
    """
    fresh_optimizer: bool = False
    """Of this project: if a checkpoint has no optimizer state, loading continues with a new
    optimizer.
    """


class MegatronConfig(Section):
    """Layout, kernels, optimizer and schedule of the Megatron worker."""

    enabled: bool = False
    """Chooses Megatron-Core as the engine; `dtensor_cfg` and `fsdp_cfg` are the others."""
    tensor_model_parallel_size: Count = 1
    """Ranks that share out each layer (TP)."""
    pipeline_model_parallel_size: Count = 1
    """Stages that share out the layers (PP): equally many, or, of a model whose layers are a mixer
    or a feed alone, such that stages have equally much to compute.
    """
    virtual_pipeline_model_parallel_size: Count = 1
    """Model chunks per pipeline stage."""
    num_layers_in_first_pipeline_stage: Count | None = None
    """If it has another number of layers than the stages between."""
    num_layers_in_last_pipeline_stage: Count | None = None
    """The same for the last stage."""
    pipeline_model_parallel_layout: str | None = None
    """What each model chunk has, in Megatron-Core's letters, with a stroke between chunks: E, one t
    for each decoder layer, one m for each of `mtp_num_layers`, L. Every chunk has a layer, and only
    the last one has m and L.
    """
    context_parallel_size: Count = 1
    """Ranks that share out the positions of each row (CP)."""
    expert_model_parallel_size: Count = 1
    """Ranks over which the experts of a layer are spread (EP)."""
    expert_tensor_parallel_size: Count | None = None
    """Ranks that share out each expert (ETP); `tensor_model_parallel_size` if not given."""
    sequence_parallel: bool = False
    """Tensor-parallel ranks share out positions between layers, which saves memory."""
    pipeline_dtype: Dtype | None = None
    activation_checkpointing: bool = False
    """The backward pass computes activations again instead of keeping them."""
    recompute_granularity: Literal["full", "selective"] | None = None
    """Used where `activation_checkpointing` is on; None after parsing unless it is."""
    recompute_method: Literal["uniform", "block"] | None = None
    """Used where `activation_checkpointing` is on."""
    recompute_num_layers: Count | None = None
    """Used where `activation_checkpointing` is on."""
    recompute_modules: tuple[RecomputedModule, ...] | None = None
    """Some of 'core_attn', 'layernorm' and 'mlp'; with `recompute_granularity` 'selective'."""
    transformer_impl: Literal["auto", "local", "transformer_engine"] = "auto"
    """'auto', 'local' or 'transformer_engine': whose modules layers are made of. 'auto' takes
    Transformer Engine's where it, and a GPU, is there and can express the model.
    """
    recurrence_impl: Literal["torch", "fla"] = "torch"
    """'torch' or 'fla': what computes layers that hand on a state (gated delta nets, Mamba2, short
    convolutions): torch's operators, or the kernels of flash-linear-attention.
    """
    attention_backend: str | None = None
    apply_rope_fusion: bool = False
    """Where the implementation has the fused kernel."""
    bias_activation_fusion: bool = False
    """Where the implementation has the fused kernel."""
    defer_fp32_logits: bool = False
    empty_unused_memory_level: Literal[0, 1, 2] = 0
    """1: unused device memory is given back before the optimizer's part of a step; 2: after it,
    too.
    """
    converter_type: str | None = None
    freeze_moe_router: bool = False
    """The weights of routers are not trained."""
    freeze_config: FreezeConfig = FreezeConfig()
    freeze_vision_model: bool = False
    """As in `freeze_config`."""
    freeze_vision_projection: bool = False
    """As in `freeze_config`."""
    freeze_sound_encoder: bool = False
    """The tower that hears is not trained."""
    freeze_sound_projection: bool = False
    """What makes its features as wide as the decoder is not trained, where that is apart."""
    moe_router_dtype: str | None = None
    """fp32 or fp64; null means what the model's family computes in."""
    moe_router_load_balancing_type: str | None = None
    """'none', 'aux_loss', 'seq_aux_loss' or 'global_aux_loss'; see docs/experts.md."""
    moe_router_bias_update_rate: Rate | None = None
    """Of routers with a correction bias; not given, or beside adapters, it is 0."""
    moe_router_enable_expert_bias: bool | None = None
    """Follows from the model's config.json; refused where it contradicts it and that counts."""
    moe_aux_loss_coeff: Rate | None = None
    """Of the load balancing loss; the model's own if not given."""
    moe_z_loss_coeff: Rate | None = None
    """Of the router's z-loss; 0 if not given."""
    moe_per_layer_logging: bool = False
    """`moe_metrics` has each layer too."""
    moe_token_dispatcher_type: Literal["alltoall", "allgather", "flex"] | None = None
    """'alltoall', 'allgather' or 'flex', with the same results; 'alltoall' where replicas share
    experts or stages exchange different lengths ('allgather'), or nothing is sent ('flex').
    """
    moe_flex_dispatcher_backend: Literal["deepep", "hybridep"] | None = None
    """Of 'flex': 'deepep' (by default) or 'hybridep', which pads where replicas share experts;
    before Megatron-Core 0.19 'alltoall' takes its place there.
    """
    moe_expert_capacity_factor: RateOrNone = None
    """An expert takes at most this many times the mean of a rank's tokens in a microbatch and drops
    the others, so that results depend on layout and batching; null or -1 sets no limit.
    """
    moe_pad_expert_input_to_capacity: bool = False
    """With `moe_expert_capacity_factor`."""
    moe_token_drop_policy: Literal["probs", "position"] = "probs"
    """'probs' or 'position', with `moe_expert_capacity_factor`."""
    moe_permute_fusion: bool = False
    """Where the implementation has the fused kernel."""
    moe_shared_expert_overlap: bool = False
    """On GPUs, with `moe_token_dispatcher_type` 'alltoall'."""
    mtp_num_layers: CountOrZero = 0
    """Further tokens that layers for multi-token prediction predict, one layer each: at most the
    model's num_nextn_predict_layers; 0 leaves these layers out.
    """
    mtp_loss_scaling_factor: Rate = 0.1
    """Factor on the mean of these layers' losses in what is differentiated."""
    mtp_use_repeated_layer: bool = False
    """The first of these layers predicts all of the `mtp_num_layers` tokens, one after another."""
    mtp_detach_heads: bool = False
    """These losses have no gradient in the rest of the model, its embedding and its head, and their
    gradients are clipped apart.
    """
    train_iters: Count | None = None
    """The length of the schedule where `scheduler.lr_decay_iters` is not given."""
    env_vars: Annotated[dict[str, str], BeforeValidator(as_text)] = Field(default_factory=dict)
    """Environment variables of the workers."""
    peft: PeftConfig = PeftConfig()
    optimizer: MegatronOptimizerConfig = MegatronOptimizerConfig()
    scheduler: MegatronSchedulerConfig = MegatronSchedulerConfig()
    distributed_data_parallel_config: MegatronDDPConfig = MegatronDDPConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    @property
    def recomputation(self) -> str:
        """What is recomputed: "none", "full", or modules joined by +."""
        if self.recompute_granularity == "selective":
            return "+".join(self.recompute_modules or ())
        return self.recompute_granularity or "none"


RECOMPUTE_KEYS = tuple(
    name for name in MegatronConfig.model_fields if name.startswith("recompute_")
)
"""The keys that say what is recomputed, if `activation_checkpointing` is on."""


def recompute_keys(what: str) -> dict[str, Any]:
    """The keys of `megatron_cfg` for what `MegatronConfig.recomputation` says."""
    if what == "none":
        return {"activation_checkpointing": False}
    full: dict[str, Any] = {"activation_checkpointing": True, "recompute_granularity": "full"}
    if what == "full":
        return full
    return full | {"recompute_granularity": "selective", "recompute_modules": what.split("+")}
