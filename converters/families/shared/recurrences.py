"""Rows of mixers other than attention, under Megatron-Core's names where it has such a mixer."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any, TypeVar

from megatron_policy.converters.architecture import (
    ChannelDeltaNet,
    DeltaNet,
    HeadRows,
    LayerPart,
    Mamba2,
    ShortConvolution,
    delta_net,
    mamba2,
    short_convolution,
)
from megatron_policy.converters.architecture import channel_delta_net as channels
from megatron_policy.converters.config_fields import Fields
from megatron_policy.converters.rows import (
    Columns,
    GatedQkv,
    Role,
    RowBase,
    Rows,
    Sections,
    Whole,
    assign_part,
)

from .dense import H, M

_MIXER: dict[type[LayerPart], str] = {
    DeltaNet: M + "self_attention.",
    ChannelDeltaNet: M + "self_attention.",
    Mamba2: M + "mixer.",
    ShortConvolution: M + "self_attention.",
}
_QKV = (delta_net.QUERY, delta_net.KEY, delta_net.VALUE)
_XBC = (mamba2.INPUT, mamba2.INTO, mamba2.OUT)
_GATED = (short_convolution.INTO, short_convolution.OUT, short_convolution.INPUT)
_PER_HEAD: dict[str, Any] = {"role": Role.RECURRENCE, "keeps_dtype": True}
"""Few numbers, of whose exponentials states are made: many checkpoints have them in fp32."""
OLDER_KINDS = {"mamba": "linear_attention", "attention": "full_attention"}
"""Kinds of layers of models with Mamba2 by older names."""

Parts = TypeVar("Parts")


def take_layers(
    fields: Fields, name: str, kinds: Mapping[str, Parts], older: Mapping[str, str] | None = None
) -> list[Parts]:
    """Of each layer what `kinds` has for the kind that this field states for it, perhaps by its
    older name.
    """
    layers = [(older or {}).get(kind, kind) for kind in fields.take(name)]
    for kind in dict.fromkeys(layers):
        if kind not in kinds:
            fields.refuse(name, kind, f"must be {' or '.join(kinds)}")
    some = next(iter(kinds.values()))  # of a model that is refused
    return [kinds.get(kind, some) for kind in layers]


def take_step_limits(fields: Fields) -> dict[str, Any]:
    """How long Mamba2's steps can be, by the names of its part."""
    least, largest = fields.take("time_step_limit", (0.0, inf))
    unlimited = largest is None or float(largest) == inf
    return {
        "least_step": float(least),
        "largest_step": None if unlimited else float(largest),
    }


def rows_of_gated_attention(block: str = "self_attn") -> tuple[RowBase, ...]:
    """Rows of the input of attention whose queries come with gates; `block` is HF's name of it."""
    weight, bias = (
        tuple(f"{H}{block}.{name}_proj.{kind}" for name in "qkv") for kind in ("weight", "bias")
    )
    joint = M + "self_attention.linear_qkv."
    return (
        GatedQkv(joint + "weight", weight, ("hidden_size",)),
        GatedQkv(joint + "bias", bias, (), when="qkv_bias", role=Role.BIAS),
    )


def rows_of_delta_net(*, by_key_heads: bool, block: str = "linear_attn") -> tuple[RowBase, ...]:
    """Rows of a gated delta net, which HF calls `block`. Its projection goes by key heads, or
    section by section.
    """
    sections: dict[str, tuple[HeadRows, ...]] = {
        "in_proj_qkvz": (*_QKV, delta_net.GATE),
        "in_proj_ba": (delta_net.BETA, delta_net.ALPHA),
    }
    if not by_key_heads:
        each = {"z": delta_net.GATE, "b": delta_net.BETA, "a": delta_net.ALPHA}
        sections = {"in_proj_qkv": _QKV, **{f"in_proj_{n}": (rows,) for n, rows in each.items()}}
    taps = _make_convolution(_MIXER[DeltaNet], f"{H}{block}.", "conv1d.weight", _QKV)
    names = "norm", "out_proj"
    return _rows_of_delta_net(
        f"{H}{block}.", sections, taps, *names, "num_key_heads" * by_key_heads
    )


def rows_of_split_delta_net(block: str) -> tuple[RowBase, ...]:
    """Rows of a gated delta net, which HF calls `block`, with a projection of its own for each
    section and a convolution for each of those that are convolved.
    """
    convolved = dict(zip("qkv", _QKV, strict=True))
    others = {"g": delta_net.GATE, "b": delta_net.BETA, "a": delta_net.ALPHA}
    sections = {f"{name}_proj": (rows,) for name, rows in (convolved | others).items()}
    taps = Sections(
        _MIXER[DeltaNet] + "conv1d.weight",
        tuple(f"{H}{block}.{name}_conv1d.weight" for name in convolved),
        tuple((rows,) for rows in convolved.values()),
        (1, "taps"),
        role=Role.CONVOLUTION,
    )
    return _rows_of_delta_net(f"{H}{block}.", sections, taps, "o_norm", "o_proj")


def _rows_of_delta_net(
    block: str,
    sections: Mapping[str, tuple[HeadRows, ...]],
    taps: RowBase,
    norm: str,
    out: str,
    by: str = "",
) -> tuple[RowBase, ...]:
    """The same, by HF's names of its projections, of its norm and of its last projection."""
    own, heads = _MIXER[DeltaNet], ("num_value_heads",)
    return assign_part(
        DeltaNet,
        Sections(
            own + "in_proj.weight",
            tuple(f"{block}{name}.weight" for name in sections),
            tuple(sections.values()),
            ("hidden_size",),
            by=by,
        ),
        taps,
        Columns(own + "A_log", (block + "A_log",), heads, **_PER_HEAD),
        Columns(own + "dt_bias", (block + "dt_bias",), heads, role=Role.BIAS),
        Whole(
            own + "out_norm.weight",
            (f"{block}{norm}.weight",),
            ("value_head_dim",),
            role=Role.NORM,
            keeps_dtype=True,
        ),
        _make_output(own, block, out),
    )


