"""The Hugging Face side: one forward pass in one process, with eager attention.

Shapes: B rows, S positions, V vocabulary, D model.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from megatron_policy.batch import BatchedDataDict
from megatron_policy.convert.headers import open_headers
from megatron_policy.converters.architecture import Shell
from megatron_policy.converters.config_fields import quantisation
from megatron_policy.converters.files import strict_json
from megatron_policy.converters.formats.hf_config import (
    DECODERS,
    for_transformers,
    written_config,
)
from megatron_policy.converters.formats.hf_files import inventory, locate
from megatron_policy.converters.formats.hf_names import INDEX
from megatron_policy.converters.registry import family_of
from megatron_policy.device import current_device
from megatron_policy.dtypes import dtype_named
from megatron_policy.errors import ConfigError
from megatron_policy.parity.result import Job, ModelOutputs, draw_batch, keep_input, keep_output

_TYPES = ("mm_token_type_ids", "token_type_ids")
"""The arguments of models that say of each token which medium's it is, or 0."""


@torch.no_grad()
def read_reference(model: str, job: Job, dtype: str, per_layer: bool) -> ModelOutputs:
    """Load the checkpoint in transformers as `dtype` and run it on the job's tokens and pictures.

    The model is released afterwards. ConfigError if transformers cannot load it or compute with it.
    """
    hf = _load(model, dtype)
    surrounded = family_of(hf.config.model_type).surrounded
    shell = open_headers(model)[1].architecture.shell if surrounded else None
    given = _describe_batch(hf, draw_batch(job, shell), shell)
    for key in () if shell is None else (medium.values for medium in shell.media):
        if key in given:  # not every tower makes pixels of its dtype
            given[key] = given[key].to(hf.dtype)
    layers: dict[int, torch.Tensor] = {}
    if per_layer:
        found = _decoder_layers(hf, job.num_layers)
        for number, layer in enumerate(found):
            layer.register_forward_hook(keep_output(layers, number))
            if shell is not None and number < shell.deep:
                # Features are added to what it returns.
                found[number + 1].register_forward_pre_hook(keep_input(layers, number))
    try:
        logits_BSV = hf(**given, use_cache=False).logits.float().cpu()
    except (RuntimeError, IndexError, TypeError, ValueError) as error:
        raise ConfigError(f"transformers cannot compute with {model}: {error}") from error
    tokens_BS = given["input_ids"].cpu()
    logprobs_BSV = logits_BSV[:, :-1].log_softmax(-1)
    logprobs_BS = logprobs_BSV.gather(-1, tokens_BS[:, 1:].unsqueeze(-1)).squeeze(-1)
    return ModelOutputs(logits_BSV, logprobs_BS, layers)


def _describe_batch(hf: Any, data: BatchedDataDict, shell: Shell | None) -> dict[str, torch.Tensor]:
    """What transformers' class is called with."""
    tokens_BS = data["input_ids"]
    given = {"input_ids": tokens_BS}
    if shell is not None:
        given |= shell.join({key: data[key] for key in shell.attachments if key in data})
    named = next((each for each in _TYPES if each in inspect.signature(hf.forward).parameters), "")
    for number, medium in enumerate(() if shell is None else shell.media, start=1):
        if medium.start is not None:  # its class makes positions of what a mask names
            given["attention_mask"] = torch.ones_like(tokens_BS)
        elif medium.values in given and named:
            given[named] = (tokens_BS == medium.placeholder).int() * number
    return {name: tensor.to(current_device()) for name, tensor in given.items()}


def _load(model: str, dtype: str) -> Any:
    """Load the checkpoint's config and safetensors, and nothing else from its directory."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig

    plainly = {"attn_implementation": "eager", "trust_remote_code": False}
    if hasattr(PretrainedConfig, "_experts_implementation"):
        # The fast implementation of newer releases only supports some widths.
        plainly["experts_implementation"] = "eager"
    root = locate(model)
    config = written_config(root)
    family = family_of(str(config.get("model_type")))
    kind: Any = AutoModelForImageTextToText if family.surrounded else AutoModelForCausalLM
    if (section := config.get("quantization_config")) is not None:
        if quantisation.scheme_of(section) is None:
            why = quantisation.refusal(section)
        else:
            why = (
                f"the checkpoint is quantised to {quantisation.named(section)}, and a reference is "
                "not; convert it to Megatron-Core's format and back, which writes bfloat16, and "
                "compare that"
            )
        raise ConfigError(f"{model}: {why}")
    files = inventory(root)
    with for_transformers(config) as folder:
        weight_map: dict[str, str] = {}  # by our own names of files
        for number, (path, tensors) in enumerate(files.items()):
            name = f"model-{number + 1:05}-of-{len(files):05}.safetensors"
            (folder / name).symlink_to(path.absolute())
            weight_map |= dict.fromkeys(tensors, name)
        index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
        (folder / INDEX).write_bytes(strict_json.encoded(index))
        try:
            hf = kind.from_pretrained(folder, dtype=dtype_named(dtype), **plainly)
        except MemoryError:
            raise
        except Exception as error:  # loading a damaged checkpoint can raise anything
            message = str(error).replace(str(folder), model)
            raise ConfigError(f"transformers cannot load {model}: {message}") from error
    chosen = getattr(hf.config, "_attn_implementation", None)
    assert chosen == "eager", f"transformers chose {chosen!r}"
    return hf.to(current_device()).eval()


def _decoder_layers(hf: Any, num_layers: int) -> torch.nn.ModuleList:
    decoder = hf.base_model
    for name in DECODERS:
        decoder = getattr(decoder, name[:-1], decoder)
    decoder = getattr(decoder, "base_model", decoder)  # of one with its head
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, torch.nn.ModuleList) or len(layers) < num_layers:
        raise ConfigError(
            f"{type(hf).__name__} does not keep its {num_layers} decoder layers in a list "
            "`layers`; compare without --per-layer"
        )
    return layers[:num_layers]
