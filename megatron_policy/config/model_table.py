"""Binds the tables of the models that a configuration names, with the fields that it overrides: the
policy's own, and that of its reference.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from megatron_policy.config.layout import mtp_layers
from megatron_policy.config.parallel_sizes import Engine, engine_of
from megatron_policy.config.policy_config import PolicyConfig
from megatron_policy.converters.architecture import (
    Architecture,
    Attention,
    Mlp,
    Rope,
    ScalarHead,
    stack,
)
from megatron_policy.converters.architecture.beyond import beyond_transformer_engine
from megatron_policy.converters.architecture.plain_values import flatten, plain
from megatron_policy.converters.formats.hf_config import (
    has_family,
    read_config,
    transformers_config,
    written_config,
)
from megatron_policy.converters.formats.hf_files import is_peft
from megatron_policy.converters.formats.hf_overrides import in_kind
from megatron_policy.converters.formats.opening import OpenModel, open_model
from megatron_policy.converters.scalar_head import FIELDS as OF_HEAD
from megatron_policy.converters.table import Table
from megatron_policy.errors import ConfigError, ConversionError

_KEY = "policy.hf_config_overrides"
_REFERENCE = "policy.reference_model_name"
_SHOWN = 3

# What transformers' classes call the sizes of a model.
_NAMES = {
    "num_layers": ("num_hidden_layers", "n_layer", "n_layers"),
    "hidden_size": ("hidden_size", "d_model", "n_embd"),
    "vocab_size": ("vocab_size",),
}
_HEADS = ("num_attention_heads", "n_head", "num_heads")
_GROUPS = ("num_key_value_heads", "num_kv_heads")
_INNER = ("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner", "d_inner")
_POSITIONS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")
_UNLIMITED = 2**20
"""Positions of a model that does not say how many it has."""


def bind_model(config: PolicyConfig) -> Table:
    """The table of `config.model_name`, bound to its config.json with `hf_config_overrides`.

    ConfigError, beside the errors of `open_model`, for an override that the model's config
    does not have or cannot have, or that changes which weights there are or their shapes; and for a
    checkpoint with a scalar head where the configuration has none. The engine over transformers'
    modules also takes models without a family, see `_make_unlisted_table`.
    """
    if engine_of(config) is not Engine.MEGATRON_CORE:
        found = transformers_config(config.model_name, config.hf_config_overrides)
        if not has_family(found.model_type):
            return _make_unlisted_table(found, dict(config.hf_config_overrides or {}))
    overrides = _word_overrides(config.model_name, config.hf_config_overrides or {})
    left_out = [name for name, value in overrides.items() if value is None]
    opened = _open(config, config.model_name, {}, left_out)
    table = opened.table
    if not config.reward_model_cfg.enabled and (head := table.architecture.head) is not None:
        kind = "regression" if head.per_token else "bradley_terry"
        raise ConfigError(
            "policy.model_name is a checkpoint with a scalar head, which has no vocabulary: set "
            f"policy.reward_model_cfg to enabled: true and reward_model_type: {kind}"
        )
    if overrides.keys() == {_COEFFICIENT} and _COEFFICIENT not in opened.fields:
        return table  # only megatron_cfg.moe_aux_loss_coeff takes it
    if not overrides:
        return table
    try:
        other = _open(config, config.model_name, overrides).table
    except (ConfigError, ConversionError) as error:
        raise ConfigError(f"{_KEY} ({', '.join(overrides)}): {error}") from error
    own, changed = (
        {name: str(list(shape)) for name, shape in each.hf_shapes().items()}
        for each in (table, other)
    )
    names = [name for name in {**own, **changed} if own.get(name) != changed.get(name)]
    if names:
        shown = ", ".join(
            f"{name} ({own.get(name, 'none')} to {changed.get(name, 'none')})"
            for name in names[:_SHOWN]
        )
        raise ConfigError(
            f"{_KEY} ({', '.join(overrides)}) would change weights, which stay as they are in the "
            f"files: {shown}{' and others' * (len(names) > _SHOWN)}. Leave out what does"
        )
    return replace(other, overrides={**other.overrides, **overrides})


def _open(
    config: PolicyConfig, model: str, overrides: Mapping[str, Any], left_out: Collection[str] = ()
) -> OpenModel:
    """Open a model with the head and layers for multi-token prediction that `config` asks for."""
    wanted, head = config.reward_model_cfg, None
    if wanted.enabled:
        head = ScalarHead(per_token=wanted.reward_model_type == "regression")
    layers = mtp_layers(config.megatron_cfg)
    return open_model(model, overrides, mtp_layers=layers, head=head, left_out=left_out)


def _word_overrides(model: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The values of `given` as the model's config.json has such values."""
    return in_kind(given, read_config(model), written_config(model)) if given else {}


