"""Loads whole sets of weights into a vLLM model whose parameters were processed for its kernels.

After loading, vLLM packs, shuffles or quantises parameters, which lose their loaders. Its layerwise
reload gives every layer the parameters of the checkpoint's form back, fills them, processes them
again, and copies the result into the memory that kernels and graphs read
(`vllm.model_executor.model_loader.reload`; run with vLLM 0.31.0 on CPUs).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from megatron_policy.errors import RefitError


class ModelReload:
    """Reloads one model, set after set. A set that ends without `finish` leaves the model usable:
    each layer has all of its new weights, or its old ones.
    """

    def __init__(self, model: Any, vllm_config: Any, *, keeps_tensors: bool) -> None:
        """`model` and `vllm_config` are the worker's. `keeps_tensors` says that what `load` gets
        stays as it is until `finish`; else it is copied, as vLLM reads a tensor only when its layer
        is complete.
        """
        self._model, self._config = model, vllm_config
        self._keeps_tensors = keeps_tensors
        self._under_way = False
        self._kernels: dict[Any, Any] = {}
        self._direct = DirectLoads(model)
        self._tied: list[list[str]] = []
        self._kinds: set[str] = set()
        self._unread: list[str] = []

    def begin(self) -> None:
        """Begin a set, and drop one that was not finished, also of another reload."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        layers = self._model.modules()
        half_loaded = any(get_layerwise_info(layer).can_load() for layer in layers)
        self._under_way = self._under_way or half_loaded
        self.close()
        self._under_way = True
        self._unread.clear()
        self._tied = [*_find_tied(self._model)]
        # A method that has a kernel copies new weights into its memory in the checkpoint's order,
        # and leaves out the packing that this kind of experts wants: without a kernel it makes a
        # new one, as it did at first.
        for method in _find_packing_methods(self._model):
            self._kernels[method], method.moe_kernel = method.moe_kernel, None
        with self._configured():
            initialize_layerwise_reload(self._model)
            self._direct.begin()

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load some tensors of the set by Hugging Face name; any error of vLLM's loader."""
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check

        # A piece of a set need not have all of a layer for multi-token prediction.
        with self._configured(), disable_mtp_completeness_check():
            if not self._keeps_tensors:
                weights = ((name, tensor.clone()) for name, tensor in weights)
            known = self._load_new_kinds(weights)
            if known:
                self._direct.record(self._model.load_weights(known))

    def finish(self) -> None:
        """End a complete set. RefitError if vLLM has parameters that it did not fill from it, or
        none for some of its tensors.
        """
        if self._unread:
            raise RefitError(
                f"vLLM's {type(self._model).__name__} has no parameters for tensors like "
                f"{', '.join(self._unread[:8])}: it computes without them, from its start on"
            )
        # Of quantised models others than the trainer may have a layer's weights, but none a part.
        quantised = self._config.model_config.quantization is not None
        missing = set(_find_missing(self._model, in_parts=quantised)) - self._direct.filled
        for names in self._tied:
            missing -= set() if missing.issuperset(names) else set(names)
        if missing:
            raise RefitError(
                f"vLLM has loaded nothing into {len(missing)} of its parameters: "
                f"{', '.join(sorted(missing)[:4])}"
            )
        with self._configured():
            self._direct.process()
        self._finalize()

    def close(self) -> None:
        """Drop a set that was begun and not finished, if there is one: what vLLM has not completed
        gets back what it had.
        """
        if not self._under_way:
            return
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        for layer in self._model.modules():
            info = get_layerwise_info(layer)
            if info.can_load():
                # vLLM would complete half of a layer with unwritten memory, and leaves one alone
                # that nothing was loaded into.
                info.loaded_weights, info.load_numel, info.load_numel_total = [], 0, 0
        self._finalize()

    def _finalize(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        with self._configured():
            finalize_layerwise_reload(self._model, self._config.model_config)
            self._process_tied()
            self._unpack_convolutions()
        for method, kernel in self._kernels.items():
            method.moe_kernel = method.moe_kernel or kernel  # if the layer was not loaded
        self._kernels.clear()
        self._under_way = False

    def _load_new_kinds(self, weights: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        """Load the first tensor of each kind alone, and return all others: the loaders of vLLM's
        models pass over names that they do not know, and say only what they have loaded.
        """
        others = []
        for name, tensor in weights:
            kind = _kind_of(name)
            if kind in self._kinds:
                others.append((name, tensor))
                continue
            into = self._model.load_weights([(name, tensor)])
            if self._direct.find_lost(into):
                into = self._model.load_weights([(name, tensor)])
            self._direct.record(into)
            if into is None or into or self._is_for_drafts(name) or self._is_left_out(name):
                self._kinds.add(kind)
            elif not self._may_be_elsewhere(name):
                self._unread.append(name)
        return others

    def _may_be_elsewhere(self, name: str) -> bool:
        """Whether another worker may have the layer or the expert."""
        parallel = self._config.parallel_config
        return parallel.pipeline_parallel_size > 1 or (
            parallel.enable_expert_parallel and ".experts." in name
        )

    def _is_left_out(self, name: str) -> bool:
        """Whether it is the norm behind a tower whose features are taken before it, in vLLM as in
        the model's own class, which computes nothing.
        """
        return ".post_layernorm." in name and any(
            vars(module).get("post_layernorm", name) is None for module in self._model.modules()
        )

    def _is_for_drafts(self, name: str) -> bool:
        """Whether it is of a layer for multi-token prediction, which vLLM has in another model."""
        layers = self._config.model_config.hf_text_config.num_hidden_layers
        number = re.match(r"model\.layers\.(\d+)\.", name)
        apart = name.startswith("mtp.") or "mtp_layers." in name
        return apart or (number is not None and int(number[1]) >= layers)

    def _process_tied(self) -> None:
        """Pack weights again for all modules that share them: the reload does it for the one that
        the checkpoint names, an embedding, and a head on the CPU goes on with its old packed copy.
        """
        for names in self._tied:
            for path, _, own in (name.rpartition(".") for name in names):
                module = self._model.get_submodule(path)
                method = getattr(module, "quant_method", None)
                if own == "weight" and method is not None:  # others, as biases, are as they were
                    method.process_weights_after_loading(module)

    def _unpack_convolutions(self) -> None:
        """Mamba2 reads its convolution's weight through a view of what was loaded at first. CPUs
        with AVX-512 in bf16 pack it into other memory, and the reload fills that one alone.
        """
        for module in self._model.modules():
            convolution = getattr(module, "conv1d", None)
            new = getattr(convolution, "_cpu_unpacked_conv_weight", None)
            if new is not None and "conv_weights" in module._buffers:
                module.conv_weights.copy_(new)

    def _configured(self) -> Any:
        from vllm.config import set_current_vllm_config

        return set_current_vllm_config(self._config)


class DirectLoads:
    """Parameters that a model's `load_weights` fills itself (`param.copy_`), with no loader that
    the layerwise reload could wrap: it has put them on torch's meta device, where all is lost, as
    with the experts and the sinks of `GptOssForCausalLM`. They get memory while they are loaded.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._kinds: set[str] = set()
        self.filled: set[str] = set()
        """Names of those that have been loaded of the set that is under way."""

    def begin(self) -> None:
        """Begin a set, when the reload has begun it."""
        self.filled.clear()
        self._give_memory()

    def find_lost(self, into: set[str] | None) -> bool:
        """Whether what was loaded into these parameters is lost; they have memory from now on."""
        lost = {_kind_of(name) for name in into or () if self._is_lost(name)}
        self._kinds |= lost
        self._give_memory()
        return bool(lost)

    def record(self, into: set[str] | None) -> None:
        """These parameters were loaded."""
        self.filled |= {name for name in into or () if _kind_of(name) in self._kinds}

    def process(self) -> None:
        """Process them for their kernels, as the reload does with those that it has loaded."""
        from vllm.model_executor.model_loader.reload import layerwise

        for name in dict.fromkeys(name.rpartition(".")[0] for name in sorted(self.filled)):
            layer = self._model.get_submodule(name)
            info = layerwise.get_layerwise_info(layer)
            if info.can_load():
                with torch.no_grad():
                    layerwise._layerwise_process(layer, info)

    def _is_lost(self, name: str) -> bool:
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        prefix, _, own = name.rpartition(".")
        try:
            layer = self._model.get_submodule(prefix)
        except AttributeError:
            return False  # some models return names of the checkpoint's
        info, parameter = get_layerwise_info(layer), layer._parameters.get(own)
        kept = {loaded for loaded, _ in info.loaded_weights}
        return parameter is not None and parameter.is_meta and own not in kept

    def _give_memory(self) -> None:
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
        from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor

        for prefix, layer in self._model.named_modules() if self._kinds else ():
            for name, parameter in [*layer._parameters.items()]:
                own = parameter is not None and _kind_of(f"{prefix}.{name}") in self._kinds
                if own and parameter.is_meta:
                    with get_layerwise_info(layer).restore_device:
                        setattr(layer, name, materialize_meta_tensor(parameter))


def _kind_of(name: str) -> str:
    """A tensor's name without the numbers of its layer and its expert."""
    return re.sub(r"\d+", "#", name)


def _find_tied(model: nn.Module) -> Iterator[list[str]]:
    """Names of each parameter that several modules have."""
    names: dict[int, list[str]] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                names.setdefault(id(parameter), []).append(f"{prefix}.{name}")
    yield from (same for same in names.values() if len(same) > 1)


def _find_packing_methods(model: nn.Module) -> Iterator[Any]:
    """The methods of unquantised experts whose kernels prepare weights on their own."""
    from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEExperts
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
        UnquantizedFusedMoEMethod,
    )

    plain = FusedMoEExperts.process_weights_after_loading
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, UnquantizedFusedMoEMethod) and method.moe_kernel is not None:
            experts = type(method.moe_kernel.fused_experts)
            if experts.process_weights_after_loading is not plain:
                yield method


def _find_missing(model: nn.Module, *, in_parts: bool) -> Iterator[str]:
    """Parameters into which nothing has been loaded, of a set that is under way; if `in_parts`, of
    layers into which something was.
    """
    from vllm.model_executor.layers.attention import is_deferred_attention_layer
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS

    for prefix, layer in model.named_modules():
        info = get_layerwise_info(layer)
        # A complete layer was processed at once. Scales of attention have values without any.
        partly = info.loaded_weights and not is_deferred_attention_layer(layer)
        if info.can_load() and (partly or not in_parts):
            filled = {name for name, _ in info.loaded_weights}
            yield from (
                f"{prefix}.{name}"
                for name, parameter in layer.named_parameters(recurse=False)
                if name not in SKIP_TENSORS | filled and parameter.numel()
            )
