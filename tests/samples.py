"""What the tests know of a model family; `tests/families/` has one file of it for each."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import cycle, islice
from random import Random
from typing import Any

from megatron_policy.converters.architecture import Moe, Scoring

Fields = dict[str, Any]

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
RECURRENT = {"A_log": (0.0, 1.5), "dt_bias": (-1.0, 1.0)}
"""Ranges of the random constants of recurrences: heads that forget at once, and others that hardly
do.
"""
LONGEST = 12
"""Of the texts that random models read, all but these tokens are beyond what was trained."""
SCALINGS: tuple[Fields | None, ...] = (
    None,
    {"rope_type": "linear", "factor": 2.5},
    {"rope_type": "dynamic", "factor": 2.5},
    YARN | {"factor": 2.5, "original_max_position_embeddings": LONGEST},
    LLAMA3 | {"factor": 2.5, "original_max_position_embeddings": LONGEST},
)


def make_moe(**changes: Any) -> Moe:
    """A small mixture of experts that differs from a plain one."""
    plain = {"experts": 4, "chosen": 2, "ffn_hidden_size": 16, "scoring": Scoring.SOFTMAX}
    return Moe(**plain | changes)


def draw_scaling(random: Random, sizes: Fields) -> Fields:
    return {"rope_scaling": random.choice(SCALINGS)}


def set_window(layers: int, window: int | None, full_layers: int) -> Fields:
    """Of all layers."""
    return {"sliding_window": window}


def set_later_windows(layers: int, window: int | None, full_layers: int) -> Fields:
    """Of all but the first `full_layers`."""
    if window is None:
        return {}
    own = {"sliding_window": window, "max_window_layers": full_layers}
    return {"use_sliding_window": True} | own


def set_all_windows_but_the_last(layers: int, window: int | None, full_layers: int) -> Fields:
    types = ["sliding_attention"] * (layers - 1) + ["full_attention"]
    return {"sliding_window": window or 7, "layer_types": types}


PLACEHOLDERS = {
    "image_token_id": 0,
    "video_token_id": 10**6 + 1,
}
"""Which no text has: padding alone is of zeros."""
VISION: Fields = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "in_channels": 3,
    "patch_size": 2,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "initializer_range": 0.1,
}
_OF_THE_WHOLE = ("model_type", "architectures", "torch_dtype", "transformers_version", "shell")


def surround(
    text: Fields,
    vision: Fields,
    interleaved: bool,
    width: str = "out_hidden_size",
    marks: tuple[str, ...] = ("vision_start", "vision_end"),
) -> Fields:
    """The fields of a model that also sees pictures from those of its decoder, whose tokens have
    three positions; `vision` are those of its tower, unless `text` has them, beside the width of
    what it gives, which is the field `width`; `marks` name tokens around pictures. A `text` with
    `rope_parameters` keeps these.
    """
    top = {name: text[name] for name in _OF_THE_WHOLE if name in text}
    text = {name: value for name, value in text.items() if name not in top}
    size = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
    if interleaved:  # its class has another default
        text["head_dim"] = size
    if "rope_parameters" not in text:
        scaling = {"rope_type": "default"} | (text.pop("rope_scaling", None) or {})
        if (part := text.pop("partial_rotary_factor", None)) is not None:
            scaling["partial_rotary_factor"] = part
        pairs = int(size * (part or 1)) // 2
        kind = {"mrope_interleaved": True} if interleaved else {}
        sections = [pairs - 2 * (pairs // 4), pairs // 4, pairs // 4]
        text["rope_scaling"] = scaling | kind | {"mrope_section": sections}
    top["tie_word_embeddings"] = text.pop("tie_word_embeddings", False)
    top |= {f"{mark}_token_id": 10**6 + number for number, mark in enumerate(marks, start=2)}
    tower = text.pop("vision_config", vision) | {width: text["hidden_size"]}
    return {"text_config": text, "vision_config": tower, **PLACEHOLDERS, **top}


def surround_with_sound(text: Fields, audio: Fields, ending: str, **more: Any) -> Fields:
    """The same, see `surround`, of a model that also hears sound, with a tower of the fields
    `audio` unless `text` has them. The names of placeholders end so.
    """
    decoder = {name: value for name, value in text.items() if name != "audio_config"}
    marks = ("vision_start", "vision_end", "audio_start", "audio_end")
    found = surround(decoder, marks=marks, **more)
    tower = text.get("audio_config", audio) | {"output_dim": text["hidden_size"]}
    tokens = {name: found.pop(name) for name in PLACEHOLDERS} | {"audio_token_id": 10**6}
    named = {name.removesuffix("id") + ending: token for name, token in tokens.items()}
    return {"audio_config": tower, **named, **found}


def enclose(text: Fields, decoder: str, vision: Fields, **more: Any) -> Fields:
    """The fields of a model that also sees whole pictures from those of its decoder, of the family
    `decoder`; `vision` are those of its tower, and `more` others, unless `text` has them.
    """
    top = {name: text[name] for name in _OF_THE_WHOLE if name in text}
    text = {name: value for name, value in text.items() if name not in top}
    top["tie_word_embeddings"] = text.pop("tie_word_embeddings", False)
    more = {name: text.pop(name, v) for name, v in {"vision_config": vision, **more}.items()}
    return {"text_config": text | {"model_type": decoder}, **more, **top}


def parse_published(text: str) -> Fields:
    """What `config.json` has between its braces, behind the number of the checkpoint's parameters,
    tied ones once, which becomes `parameters`. Left out are `model_type`, `architectures`, and what
    `COMMON` of `tests/families` has with the same value.
    """
    parameters, _, fields = text.partition(" parameters\n")
    return {"parameters": int(parameters), **json.loads("{" + fields + "}")}


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Configs of one family: tiny ones, all that can differ in it, and those of its makers.

    Sizes and variants are arguments of `make_checkpoint`, everything else fields of `config.json`.
    """

    architecture: str
    """The class that the makers' `config.json` names."""
    read: tuple[tuple[Fields, Fields], ...]
    """What transformers' class of the config is given, and attributes of our `Architecture`."""
    published: dict[str, Fields]
    """By the name of the model, see `parse_published`."""
    refused: tuple[tuple[Fields, str], ...] = ()
    """What is put into `config.json` by hand (None removes a field), and what the error says."""

    tiny: Fields = field(default_factory=dict)
    """Values that make a difference where the defaults of the class would not."""
    epsilon: str = "rms_norm_eps"
    """The field with the norms' epsilon."""
    head_dim: bool = False
    """Whether the class of the config has a `head_dim`."""
    layer_types: bool = False
    """Whether a config has the kind of attention of each layer."""
    turns: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """By the field that says what each layer is: the kinds of layers, which take turns."""
    windows: Callable[[int, int | None, int], Fields] | None = None
    """Makes the fields of a number of layers, a window in tokens or None, and how many layers do
    without it, where a caller can say that.
    """
    ranges: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Of random weights whose names have these parts, in place of those of all families."""
    publish: Callable[[Any, Fields], Fields] | None = None
    """Makes of tensors by their names, as transformers saves a model of this config, what makers
    publish, where it writes others than it reads.
    """
    hf_model_type: str = ""
    """Of a family that transformers only knows from its makers' code, which no checkpoint here has:
    the model_type of its class with the same fields.
    """
    own: Fields = field(default_factory=dict)
    """What `config.json` of such a family has besides the fields of that class."""

    surround: Callable[[Fields], Fields] = dict
    """Makes what `config.json` has of the fields of a decoder: where this is a part of a model that
    also sees pictures, those of the whole.
    """

    full: Fields = field(default_factory=dict)
    """Beside `tiny`: settings under which every row of the table applies, but for the one choice of
    tying. Those that are true or false are also drawn.
    """
    draw: Callable[[Random, Fields], Fields] = draw_scaling
    """Further random arguments for a model of the drawn sizes."""
    variants: dict[str, Fields] = field(default_factory=dict)
    """Of a dense family, every mode that it has; names begin with the family's. The first one also
    runs in a pipeline: it has what differs from stage to stage.
    """
    generating: tuple[str, Fields] | None = ("TP2+SP", {})
    """The layout and the variant of a dense family that generates text; None if its layers are
    those of another family.
    """
    context: Fields | None = None
    """The variant that computes under context parallelism, if its attention is unlike others'."""
    without_heads: tuple[str, ...] = ()
    """Kinds of scalar heads for which transformers has no class."""

    untied: bool = False
    """Whether its head always has weights of its own."""
    shared: bool = True
    """Whether transformers has a plan that can be followed of how tensor-parallel ranks share its
    layers.
    """

    experts: bool = False
    expert_biases: bool = False
    """Which Megatron-Core does not split over tensor-parallel ranks."""
    trained: tuple[str, ...] = ("PP2", "TP2+SP")
    """Layouts under which a family with experts learns."""

    larger: Fields = field(default_factory=dict)
    """What the decoder of a larger model has than those of the published ones here, which are too
    small to be split far.
    """

    def take_turns(self, layers: int) -> Fields:
        """The fields of `turns` for a model of so many layers."""
        return {name: [*islice(cycle(kinds), layers)] for name, kinds in self.turns.items()}