def _make_unlisted_table(config: Any, overrides: dict[str, Any]) -> Table:
    """A table without entries for the transformers config of a model without a family, with its
    sizes, which serve batches; the engine adds entries of what it has built. ConfigError where the
    class has no layers or no vocabulary.
    """
    kind = config.model_type
    layers, hidden, vocab = (_first_count(config, names) or 0 for names in _NAMES.values())
    found = zip(_NAMES, (layers, hidden, vocab), strict=True)
    if missing := [name for name, value in found if not value]:
        raise ConfigError(
            f"the model is a {kind}, whose config names no {', '.join(missing)}: it is not a "
            "causal language model that can be trained here"
        )
    heads = _first_count(config, _HEADS) or 1
    groups = _first_count(config, _GROUPS) or heads
    attention = Attention(
        num_attention_heads=heads,
        num_query_groups=groups if heads % groups == 0 else heads,
        kv_channels=2 * max(1, (_first_count(config, ("head_dim",)) or hidden // heads) // 2),
        rope=Rope(10000.0),
    )
    mlp = Mlp(ffn_hidden_size=_first_count(config, _INNER) or 4 * hidden)
    architecture = Architecture(
        layers=stack(layers, attention, mlp),
        hidden_size=hidden,
        vocab_size=vocab,
        max_position_embeddings=_first_count(config, _POSITIONS) or _UNLIMITED,
        layernorm_epsilon=1e-6,
        in_full=False,
        tied=bool(getattr(config, "tie_word_embeddings", False)),
    )
    return Table(kind, architecture, (), {}, overrides)


def _first_count(config: Any, names: tuple[str, ...]) -> int | None:
    """The first of these fields that is a positive number; of a list, its largest."""
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, (list, tuple)) and value and all(isinstance(v, int) for v in value):
            value = max(value)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def check_implementation(requested: str, architecture: Architecture, adapted: bool) -> None:
    """ConfigError if Transformer Engine is asked for and cannot express the model."""
    beyond = beyond_transformer_engine(architecture, adapted)
    if requested == "transformer_engine" and beyond:
        raise ConfigError(
            "policy.megatron_cfg.transformer_impl is 'transformer_engine', which cannot express "
            f"this model's {', '.join(beyond)}; use 'auto' or 'local'"
        )


def check_reference(config: PolicyConfig, table: Table, *, wanted: bool) -> None:
    """ConfigError if `reference_model_name` is given for a policy of `table` without a reference
    (`wanted`), or names what cannot be one.
    """
    if config.reference_model_name is None:
        return
    if not wanted:
        raise ConfigError(
            f"{_REFERENCE} is {config.reference_model_name!r}, but this policy was made with "
            "init_reference_model=False: leave the key out, or let the policy have a reference"
        )
    bind_reference(config, table)


def bind_reference(config: PolicyConfig, table: Table) -> Table | None:
    """The table of the checkpoint that `reference_model_name` names, for a policy of `table`; None
    if it names adapters, or nothing.

    ConfigError for adapters of a policy that has none, and for a checkpoint of another family or
    architecture, or without the policy's head.
    """
    name = config.reference_model_name
    if name is None:
        return None
    if is_peft(name):
        if not config.megatron_cfg.peft.enabled:
            raise ConfigError(
                f"{_REFERENCE} is a directory of adapters, but this policy has none: enable "
                "policy.megatron_cfg.peft, or merge them into their base, as PEFT's "
                "merge_and_unload() does, and give a checkpoint of that"
            )
        return None
    given = dict(config.hf_config_overrides or {})
    given.pop(_COEFFICIENT, None)  # of use in training only
    try:
        found = _open(config, name, _word_overrides(name, given)).table
    except (ConfigError, ConversionError) as error:
        raise ConfigError(f"{_REFERENCE}: {error}") from error
    if found.family != table.family:
        raise ConfigError(
            f"{_REFERENCE} is a {found.family} model and policy.model_name a {table.family} model: "
            "the reference has to be of the same architecture"
        )
    if different := _list_differences(table.architecture, found.architecture):
        raise ConfigError(
            f"{_REFERENCE} is of another architecture than policy.model_name: {different}. Give a "
            "checkpoint of the same architecture; if only a setting differs, override it with "
            "policy.hf_config_overrides, which both models get"
        )
    if found.fresh:
        raise ConfigError(
            f"{_REFERENCE} has no {', '.join(found.fresh)}: give a checkpoint with the head that "
            "policy.reward_model_cfg asks for"
        )
    return found


def _list_differences(own: Architecture, other: Architecture) -> str:
    """What the other has in place of values of a model's own, in words; "" if nothing differs."""
    values = flatten(own)
    different = [
        f"{name} is {value!r:.200}, not {values[name]!r:.200}"
        for name, value in flatten(other).items()
        if plain(value) != plain(values[name])  # `mla` and `moe` without what is a name itself
    ]
    return "; ".join(different[:_SHOWN])


def check_source(model: str, table: Table) -> None:
    """ConfigError unless the config.json of `model`, with the fields that `table` overrides, says
    what the policy of that table computes.
    """
    fix = "leave it out for policy.model_name, or name the directory that this model is in now"
    overrides = {name: value for name, value in table.overrides.items() if name not in OF_HEAD}
    try:
        if has_family(table.family):
            left_out = [name for name, value in overrides.items() if value is None]
            mtp, head = table.architecture.mtp_layers, table.architecture.head
            found = open_model(model, overrides, mtp_layers=mtp, head=head, left_out=left_out).table
        else:
            found = _make_unlisted_table(transformers_config(model, overrides), {})
    except (ConfigError, ConversionError) as error:
        raise ConfigError(f"source={model!r} is not the policy's model ({error}): {fix}") from error
    different = _list_differences(table.architecture, found.architecture)
    if found.family != table.family:
        different = f"it is a {found.family} model, not a {table.family} model"
    if different:
        raise ConfigError(f"source={model!r} is not the policy's model: {different}; {fix}")


_COEFFICIENT = "router_aux_loss_coef"
