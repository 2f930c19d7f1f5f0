"""Rows of the norms that some dense families have instead of, or in addition to, the usual two."""

from __future__ import annotations

from megatron_policy.converters.architecture import Attention
from megatron_policy.converters.rows import Columns, Role, RowBase, Whole, assign_part

from .dense import H, M


def _norm(megatron: str, hf: str, role: Role = Role.NORM) -> Whole:
    return Whole(megatron, (hf,), ("hidden_size",), role=role)


def before(attention: str, mlp: str) -> tuple[Whole, Whole]:
    """Rows of the norms of the inputs of attention and MLP, by HF's names of them."""
    return (
        _norm(M + "input_layernorm.weight", f"{H}{attention}.weight"),
        _norm(M + "pre_mlp_layernorm.weight", f"{H}{mlp}.weight"),
    )


def after(attention: str, mlp: str) -> tuple[Whole, Whole]:
    """Rows of the norms of the outputs of attention and MLP, by HF's names of them."""
    return (
        _norm(M + "self_attn_bda.norm.weight", f"{H}{attention}.weight"),
        _norm(M + "mlp_bda.norm.weight", f"{H}{mlp}.weight"),
    )


AFTER = after("post_attention_layernorm", "post_feedforward_layernorm")
"""The outputs of attention and MLP are normalised, not their inputs."""

AROUND = (*before("input_layernorm", "pre_feedforward_layernorm"), *AFTER)
"""Both inputs and outputs are normalised."""

BIASES = (
    _norm(M + "input_layernorm.bias", H + "input_layernorm.bias", Role.BIAS),
    _norm(M + "pre_mlp_layernorm.bias", H + "post_attention_layernorm.bias", Role.BIAS),
    _norm("decoder.final_layernorm.bias", "model.norm.bias", Role.BIAS),
)
"""Biases of the usual norms."""

ONE = (_norm(M + "input_layernorm.weight", H + "input_layernorm.weight"),)
"""One norm for attention and MLP, which run in parallel."""


def _of_heads(query: tuple[str, ...], key: tuple[str, ...]) -> tuple[RowBase, ...]:
    return assign_part(
        Attention,
        *(
            Columns(
                f"{M}self_attention.{name}_layernorm.weight",
                (f"{H}self_attn.{name}_norm.weight",),
                dims,
                when="qk_norm",
                role=Role.NORM,
            )
            for name, dims in (("q", query), ("k", key))
        ),
    )


ALL_HEADS = _of_heads(("query_size",), ("kv_size",))
"""Queries and keys are normalised over all heads; each rank has the weights of its heads."""

EACH_HEAD = _of_heads(("num_attention_heads", "kv_channels"), ("num_query_groups", "kv_channels"))
"""Queries and keys are normalised head by head, with separate weights for each head."""
