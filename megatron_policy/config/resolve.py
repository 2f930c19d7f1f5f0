"""Fills in keys that follow from others, and refuses contradictions."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, TypeVar

from megatron_policy.config.megatron_sections import (
    RECOMPUTE_KEYS,
    MegatronConfig,
    MegatronOptimizerConfig,
)
from megatron_policy.config.parallel_sizes import (
    check_env_vars,
    env_vars_of,
    parallel_sizes,
    transformers_settings,
)
from megatron_policy.config.section import Section
from megatron_policy.config.sections import (
    ENGINES,
    DynamicBatchingConfig,
    PolicySection,
    SequencePackingConfig,
)
from megatron_policy.errors import ConfigError
from megatron_policy.packing.bins import checked_algorithm

S = TypeVar("S", bound=Section)
P = TypeVar("P", bound=PolicySection)
B = TypeVar("B", DynamicBatchingConfig, SequencePackingConfig)


def complete(config: P) -> P:
    """Fill in missing keys from others; idempotent."""
    megatron = config.megatron_cfg
    optimizer = _where_absent(megatron.optimizer, clip_grad=config.max_grad_norm)
    if config.learning_rate is not None:
        optimizer = _where_absent(optimizer, lr=config.learning_rate)
    if optimizer.optimizer == "sgd":
        optimizer = _where_absent(optimizer, use_distributed_optimizer=False)
    scheduler = _where_absent(
        megatron.scheduler,
        start_weight_decay=optimizer.weight_decay,
        end_weight_decay=optimizer.weight_decay,
    )
    scheduler = _set(scheduler, lr_decay_iters=_find_decay_iters(megatron))
    ddp = megatron.distributed_data_parallel_config
    # Without the distributed optimizer every rank has all parameters, so nothing is gathered.
    gather = ddp.overlap_param_gather and optimizer.use_distributed_optimizer
    megatron = _set(
        megatron,
        optimizer=optimizer,
        scheduler=scheduler,
        distributed_data_parallel_config=_set(ddp, overlap_param_gather=gather),
        **_complete_recompute(megatron),
    )
    overrides = config.hf_config_overrides
    coefficient = (overrides or {}).get("router_aux_loss_coef")
    if coefficient is not None:
        if not isinstance(coefficient, int | float) or not 0 <= coefficient < math.inf:
            raise ConfigError(
                f"policy.hf_config_overrides.router_aux_loss_coef is {coefficient!r:.40}: give a "
                "number from 0 on"
            )
        megatron = _where_absent(megatron, moe_aux_loss_coeff=coefficient)
    fsdp = _where_absent(
        config.fsdp_cfg,
        fsdp_offload_enabled=config.fsdp_offload_enabled,
        activation_checkpointing_enabled=config.activation_checkpointing_enabled,
    )
    tokenizer = _set(config.tokenizer, name=config.tokenizer.name or config.model_name)
    dynamic = _share_tokens(config.dynamic_batching)
    rounded = dynamic.sequence_length_round or config.make_sequence_length_divisible_by
    kwargs = transformers_settings(config).model_kwargs if _trains_transformers(config) else {}
    config = _set(
        config,
        hf_config_overrides=kwargs | (overrides or {}) if kwargs else overrides,
        tokenizer=tokenizer,
        megatron_cfg=megatron,
        fsdp_cfg=fsdp,
        dynamic_batching=_set(dynamic, sequence_length_round=rounded),
        sequence_packing=_share_tokens(config.sequence_packing),
    )
    config = _where_absent(config, logprob_batch_size=config.train_micro_batch_size)
    return _where_absent(config, generation_batch_size=config.logprob_batch_size)


def check(config: PolicySection) -> None:
    """Raise ConfigError listing every pair of contradictory keys, with the legal values."""
    problems = [*_check_engine(config), *_check_batching(config)]
    if config.router_replay.enabled and config.router_replay.transport != "inline":
        problems.append(
            f"policy.router_replay.transport={config.router_replay.transport!r} leaves the chosen "
            "experts out of the data, which is not supported: use 'inline'"
        )
    try:
        check_env_vars(f"{parallel_sizes(config).section}.env_vars", env_vars_of(config))
    except ConfigError as error:
        problems.append(str(error))
    if not _trains_transformers(config):
        problems += [*_check_dtypes(config), *_check_schedule(config.megatron_cfg)]
        problems += [*_check_recompute_keys(config.megatron_cfg), *_check_adapters(config)]
        problems += _check_optimizer(config.megatron_cfg.optimizer)
    if problems:
        raise ConfigError("\n".join(problems))


def _set(section: S, **values: Any) -> S:
    return section.model_copy(update=values)


def _where_absent(section: S, **values: Any) -> S:
    given = section.model_fields_set
    return _set(section, **{name: value for name, value in values.items() if name not in given})


def _share_tokens(section: B) -> B:
    """Training and inference share a number of tokens if only one of them is given."""
    train, read = section.train_mb_tokens, section.logprob_mb_tokens
    return _set(section, train_mb_tokens=train or read, logprob_mb_tokens=read or train)


def _find_decay_iters(megatron: MegatronConfig) -> int | None:
    """As given, else all of training, if known; a constant schedule outlasts its warm-up."""
    schedule, iters = megatron.scheduler, megatron.train_iters
    constant = schedule.lr_decay_style == schedule.weight_decay_incr_style == "constant"
    if constant and not schedule.lr_decay_iters:
        return max(iters or 0, schedule.lr_warmup_iters + 1)
    return schedule.lr_decay_iters or iters


def _complete_recompute(megatron: MegatronConfig) -> dict[str, Any]:
    """The recompute keys only have a meaning with `activation_checkpointing`."""
    if not megatron.activation_checkpointing:
        return dict.fromkeys(RECOMPUTE_KEYS)
    if megatron.recompute_granularity == "selective":
        return {"recompute_modules": megatron.recompute_modules or ("core_attn",)}
    return {
        "recompute_granularity": "full",
        "recompute_method": megatron.recompute_method or "uniform",
        "recompute_num_layers": megatron.recompute_num_layers or 1,
    }


def _check_engine(config: PolicySection) -> Iterator[str]:
    chosen = _enabled_engines(config)
    if len(chosen) != 1:
        *others, last = (f"policy.{name}.enabled" for name in chosen or ENGINES)
        how = ("both true" if len(chosen) == 2 else "all true") if chosen else "all false"
        yield (
            f"{', '.join(others)} and {last} are {how}: exactly one chooses the engine, "
            "Megatron-Core (megatron_cfg) or transformers' own modules under FSDP2 (dtensor_cfg) "
            "or FSDP1 (fsdp_cfg); set one to true and the others to false"
        )
    elif chosen == ["dtensor_cfg"]:
        yield from _check_fsdp2(config)
        yield from _check_transformers(config)
    elif chosen == ["fsdp_cfg"]:
        yield from _check_transformers(config)
    elif config.optimizer is not None and config.optimizer.param_groups:
        yield (
            "policy.optimizer.param_groups belongs to torch's optimizers: call it "
            "policy.megatron_cfg.optimizer.param_groups"
        )


def _enabled_engines(config: PolicySection) -> list[str]:
    """The sections that choose an engine."""
    return [name for name in ENGINES if getattr(config, name).enabled]


def _trains_transformers(config: PolicySection) -> bool:
    """Whether transformers' own modules are trained."""
    return _enabled_engines(config) in (["dtensor_cfg"], ["fsdp_cfg"])


