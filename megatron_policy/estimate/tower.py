"""What towers that see or hear cost: transformers' own code runs on the meta device, where
tensors have shapes alone, and what it computes and keeps is counted.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from megatron_policy.adapters.stacks import is_of_tower
from megatron_policy.adapters.table import strip_weight
from megatron_policy.config import PolicyConfig
from megatron_policy.config.param_groups import ParamGroups
from megatron_policy.config.trained import PeftConfig
from megatron_policy.converters.architecture import Architecture, Shell
from megatron_policy.converters.families.shared.pictures import PARAMETERS
from megatron_policy.converters.formats.hf_config import (
    build_without_values,
    transformers_config,
)
from megatron_policy.dtypes import dtype_named
from megatron_policy.errors import ConfigError
from megatron_policy.estimate.states import ModelRows

_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@dataclass(frozen=True)
class RowMedia:
    """What each row has beside text."""

    patches: int = 0
    """Of one picture that is about as high as it is wide."""
    frames: int = 0
    """Of one clip of sound."""


NO_MEDIA = RowMedia()


@dataclass(frozen=True)
class TowerCost:
    """Of the `media` of one row: operations of a forward pass, those of towers that have a backward
    pass too, and bytes that are kept for it. `patches` are what they count as in a microbatch.
    """

    media: RowMedia = NO_MEDIA
    patches: int = 0
    flops: int = 0
    trained_flops: int = 0
    kept: int = 0


NO_TOWERS = TowerCost()


def check_media(architecture: Architecture, media: RowMedia, length: int) -> None:
    """ConfigError for media of a row of `length` tokens that the model has no tower for, that do
    not make tokens, or that make more than the row has.
    """
    shell, patches, frames = architecture.shell, media.patches, media.frames
    if patches and shell is None:
        raise ConfigError(f"{patches} patches: this model sees no pictures, so leave them out")
    if frames and (shell is None or not shell.sounds):
        raise ConfigError(f"{frames} frames: this model hears no sound, so leave them out")
    if shell is None:
        return
    if patches % (whole := shell.pictures.indivisible):
        raise ConfigError(
            f"{patches} patches: the model sees {whole} together, so give a multiple of {whole}"
        )
    heard = 0
    if frames:
        heard = shell.sounds[0].count_tokens(_make_clip(shell, frames, torch.float32))
        if not heard:
            raise ConfigError(f"{frames} frames are too few for a token: give more")
        if heard > length:
            raise ConfigError(
                f"{frames} frames make {heard} tokens of a row, which has {length}: give fewer, or "
                "longer rows"
            )
    if (tokens := patches // shell.pictures.merged) > length - heard:
        most = (length - heard) * shell.pictures.merged // whole * whole
        left = f"has {length - heard} beside sound" if heard else f"has {length}"
        raise ConfigError(
            f"{patches} patches make {tokens} tokens of a row, which {left}: give {most} "
            "patches or fewer, or longer rows"
        )


def count_tower(config: PolicyConfig, rows: ModelRows, media: RowMedia) -> TowerCost:
    """What the media of a row, which pass `check_media`, cost the model of the configuration."""
    shell = rows.architecture.shell
    if shell is None:
        return NO_TOWERS
    groups = ParamGroups.of(config.megatron_cfg)
    own = [entry for entry in rows.embedding if is_of_tower(entry)]
    frozen = frozenset(
        each.megatron.removeprefix(PARAMETERS) for each in own if groups.frozen(each)
    )
    adapted = frozenset(strip_weight(e.adapts.removeprefix(PARAMETERS)) for e in own if e.adapts)
    peft = config.megatron_cfg.peft if adapted else None
    overrides = json.dumps(config.hf_config_overrides, sort_keys=True)
    runs = [
        _run(config.model_name, overrides, config.precision, shell, frozen, adapted, peft, each)
        for each in (RowMedia(patches=media.patches), RowMedia(frames=media.frames))
        if each != NO_MEDIA
    ]
    return TowerCost(media, *map(sum, zip(*runs, strict=True)))


def _make_clip(shell: Shell, frames: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    make = partial(torch.empty, dtype=dtype, device="meta")
    return shell.sounds[0].make_clip(frames, make)


def _make_pictures(shell: Shell, patches: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    medium = shell.pictures
    squares, side = patches // medium.merged, medium.side
    height = max(n for n in range(1, math.isqrt(squares) + 1) if squares % n == 0)
    size = side * height, side * squares // height
    picture = shell.pictures.make_picture(size, partial(torch.empty, dtype=dtype, device="meta"))
    count = patches // medium.count_patches(picture)  # all are as large
    return shell.join({key: [value] * count for key, value in picture.items()})


@lru_cache
def _run(
    model: str,
    overrides: str,
    precision: str,
    shell: Shell,
    frozen: frozenset[str],
    adapted: frozenset[str],
    peft: PeftConfig | None,
    media: RowMedia,
) -> tuple[int, int, int, int]:
    """The numbers of `TowerCost` of a picture or a clip, beside these `frozen` parameters
    and adapters on the modules `adapted`.
    """
    settings, dtype = transformers_config(model, json.loads(overrides)), dtype_named(precision)
    composite = build_without_values(settings, dtype=dtype, attn_implementation="sdpa").eval()
    for name, parameter in composite.named_parameters():
        parameter.requires_grad_(name not in frozen)
    for name in adapted:
        assert peft is not None
        _adapt(composite.get_submodule(name), peft)
    known = {parameter.untyped_storage()._cdata for parameter in composite.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    count: Any = {_ATTENTION: lambda q, k, v, *_, **__: int(sdpa_flop_count(q, k, v))}
    counter = FlopCounterMode(display=False, custom_mapping=count)
    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    alone: Any = _ShapesAlone()  # type: ignore[no-untyped-call]
    with torch.enable_grad(), _OneKernel(), alone, counter, hooks:
        if media.patches:
            patches, read = media.patches, composite.get_image_features
            given = _make_pictures(shell, patches, dtype)
        else:
            given, read = _make_clip(shell, media.frames, dtype), composite.get_audio_features
            patches = shell.sounds[0].count_patches(given)
        found = read(**given)
    bytes_kept = sum(t.untyped_storage().nbytes() for at, t in kept.items() if at not in known)
    flops = int(counter.get_total_flops())
    trained = any(isinstance(e, torch.Tensor) and e.requires_grad for e in tree_iter(dict(found)))
    return patches, flops, flops * trained, bytes_kept


def _adapt(linear: torch.nn.Module, peft: PeftConfig) -> None:
    """Add what a low-rank adapter computes to that of a linear layer."""
    weight: Any = linear.weight
    before = peft.dropout_position == "pre"
    for name, shape in (("a", (peft.dim, weight.size(1))), ("b", (weight.size(0), peft.dim))):
        linear.register_parameter(name, torch.nn.Parameter(weight.new_empty(shape)))

    def add(module: Any, given: tuple[torch.Tensor, ...], result: torch.Tensor) -> torch.Tensor:
        x = F.dropout(given[0], peft.dropout * before)
        more = F.linear(F.linear(x, module.a) * 1.0, module.b)
        return result + F.dropout(more, peft.dropout * (not before))

    linear.register_forward_hook(add)


class _OneKernel(TorchFunctionMode):
    """Attention is the kernel that keeps no scores, as on every device that has one. What is taken
    as a tensor, sizes of pictures, keeps its values, and so do numbers of places, and what is moved
    to where the model is. Nothing is left out by what has none: pixels are not zeros, and masks are
    true.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.as_tensor, torch.arange):
            return func(*args, **kwargs | {"device": None})
        if func is torch.Tensor.to and not args[0].is_meta and torch.device("meta") in args:
            return args[0]
        if func is torch.Tensor.__eq__ and args[0].is_meta:
            return torch.tensor(False).expand(args[0].shape)
        if func is torch.Tensor.all and args[0].is_meta:
            return torch.tensor(True)
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        return _ATTENTION(*args[:3], scale=kwargs.get("scale"))[0]


class _ShapesAlone(TorchDispatchMode):
    """What meets a tensor without values loses its own; grids, which code looks at, keep them, and
    so does what says which pictures are read.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = (args, kwargs or {})
        if func is torch.ops.aten.index.Tensor and _chooses(*args):
            return func(*args)
        if any(isinstance(each, torch.Tensor) and each.is_meta for each in tree_iter(given)):
            given = tree_map_only(torch.Tensor, lambda each: each.to("meta"), given)
        return func(*given[0], **given[1])


def _chooses(tensor: torch.Tensor, indices: list[torch.Tensor | None]) -> bool:
    """Whether an index is a mask that has values."""
    masks = (each for each in indices if each is not None and each.dtype is torch.bool)
    return not all(each.is_meta for each in masks)
