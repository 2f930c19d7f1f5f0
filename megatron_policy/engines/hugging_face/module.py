"""Builds a transformers model with parameters on the meta device and real buffers, and says which
HF tensors make each of its parameters; and the root module that FSDP shards, whose forward pass
ends in what is made of its hidden states, while the weights of its head are there.

Shapes: T positions that this context-parallel rank computes, R rows of them, D model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any

import torch

from megatron_policy.config import PolicyConfig
from megatron_policy.config.parallel_sizes import parallel_sizes, transformers_settings
from megatron_policy.converters.formats.hf_config import transformers_config
from megatron_policy.engines.composite import DEEP, DEEP_AT, parameters_on_meta
from megatron_policy.engines.hugging_face.attention import register_attention
from megatron_policy.errors import ConfigError, ConversionError
from megatron_policy.interfaces.embedder import Entering

_SHOWN = 8


def build_module(config: PolicyConfig, surrounded: bool = False) -> Any:
    """The causal language model of `config.model_name`, or that which also sees pictures if its
    decoder is `surrounded`: parameters are fp32 and on the meta device, buffers as its own code
    makes them, on the CPU.

    ConfigError if transformers cannot build it.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    settings = transformers_config(config.model_name, config.hf_config_overrides)
    asked = transformers_settings(config).attn_implementation
    auto: Any = AutoModelForImageTextToText if surrounded else AutoModelForCausalLM
    cls = auto._model_mapping.get(type(settings), None)
    # Whether the class lets attention be computed by others than itself.
    open_to_others = asked != "auto" or getattr(cls, "_supports_attention_backend", False)
    name: Any = register_attention(asked) if open_to_others else None
    if surrounded and name is not None:
        name = {"text_config": name}  # a tower's is not causal
    section = parallel_sizes(config).section
    try:
        with parameters_on_meta():
            module = auto.from_config(settings, attn_implementation=name, dtype=torch.float32)
    except (ValueError, ImportError) as error:
        raise ConfigError(
            f"transformers cannot build the model of {config.model_name}: {error}. If it says that "
            f"an attention is not supported, set {section}.attn_implementation to 'eager'"
        ) from error
    module.tie_weights()
    return module


@dataclass(frozen=True)
class SourceTensors:
    """The HF tensors that make one parameter, one after another along its first dimension; if it is
    `stacked`, `names[e]` make its index e. Else there is one tuple of names.
    """

    names: tuple[tuple[str, ...], ...]
    stacked: bool = False


def sources_of(
    module: Any, hf_names: Iterable[str], *, turned: bool = True
) -> dict[str, SourceTensors]:
    """Which of the HF tensors `hf_names` make each parameter and persistent buffer of the module,
    by the name that it has there; what nothing is made of is left out. Those of which transformers
    transposes what earlier releases have saved can be `turned`, or are known not to be.

    ConversionError where transformers changes tensors in a way that is not supported.
    """
    rename = _make_renaming(module, turned)
    found: dict[str, dict[tuple[int, int], str]] = {}
    stacked: set[str] = set()
    for name in hf_names:
        target, index, part = rename(name)
        if index is not None:
            stacked.add(target)
        found.setdefault(target, {})[index or 0, part] = name
    own = module.state_dict().keys()
    sources = {}
    for target, places in found.items():
        if target in own:
            by_index = groupby(sorted(places), key=itemgetter(0))
            names = tuple(tuple(places[at] for at in alike) for _, alike in by_index)
            sources[target] = SourceTensors(names, target in stacked)
    return sources


