"""An architecture as plain values, for digests of it and for showing what became of a config."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

from .architecture import Architecture
from .attention import Attention
from .channel_delta_net import ChannelDeltaNet
from .delta_net import DeltaNet
from .layer import Norms
from .mamba2 import Mamba2
from .mla import Mla
from .mlp import Mlp
from .moe import Moe
from .rotary import Rope
from .short_convolution import ShortConvolution


def flatten(architecture: Architecture) -> dict[str, Any]:
    """All values of a model by name, those of attention and of dense MLPs among them; parts of
    other kinds are values of their own. What differs from layer to layer is a tuple with a value
    for each.
    """
    layers, mixer, feed = architecture.layers, architecture.mixer, architecture.feed
    latent = mixer if isinstance(mixer, Mla) else None
    pairs: list[tuple[int | None, Rope | None]] = [
        (None, None) if layer.mixer is None else (layer.mixer.window, layer.mixer.rope)
        for layer in layers
    ]
    whole = [rope for window, rope in pairs if rope is not None and window is None]
    windowed = [rope for window, rope in pairs if rope is not None and window is not None]
    rope = next(iter(whole + windowed), None)
    kinds = ["" if layer.mixer is None else type(layer.mixer).__name__ for layer in layers]
    attend = [isinstance(layer.mixer, Attention | Mla) for layer in layers]
    without = [has and rope is None for has, (_, rope) in zip(attend, pairs, strict=True)]
    values = {
        each.name: getattr(architecture, each.name)
        for each in dataclasses.fields(architecture)
        if each.name not in ("layers", "unused_ffn_hidden_size", "unused_rope")
    }
    norms, all_norms = layers[0].norms, tuple(layer.norms.value for layer in layers)
    return {
        **values,
        **{each.name: getattr(mixer, each.name, each.default) for each in _FLAT},
        "num_layers": architecture.num_layers,
        "pre_norm": norms.before,
        "post_norm": norms.after,
        "parallel": norms is Norms.ONE,
        "gate_factor": getattr(feed, "gate_factor", 1.0),
        "out_factor": getattr(feed, "out_factor", 1.0),
        "beside": layers[0].beside and (layers[0].beside.scale, layers[0].beside.scale_of_first),
        "norms": () if len({*all_norms}) == 1 else all_norms,
        "activation": feed.activation,
        "mlp_bias": feed.mlp_bias,
        "gated": feed.gated,
        "ffn_hidden_size": architecture.unused_ffn_hidden_size or feed.ffn_hidden_size,
        "rope": architecture.unused_rope or rope,
        "window": next((window for window, _ in pairs if window is not None), None),
        "windowed": _of_some([window is not None for window, _ in pairs]),
        "without_rope": tuple(without) if any(without) else (),
        "moe": architecture.moe,
        "moe_layers": _of_some([isinstance(layer.feed, Moe) for layer in layers]),
        "mla": latent,
        "mixers": () if all(attend) else tuple(kinds),
        "without_feed": _of_some([layer.feed is None for layer in layers]),
        "delta_net": architecture.find_part(DeltaNet),
        "channel_delta_net": architecture.find_part(ChannelDeltaNet),
        "mamba2": architecture.find_part(Mamba2),
        "short_convolution": architecture.find_part(ShortConvolution),
    }


_FLAT = [each for each in dataclasses.fields(Attention) if each.name not in ("rope", "window")]


def _of_some(layers: list[bool]) -> tuple[bool, ...]:
    return () if all(layers) or not any(layers) else tuple(layers)


_LAYERS: dict[str, Any] = {
    "pre_norm": True,
    **dict.fromkeys(("post_norm", "parallel"), False),
    **dict.fromkeys(("window", "moe", "mla", "delta_net", "channel_delta_net", "mamba2")),
    **dict.fromkeys(("short_convolution", "beside")),
    **dict.fromkeys(
        ("windowed", "without_rope", "moe_layers", "mixers", "without_feed", "norms"), ()
    ),
}
_DEFAULTS = _LAYERS | {
    each.name: each.default
    for kind in (Architecture, Attention, Mlp)
    for each in dataclasses.fields(kind)
}
_OF_MODEL: dict[type, tuple[str, ...]] = {
    Moe: ("activation", "mlp_bias", "gated"),
    Mla: ("num_attention_heads", "rope", "attention_dropout", "attention_scale"),
}
"""What `flatten` has beside a part, though it belongs to it."""


def plain(value: Any) -> Any:
    """`value` as JSON values, the same in all processes and versions of Python: dataclasses without
    fields at their default and those that do not count when two of them are compared.
    """
    if isinstance(value, Architecture):
        return {
            name: plain(each)
            for name, each in flatten(value).items()
            if each != _DEFAULTS.get(name, dataclasses.MISSING)
        }
    if dataclasses.is_dataclass(value):
        return {
            part.name: plain(getattr(value, part.name))
            for part in dataclasses.fields(value)
            if part.compare
            and getattr(value, part.name) != _default(part)
            and part.name not in _OF_MODEL.get(type(value), ())
        }
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, (tuple, list)):
        return [plain(entry) for entry in value]
    assert value is None or isinstance(value, (bool, int, float, str)), value
    return value


def _default(part: dataclasses.Field[Any]) -> Any:
    if part.default_factory is not dataclasses.MISSING:
        return part.default_factory()
    return part.default
