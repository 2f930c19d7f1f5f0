"""Sections that say which parameters are trained, and how: groups of them, and adapters."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, model_validator

from megatron_policy.config.numbers import Count, Factor, Momentum, Rate
from megatron_policy.config.section import Dtype, Section, ValueSection


def _refuse_text(value: Any) -> Any:
    if isinstance(value, str):
        raise ValueError(f"Input should be a list of names, as in [{value:.100}]")
    return value


def _refuse_blank(value: Any) -> Any:
    if isinstance(value, str) and not value.strip():
        raise ValueError("Input should be a directory: give one, or leave the key out")
    return value


Names = Annotated[tuple[str, ...], BeforeValidator(_refuse_text)]

ParamRole = Literal[
    "embedding",
    "vision",
    "head",
    "linear",
    "expert",
    "router",
    "norm",
    "bias",
    "sink",
    "activation",
    "convolution",
    "recurrence",
    "adapter",
]


class ParamGroupConfig(ValueSection):
    """Parameters with one of `names` and one of `roles`, and how they are trained."""

    names: Names | None = None
    """Names of Hugging Face tensors, in which `*`, `?` and `[...]` stand for others; all if not
    given.
    """
    roles: Annotated[tuple[ParamRole, ...], BeforeValidator(_refuse_text)] | None = None
    """What they are to the model; all if not given."""
    freeze: bool = False
    """They keep their values and have no gradients, main parameters and moments."""
    lr: Rate | None = None
    """The optimizer's if not given."""
    min_lr: Rate | None = None
    """As small a share of `lr` as the optimizer's if not given."""
    weight_decay: Rate | None = None
    """All the time; as the scheduler says if not given, and of norms, biases and sinks none."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        rates = (self.lr, self.min_lr, self.weight_decay)
        if self.names is None and self.roles is None:
            raise ValueError("names or roles are missing: say which parameters are in the group")
        if self.freeze and rates != (None, None, None):
            raise ValueError("freeze is true, so nothing is learnt: leave out the rates, or freeze")
        if not self.freeze and rates == (None, None, None):
            raise ValueError("the group changes nothing: give freeze, lr, min_lr or weight_decay")
        return self


class FreezeConfig(Section):
    """Parts of a model that sees pictures and keep their values, as groups before those of
    `param_groups` do. A key whose part the model lacks is refused.
    """

    freeze_vision_model: bool = False
    """The tower that sees, without its projectors."""
    freeze_vision_projection: bool = False
    """The projectors: what merges patches into features of the decoder's width."""
    freeze_language_model: bool = False
    """All but towers and projectors; a scalar head is trained."""


class AutomodelFreezeConfig(Section):
    """The same as NeMo Automodel means it, by words in the names of modules: beside the section
    the tower that sees is frozen if nothing else is said.
    """

    freeze_vision_tower: bool = True
    """The tower that sees, with projectors inside its module, as Qwen's have them."""
    freeze_audio_tower: bool = False
    """The tower that hears."""
    freeze_language_model: bool = False
    """All but towers, projectors and a head that is not the embedding's."""


def _refuse_all_linear(value: Any) -> Any:
    if value == "all-linear":
        raise ValueError("Input should be a list of names; leave it out for all linear layers")
    return value


InitMethod = Literal["xavier", "kaiming", "normal", "zero"]


class PeftConfig(Section):
    """Low-rank adapters (LoRA, Hu et al. 2021) on linear layers; nothing else is trained.

    A weight W becomes `W + alpha / dim * B A`. Modules are named as Megatron-Core or Hugging Face
    names them, by their last word or by their path, with `*`. Megatron-Core's `linear_qkv` and
    `linear_fc1` get one adapter for all their parts, `q_proj` or `linear_q` one of its own.
    """

    enabled: bool = False
    """Trains adapters instead of the model."""
    target_modules: Annotated[Names, BeforeValidator(_refuse_all_linear)] = ()
    """All linear layers of the decoder's layers if empty."""
    exclude_modules: Names = ()
    """Also together with `target_modules`."""
    dim: Count | None = None
    """Rows of A, the rank."""
    alpha: Factor | None = None
    """`alpha / dim` is the factor on what an adapter adds."""
    dropout: Momentum = 0.0
    """Share of values that are zeroed in training."""
    dropout_position: Literal["pre", "post"] = "pre"
    """Of the adapter's inputs, or of its outputs."""
    lora_A_init_method: InitMethod = "xavier"
    """Drawn for the whole tensor: the same in every layout."""
    lora_B_init_method: InitMethod = "zero"
    """Drawn for the whole tensor: the same in every layout."""
    lora_dtype: Annotated[
        Dtype | None, BeforeValidator(lambda value: None if value in ("None", "") else value)
    ] = None
    """Has to agree with `precision`; the optimizer keeps fp32 main parameters."""
    a2a_experimental: bool = False
    start_from: Annotated[str | None, BeforeValidator(_refuse_blank)] = None
    """Of this project: a directory that PEFT or `export_peft` wrote, whose adapters are gone on
    with.
    """