def _check_fsdp2(config: PolicySection) -> Iterator[str]:
    """Report what sharding by `dtensor_cfg` does not have."""
    own, at = config.dtensor_cfg, "policy.dtensor_cfg"
    if own.expert_parallel_size > 1:
        yield (
            f"{at}.expert_parallel_size={own.expert_parallel_size} is not supported: set it to 1 "
            "(FSDP2 shards over the ranks that are left), or use megatron_cfg"
        )
    if own.custom_parallel_plan and own.tensor_parallel_size == 1:
        yield (
            f"{at}.custom_parallel_plan={own.custom_parallel_plan!r} is for tensor-parallel ranks: "
            f"leave it out, or set {at}.tensor_parallel_size to 2 or more"
        )
    if parallel_sizes(config).sequence_parallel and own.attn_implementation != "auto":
        yield (
            f"{at}.attn_implementation={own.attn_implementation!r} makes masks of whole sequences: "
            f"use 'auto', or leave {at}.sequence_parallel out"
        )


def _check_transformers(config: PolicySection) -> Iterator[str]:
    """Report what the engine over transformers' own modules does not have."""
    own, sizes = transformers_settings(config), parallel_sizes(config)
    if config.precision == "float16":
        way = "FSDP1" if config.fsdp_cfg.enabled else "FSDP2"
        yield f"policy.precision=float16 needs a factor on losses, which {way} lacks: use bfloat16"
    elsewhere = {"attn_implementation": f"{sizes.section}.attn_implementation"}
    elsewhere |= dict.fromkeys(("dtype", "torch_dtype"), "policy.precision")
    for name, key in elsewhere.items():
        if name in own.model_kwargs:
            yield f"{sizes.section}.model_kwargs.{name} is not a field of a model: set {key}"
    if config.megatron_cfg.peft.enabled:
        yield "policy.megatron_cfg.peft adapts Megatron-Core's modules: use megatron_cfg.enabled"
    if config.megatron_cfg.optimizer.param_groups:
        yield (
            "policy.megatron_cfg.optimizer.param_groups belongs to Megatron-Core's optimizer: call "
            "it policy.optimizer.param_groups, or use megatron_cfg.enabled"
        )
    groups = () if config.optimizer is None else config.optimizer.param_groups
    if any(group.min_lr is not None for group in groups):
        yield (
            "policy.optimizer.param_groups has min_lr, which belongs to Megatron-Core's schedules, "
            "and torch's multiply all rates alike: leave it out, or use megatron_cfg.enabled"
        )
    if config.reward_model_cfg.enabled:
        yield "policy.reward_model_cfg needs Megatron-Core's head: use megatron_cfg.enabled"
    if config.rope_length == "row":
        yield (
            "policy.rope_length='row' needs Megatron-Core's modules, since transformers' turn all "
            "rows of a microbatch alike: use 'maximum' or 'batch', or megatron_cfg.enabled"
        )
    if config.router_replay.enabled:
        yield "policy.router_replay needs Megatron-Core's routers: use megatron_cfg.enabled"
    packs = config.sequence_packing.enabled or sizes.cp > 1
    if packs and own.attn_implementation != "auto":
        yield (
            f"{sizes.section}.attn_implementation={own.attn_implementation!r} computes padded rows "
            "only: use 'auto', or neither sequence_packing nor context_parallel_size"
        )


