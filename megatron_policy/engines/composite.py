"""Transformers' own composite model, in which the decoder and its embedding are replaced by modules
that record what the decoder is given.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

import torch

from megatron_policy.config import PolicyConfig
from megatron_policy.converters.formats.hf_config import (
    DECODERS,
    find_composite,
    transformers_config,
)
from megatron_policy.errors import ConfigError

TYPES = "mm_token_type_ids"
"""The argument of composite models that says of each token which medium's it is, or 0."""
FEATURES, POSITIONS, MASK = "inputs_embeds", "position_ids", "attention_mask"
DEEP, DEEP_AT = "deepstack_visual_embeds", "visual_pos_masks"
"""The arguments of decoders with features for their first layers, and with where they are."""
_READ = {FEATURES, POSITIONS, DEEP, DEEP_AT}
MASKS: dict[str, Any] = {}
"""In place of those that a composite model makes, and makes none of if it is given them: engines
let the tokens of a picture see each other.
"""
_WITHOUT_EFFECT = {"use_cache", "return_dict", "output_router_logits"}


class _Zeros(torch.nn.Module):
    """Stands for the embedding: whoever has it adds the text's part. What it gives has the dtype of
    the model's parameters.
    """

    def __init__(self, width: int, find_dtype: Callable[[], torch.dtype]) -> None:
        super().__init__()
        self.width, self.find_dtype = width, find_dtype

    def forward(self, ids_BS: torch.Tensor) -> torch.Tensor:
        return ids_BS.new_zeros((*ids_BS.shape, self.width), dtype=self.find_dtype())


class DecoderRecorder(torch.nn.Module):
    """Stands for the decoder: keeps what it is given, until that is taken."""

    gradient_checkpointing = False
    """What Idefics3's class asks of its decoder."""

    def __init__(self, config: Any, find_dtype: Callable[[], torch.dtype]) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = _Zeros(config.hidden_size, find_dtype)
        self._given: dict[str, Any] = {}

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.embed_tokens

    def forward(self, **given: Any) -> Any:
        from transformers.modeling_outputs import MoeModelOutputWithPast

        given = {n: v for n, v in given.items() if v is not None and v is not MASKS}
        if MASK in given and given[MASK].ndim == 2 and given[MASK].all():
            del given[MASK]  # leaves out nothing
        if unknown := given.keys() - _READ - _WITHOUT_EFFECT:
            raise ConfigError(
                f"this release of transformers gives the model's decoder {', '.join(unknown)}, "
                "which are not read here: install another release of transformers"
            )
        self._given = given
        found: Any = MoeModelOutputWithPast(last_hidden_state=given[FEATURES])
        found.logits = given[FEATURES]  # of a decoder with its head
        return found

    def take(self) -> dict[str, Any]:
        given, self._given = self._given, {}
        return given


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """In this context parameters are on the meta device from their registration on, so that nothing
    is drawn for them; buffers are not.
    """
    original = torch.nn.Module.register_parameter

    def register(module: torch.nn.Module, name: str, param: torch.nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = torch.nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
        original(module, name, param)

    torch.nn.Module.register_parameter = register  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = original  # type: ignore[method-assign]


def build_composite(config: PolicyConfig) -> torch.nn.Module:
    """The composite model of `config.model_name` without its decoder: parameters are on the meta
    device, buffers as its own code makes them, on the CPU. See `take_surroundings`.
    """
    settings = transformers_config(config.model_name, config.hf_config_overrides)
    # A layer of a decoder can be larger than the host's memory, and all are replaced.
    decoder = settings.get_text_config()
    decoder.num_hidden_layers = 0
    if decoder.num_hidden_layers:  # it counts those that a list names
        decoder.layer_types = []
    with parameters_on_meta():
        whole = find_composite(settings).from_config(settings, dtype=torch.float32)
    composite: Any = take_surroundings(whole)
    # Nothing is dropped at random and no statistics are measured, also while the decoder is
    # trained: what a tower makes of a clip does not depend on other rows.
    composite.eval()
    composite.train = lambda mode=True: composite
    kept: torch.nn.Module = composite
    return kept


def take_surroundings(whole: Any) -> torch.nn.Module:
    """A composite model with the modules of `whole`, but for its decoder.

    ConfigError if its class makes positions and is not called with the type of each token for it.
    """
    from transformers import __version__

    composite: Any = copy(whole)
    composite._modules = dict(whole._modules)
    # With sound it makes them of all tokens of a mask, by the tokens around media.
    if makes_positions(composite) and not (
        takes_types(composite)
        or "audio_seqlens" in inspect.signature(composite.get_rope_index).parameters
    ):
        raise ConfigError(
            f"the {type(composite).__name__} of transformers {__version__} does not take {TYPES}: "
            "install transformers 5.3 or newer"
        )
    (slot,) = (name[:-1] for name in DECODERS if hasattr(composite, name[:-1]))
    decoder = DecoderRecorder(getattr(composite, slot).config, lambda: composite.dtype)
    setattr(composite, slot, decoder)
    composite.get_input_embeddings = decoder.get_input_embeddings
    built: torch.nn.Module = composite
    return built


def takes_types(composite: torch.nn.Module) -> bool:
    """Whether the model makes positions, and is called with the type of each token for it."""
    return TYPES in inspect.signature(composite.forward).parameters


def makes_positions(composite: torch.nn.Module) -> bool:
    """Whether the model makes positions."""
    return hasattr(composite, "get_rope_index")


def fill_composite(
    composite: torch.nn.Module,
    make: Callable[[torch.Size], torch.nn.Parameter],
    names: Container[str],
) -> None:
    """Give the composite model parameters that `make` makes of their shapes, on one device and of
    one dtype, and move its buffers there. Those that are among `names` are filled by the caller;
    others are constants, which transformers' own code fills and no state dict has.
    """
    made = None
    for path, module in composite.named_modules():
        for name, parameter in [*module.named_parameters(recurse=False)]:
            made = make(parameter.shape)
            setattr(module, name, made)
            if _join(path, name) not in names:
                # It has the value that transformers gives it, and is no parameter.
                holder = composite.get_submodule(path)
                holders = (path.rsplit(".", cut)[0] for cut in range(path.count(".") + 1))
                makers = (composite.get_submodule(each) for each in holders)
                maker: Any = next(each for each in makers if hasattr(each, "_init_weights"))
                with torch.no_grad():
                    maker._init_weights(holder)
                value = holder._parameters.pop(name)
                assert value is not None
                holder.register_buffer(name, value.detach(), persistent=False)
    assert made is not None, "a shell has parameters"
    for path, module in composite.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            filled = _join(path, name) in names
            dtype = made.dtype if filled else buffer.dtype
            setattr(module, name, buffer.to(made.device, dtype))
            if not filled:
                module._non_persistent_buffers_set.add(name)
        if hasattr(module, "config"):  # by which some classes make inputs what they compute with
            module.config.dtype = made.dtype


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