def _make_renaming(module: Any, turned: bool) -> Any:
    """A function from the name of an HF tensor to that of its parameter, its index in the stack or
    None, and its number among what is joined there.
    """
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, rename_source_key
    except ImportError:  # before transformers 5 the names are the same
        return lambda name: (name, None, 0)
    transforms = get_model_conversion_mapping(module, add_legacy=False)
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    renamings = [each for each in transforms if not isinstance(each, WeightConverter)]
    own, prefix = module.state_dict(), module.base_model_prefix

    def rename(name: str) -> tuple[str, int | None, int]:
        target, pattern = rename_source_key(name, renamings, converters, prefix, own)
        if pattern is None:
            return target, None, 0
        # That of a decoder can be listed for the whole model too.
        converter = next(each for each in converters if pattern in each.source_patterns)
        part = converter.source_patterns.index(pattern)
        kinds = [(type(each).__name__, getattr(each, "dim", None)) for each in converter.operations]
        if kinds == [("Concatenate", 0)]:
            return target, None, part
        if not turned and all(getattr(each, "check_dims", False) for each in converter.operations):
            return target, None, 0
        if kinds not in ([("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)]):
            raise ConversionError(
                f"transformers changes {name} by {', '.join(kind for kind, _ in kinds)} when it "
                "loads this model, which is not supported under FSDP: use megatron_cfg if its "
                "family has a table"
            )
        # A pattern's only number is the index: those of layers are outside it.
        literal = pattern.replace(r"\.", ".").replace(".", r"\.")
        number = re.search(literal.replace("*", r"(\d+)"), name)
        if number is None:
            number = re.search(r"\.(\d+)\.[^\d]*$", name)
        assert number is not None, (name, pattern)
        return target, int(number.group(1)), part

    return rename


def refuse_unmatched(module: Any, sources: dict[str, SourceTensors], names: Iterable[str]) -> None:
    """ConversionError, naming them, for parameters that no HF tensor makes and HF tensors that make
    none.
    """
    aliases = dict(module.named_parameters(remove_duplicate=False))
    owned = {id(aliases[name]) for name in sources if name in aliases}
    missing = [name for name, each in aliases.items() if id(each) not in owned]
    used = {name for each in sources.values() for names in each.names for name in names}
    unused = sorted(set(names) - used)
    if missing or unused:
        said = "; ".join(
            f"{what} {', '.join(found[:_SHOWN])}{' and others' * (len(found) > _SHOWN)}"
            for what, found in (("nothing fills", missing), ("nothing uses", unused))
            if found
        )
        raise ConversionError(
            f"the checkpoint is not the {type(module).__name__} of its config.json: {said}. "
            "Correct the checkpoint or its config.json"
        )


Embed = Callable[[torch.Tensor], Entering]
"""From tokens `[R, T]` to what the model's code is to take for their embedding, and what it is to
add to the outputs of its first layers.
"""
Finish = Callable[[torch.Tensor], torch.Tensor]
"""From hidden states `[T, R, D]` to what a forward pass returns."""


class Decoder(torch.nn.Module):
    """A causal language model of transformers without its logits."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    @property
    def base(self) -> Any:
        """The module that makes hidden states: what the model makes logits of. ConfigError if the
        model's class has none apart from its head.
        """
        base = self.model.get_decoder()
        if base is None or base is self.model:
            raise ConfigError(
                f"{type(self.model).__name__} has no decoder apart from its head, so its hidden "
                "states cannot be read: this model cannot be trained here"
            )
        return base

    def forward(
        self,
        tokens_RT: torch.Tensor,
        positions: torch.Tensor,
        embed: Embed,
        finish: Finish,
        cache: Any = None,
    ) -> torch.Tensor:
        """What `finish` makes of the hidden states. Tokens have one position each, `[R, T]`, or
        three, `[3, R, T]`. `cache` is one of transformers, or None.

        The model is given the tokens, not their embedding: some read them in other places too.
        """
        entering = embed(tokens_RT)
        deep = {}
        if entering.deep:
            # The features at all tokens that the mask names, one after another.
            features = [each_RTD.flatten(0, 1) for each_RTD in entering.deep]
            everywhere_RT = torch.ones_like(entering.hidden[..., 0], dtype=torch.bool)
            deep = {DEEP: features, DEEP_AT: everywhere_RT}
        with _computing(self.model.get_input_embeddings(), lambda _: entering.hidden):
            output = self.base(
                input_ids=tokens_RT,
                position_ids=positions,
                # Without one, transformers looks for packed sequences, and waits for the device.
                attention_mask=None if cache is not None else torch.ones_like(tokens_RT),
                past_key_values=cache,
                use_cache=cache is not None,
                **deep,
            )
        return finish(output.last_hidden_state.transpose(0, 1))

    @property
    def layers(self) -> list[torch.nn.Module]:
        """The layers of the decoder, in order: of the lists of modules, the one with most."""
        lists = [m for m in self.base.modules() if isinstance(m, torch.nn.ModuleList)]
        inner = {id(m) for each in lists for m in each.modules() if m is not each}
        outer = [list(each) for each in lists if id(each) not in inner]
        return max(outer, key=len)


@contextmanager
def _computing(
    module: torch.nn.Module, forward: Callable[[torch.Tensor], torch.Tensor]
) -> Iterator[None]:
    """In this context `module` computes `forward` in place of what it computes itself."""
    own = vars(module).pop("forward", None)
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if own is not None:
            module.forward = own