def _check_dtypes(config: PolicySection) -> Iterator[str]:
    optimizer, precision = config.megatron_cfg.optimizer, config.precision
    at, half = "policy.megatron_cfg.optimizer", config.precision == "float16"
    if half and optimizer.bf16:
        yield f"{at}.bf16=true contradicts policy.precision=float16: leave it out"
    if optimizer.fp16 not in (None, half):
        given, fix = ("false", "true") if half else ("true", "false")
        yield (
            f"{at}.fp16={given} contradicts policy.precision={precision}: leave it out, set it to "
            f"{fix}, or change policy.precision"
        )
    least, first = optimizer.min_loss_scale, optimizer.initial_loss_scale
    if half and optimizer.loss_scale is None and least > first:
        yield f"{at}.min_loss_scale={least} is above initial_loss_scale={first}: lower it"
    # The distributed optimizer keeps fp32 main parameters whatever bf16 says.
    without = optimizer.bf16 is False and not optimizer.use_distributed_optimizer
    if precision == "bfloat16" and without:
        yield (
            "policy.megatron_cfg.optimizer.bf16=false asks for bfloat16 updates without fp32 main "
            "parameters, which are always kept: leave bf16 out, or set policy.precision to float32"
        )


def _check_batching(config: PolicySection) -> Iterator[str]:
    dynamic, packing = config.dynamic_batching, config.sequence_packing
    if dynamic.enabled and packing.enabled:
        yield (
            "policy.dynamic_batching.enabled and policy.sequence_packing.enabled are both true, "
            "but they are two ways to make microbatches: set one to false"
        )
    for name, section in (("dynamic_batching", dynamic), ("sequence_packing", packing)):
        if section.enabled and section.train_mb_tokens is None:
            yield (
                f"policy.{name} is enabled without a size: give it train_mb_tokens or "
                "logprob_mb_tokens, the tokens of a microbatch (each is used for both if the "
                "other is missing)"
            )
        for key in ("train_mb_tokens", "logprob_mb_tokens"):
            if section.enabled and getattr(section, key) == 1:
                yield (
                    f"policy.{name}.{key}=1 leaves no room for a row, of which a log-probability "
                    "takes two tokens: give the tokens of a microbatch"
                )
    if packing.enabled:
        try:
            checked_algorithm(packing.algorithm)
        except ConfigError as error:
            yield str(error)


