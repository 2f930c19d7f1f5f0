"""What towers that read pictures cost: transformers' own code runs on the meta device, where
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

from megatron_policy.config import PolicyConfig
from megatron_policy.config.param_groups import ParamGroups
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
class TowerCost:
    """Of the pictures of one row: operations of a forward pass, and bytes that it keeps for the
    backward pass; `trained` says whether there is one.
    """

    patches: int = 0
    flops: int = 0
    kept: int = 0
    trained: bool = True


NO_PICTURES = TowerCost()


def check_patches(architecture: Architecture, patches: int, length: int) -> None:
    """ConfigError for patches of a row of `length` tokens that the model sees none of, that do not
    make tokens, or that make more than the row has.
    """
    shell = architecture.shell
    if patches and shell is None:
        raise ConfigError(f"{patches} patches: this model sees no pictures, so leave them out")
    if shell is not None and patches % (whole := shell.pictures.indivisible):
        raise ConfigError(
            f"{patches} patches: the model sees {whole} together, so give a multiple of {whole}"
        )
    if shell is not None and (tokens := patches // shell.pictures.merged) > length:
        most = length * shell.pictures.merged // whole * whole
        raise ConfigError(
            f"{patches} patches make {tokens} tokens of a row, which has {length}: give {most} "
            "patches or fewer, or longer rows"
        )


def count_tower(config: PolicyConfig, rows: ModelRows, patches: int) -> TowerCost:
    """What `patches` of a row, which pass `check_patches`, cost the model of the configuration, as
    one picture that is about as high as it is wide.
    """
    shell = rows.architecture.shell
    if not patches or shell is None:
        return NO_PICTURES
    overrides = json.dumps(config.hf_config_overrides, sort_keys=True)
    flops, kept = _run(config.model_name, overrides, config.precision, shell, patches)
    groups, adapted = ParamGroups.of(config.megatron_cfg), config.megatron_cfg.peft.enabled
    own = [entry for entry in rows.embedding if entry.megatron.startswith(PARAMETERS)]
    trained = not adapted and not all(map(groups.frozen, own))
    return TowerCost(patches, flops, kept * trained, trained)


@lru_cache
def _run(model: str, overrides: str, precision: str, shell: Shell, patches: int) -> tuple[int, int]:
    """Operations of a forward pass, and bytes that it keeps."""
    settings, dtype = transformers_config(model, json.loads(overrides)), dtype_named(precision)
    composite = build_without_values(settings, dtype=dtype, attn_implementation="sdpa")
    medium = shell.pictures
    squares, side = patches // medium.merged, medium.side
    height = max(n for n in range(1, math.isqrt(squares) + 1) if squares % n == 0)
    size = side * height, side * squares // height
    picture = shell.make_picture(size, partial(torch.empty, dtype=dtype, device="meta"))
    count = patches // medium.count_patches(picture)  # all are as large
    pictures = shell.join({key: [value] * count for key, value in picture.items()})
    known = {parameter.untyped_storage()._cdata for parameter in composite.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    counter = FlopCounterMode(display=False, custom_mapping={_ATTENTION: _count_attention})
    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    alone: Any = _ShapesAlone()  # type: ignore[no-untyped-call]
    with torch.enable_grad(), _OneKernel(), alone, counter, hooks:
        composite.get_image_features(**pictures)
    bytes_kept = sum(t.untyped_storage().nbytes() for at, t in kept.items() if at not in known)
    return int(counter.get_total_flops()), bytes_kept


def _count_attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query, key, value))


class _OneKernel(TorchFunctionMode):
    """Attention is the kernel that keeps no scores, as on every device that has one. What is taken
    as a tensor, sizes of pictures, keeps its values. Nothing is left out by what has none: pixels
    are not zeros, and masks are true.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.as_tensor:
            return func(*args, **kwargs | {"device": None})
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