def rows_of_channel_delta_net(block: str) -> tuple[RowBase, ...]:
    """Rows of a delta net whose channels decay by themselves, which HF calls `block`."""
    own, block = _MIXER[ChannelDeltaNet], f"{H}{block}."
    inputs, convolved = ("q", "k", "v", "b"), (channels.QUERY, channels.KEY, channels.VALUE)
    of_head: dict[str, Any] = {"role": Role.NORM, "keeps_dtype": True}
    return assign_part(
        ChannelDeltaNet,
        Sections(
            own + "in_proj.weight",
            tuple(f"{block}{name}_proj.weight" for name in inputs),
            tuple((rows,) for rows in (*convolved, channels.BETA)),
            ("hidden_size",),
        ),
        Sections(
            own + "conv1d.weight",
            tuple(f"{block}{name}_conv1d.weight" for name in inputs[:3]),
            tuple((rows,) for rows in convolved),
            (1, "taps"),
            role=Role.CONVOLUTION,
        ),
        *(
            row
            for name, of in (("gate", "g"), ("decay", "f"))
            for row in (
                Whole(
                    f"{own}{name}_down.weight",
                    (f"{block}{of}_a_proj.weight",),
                    ("head_dim", "hidden_size"),
                ),
                Columns(
                    f"{own}{name}_up.weight",
                    (f"{block}{of}_b_proj.weight",),
                    ("inner_size", "head_dim"),
                ),
            )
        ),
        Columns(
            own + "A_log",
            (block + "A_log",),
            ("num_heads",),
            hf_dims=(1, 1, "num_heads", 1),
            **_PER_HEAD,
        ),
        Columns(
            own + "dt_bias",
            (block + "dt_bias",),
            ("inner_size",),
            role=Role.BIAS,
            keeps_dtype=True,  # as makers and engines have it
        ),
        Whole(own + "out_norm.weight", (block + "o_norm.weight",), ("head_dim",), **of_head),
        _make_output(own, block, "o_proj"),
    )


def rows_of_mamba2(block: str) -> tuple[RowBase, ...]:
    """Rows of a Mamba2 mixer, which HF calls `block`."""
    own, block, heads = _MIXER[Mamba2], f"{H}{block}.", ("num_heads",)
    sections = ((mamba2.GATE, *_XBC, mamba2.STEP),)
    return assign_part(
        Mamba2,
        Sections(own + "in_proj.weight", (block + "in_proj.weight",), sections, ("hidden_size",)),
        Sections(
            own + "in_proj.bias",
            (block + "in_proj.bias",),
            sections,
            (),
            when="proj_bias",
            role=Role.BIAS,
        ),
        _make_convolution(own, block, "conv1d.weight", _XBC),
        _make_convolution(own, block, "conv1d.bias", _XBC, when="conv_bias"),
        Columns(own + "A_log", (block + "A_log",), heads, **_PER_HEAD),
        Columns(own + "D", (block + "D",), heads, **_PER_HEAD),
        Columns(own + "dt_bias", (block + "dt_bias",), heads, role=Role.BIAS),
        Columns(
            own + "norm.weight",
            (block + "norm.weight",),
            ("inner_size",),
            when="norm",
            role=Role.NORM,
        ),
        _make_output(own, block),
        _make_output_bias(own, block, "proj_bias"),
    )


def rows_of_short_convolution(block: str) -> tuple[RowBase, ...]:
    """Rows of a gated short convolution, which HF calls `block`."""
    own, block = _MIXER[ShortConvolution], f"{H}{block}."
    name, bias = block + "in_proj.", own + "in_proj.bias"
    taps = "conv.weight", (short_convolution.INPUT,)
    return assign_part(
        ShortConvolution,
        Sections(own + "in_proj.weight", (name + "weight",), (_GATED,), ("hidden_size",)),
        Sections(bias, (name + "bias",), (_GATED,), (), when="bias", role=Role.BIAS),
        _make_convolution(own, block, *taps),
        _make_convolution(own, block, "conv.bias", taps[1], when="bias"),
        _make_output(own, block),
        _make_output_bias(own, block, "bias"),
    )


def _make_convolution(
    own: str, block: str, name: str, sections: tuple[HeadRows, ...], when: str = ""
) -> RowBase:
    """The row of a convolution's weight or bias, which HF calls `name`."""
    kind = name.rpartition(".")[2]
    weight = kind == "weight"
    return Sections(
        f"{own}conv1d.{kind}",
        (block + name,),
        (sections,),
        (1, "taps") if weight else (),
        when=when,
        role=Role.CONVOLUTION if weight else Role.BIAS,
    )


def _make_output(own: str, block: str, name: str = "out_proj") -> RowBase:
    size = ("hidden_size", "inner_size")
    return Rows(own + "out_proj.weight", (f"{block}{name}.weight",), size)


def _make_output_bias(own: str, block: str, when: str) -> RowBase:
    names = own + "out_proj.bias", (block + "out_proj.bias",)
    return Whole(*names, ("hidden_size",), when=when, role=Role.BIAS)