def _check_adapters(config: PolicySection) -> Iterator[str]:
    peft, at = config.megatron_cfg.peft, "policy.megatron_cfg.peft"
    if not peft.enabled:
        return
    for name in ("dim", "alpha"):
        if getattr(peft, name) is None:
            yield f"{at} is enabled without {name}: give it a number"
    if peft.lora_dtype not in (None, config.precision):
        yield (
            f"{at}.lora_dtype={peft.lora_dtype} contradicts policy.precision={config.precision}, "
            "in which adapters are computed (their main parameters are fp32): leave it out"
        )
    if peft.lora_A_init_method == peft.lora_B_init_method == "zero":
        yield (
            f"{at}: with A and B of zeros neither has a gradient: give lora_A_init_method "
            "'xavier', 'kaiming' or 'normal'"
        )
    if config.megatron_cfg.mtp_num_layers:
        yield (
            f"{at} adapts no layers for multi-token prediction: set "
            "policy.megatron_cfg.mtp_num_layers to 0"
        )


def _check_optimizer(optimizer: MegatronOptimizerConfig) -> Iterator[str]:
    decoupled = optimizer.optimizer == "adam"
    if optimizer.use_distributed_optimizer and not decoupled:
        yield (
            "policy.megatron_cfg.optimizer.use_distributed_optimizer=true needs optimizer 'adam': "
            "Megatron-Core spreads no other over ranks; leave it out or set it to false"
        )
    if optimizer.decoupled_weight_decay in (None, decoupled):
        return
    how = "always decouples weight decay" if decoupled else "adds weight decay to the gradient"
    legal, other = str(decoupled).lower(), str(not decoupled).lower()
    yield (
        f"policy.megatron_cfg.optimizer.decoupled_weight_decay={other} does not fit optimizer "
        f"{optimizer.optimizer!r}, which {how}: leave it out or set it to {legal}"
    )


def _check_schedule(megatron: MegatronConfig) -> Iterator[str]:
    optimizer, schedule = megatron.optimizer, megatron.scheduler
    at = "policy.megatron_cfg.scheduler"
    if optimizer.min_lr > optimizer.lr:
        yield (
            f"policy.megatron_cfg.optimizer.min_lr={optimizer.min_lr} is above lr={optimizer.lr}: "
            "min_lr must be at most lr"
        )
    if schedule.lr_warmup_init > optimizer.lr:
        yield (
            f"{at}.lr_warmup_init={schedule.lr_warmup_init} is above optimizer.lr={optimizer.lr}: "
            "warm-up must start at or below lr"
        )
    start, end = schedule.start_weight_decay, schedule.end_weight_decay
    if start > end:
        yield (
            f"{at}.start_weight_decay={start} is above end_weight_decay={end}: it must be at most "
            "that"
        )
    elif start != end and schedule.weight_decay_incr_style == "constant":
        yield (
            f"{at}.start_weight_decay={start} differs from end_weight_decay={end}: make them "
            "equal, or weight_decay_incr_style 'linear' or 'cosine'"
        )
    if not schedule.lr_decay_iters:
        yield (
            f"{at}.lr_decay_iters is missing: give it or megatron_cfg.train_iters, or make both "
            "styles 'constant'"
        )
    elif schedule.lr_decay_iters <= schedule.lr_warmup_iters:
        yield (
            f"{at}.lr_decay_iters={schedule.lr_decay_iters} ends within the warm-up: it must be "
            f"more than lr_warmup_iters={schedule.lr_warmup_iters}"
        )


def _check_recompute_keys(megatron: MegatronConfig) -> Iterator[str]:
    at = "policy.megatron_cfg.recompute"
    if megatron.recompute_granularity == "selective":
        for name in ("method", "num_layers"):
            if getattr(megatron, f"recompute_{name}") is not None:
                yield f"{at}_{name} needs {at}_granularity 'full': leave it out or choose that"
    elif megatron.recompute_modules is not None:
        yield f"{at}_modules needs {at}_granularity 'selective': leave it out or choose that"
