"""Loads whole sets of weights into a vLLM model whose parameters were processed for its kernels.

After loading, vLLM packs, shuffles or quantises parameters, which lose their loaders. Its layerwise
reload gives every layer the parameters of the checkpoint's form back, fills them, processes them
again, and copies the result into the memory that kernels and graphs read
(`vllm.model_executor.model_loader.reload`, from vLLM 0.11 on; run with 0.31.0 on CPUs).
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from megatron_policy.errors import RefitError


class ModelReload:
    """Reloads one model, set after set. A set that ends without `finish` leaves the model usable,
    with weights of several sets.
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
        self._tied: list[nn.Module] = []

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load some tensors of the set by Hugging Face name; any error of vLLM's loader."""
        with self._configured():
            if not self._under_way:
                self._begin()
            self._model.load_weights(weights if self._keeps_tensors else _copies(weights))

    def finish(self) -> None:
        """End a complete set. RefitError if vLLM has parameters that it did not fill from it."""
        missing = list(_find_missing(self._model, self._tied))
        self.close()
        if missing and self._config.model_config.quantization is None:
            raise RefitError(
                f"vLLM has loaded nothing into {len(missing)} of its parameters: "
                f"{', '.join(missing[:4])}"
            )

    def close(self) -> None:
        """Give layers back to their kernels, with what has been loaded, if a set is under way."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        if not self._under_way:
            return
        try:
            with self._configured():
                finalize_layerwise_reload(self._model, self._config.model_config)
                # A tied head has a packed copy of its own, and nothing was loaded into it.
                for layer in self._tied:
                    layer.quant_method.process_weights_after_loading(layer)
        finally:
            self._under_way = False
            for method, kernel in self._kernels.items():
                method.moe_kernel = method.moe_kernel or kernel  # if the layer was not loaded
            self._kernels.clear()

    def _begin(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self._under_way = True
        # A method that has a kernel copies new weights into its memory in the checkpoint's order,
        # and leaves out the packing that this kind of experts wants: without a kernel it makes a
        # new one, as it did at first.
        self._tied = list(_find_tied(self._model))
        for method in _find_packing_methods(self._model):
            self._kernels[method], method.moe_kernel = method.moe_kernel, None
        initialize_layerwise_reload(self._model)

    def _configured(self) -> Any:
        from vllm.config import set_current_vllm_config

        return set_current_vllm_config(self._config)


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


def _find_tied(model: nn.Module) -> Iterator[nn.Module]:
    """Layers with a method of their own for parameters that an earlier layer has too."""
    seen: set[int] = set()
    for layer in model.modules():
        own = {id(parameter) for parameter in layer.parameters(recurse=False)}
        if own and own <= seen and hasattr(layer, "quant_method"):
            yield layer
        seen |= own


def _find_missing(model: nn.Module, tied: Container[nn.Module]) -> Iterator[str]:
    """Parameters into which nothing has been loaded, of a set that is under way."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS

    for prefix, layer in model.named_modules():
        info = get_layerwise_info(layer)
        if info.can_load() and layer not in tied:  # a complete layer was processed at once
            filled = {name for name, _ in info.loaded_weights}
            yield from (
                f"{prefix}.{name}"
                for name, parameter in layer.named_parameters(recurse=False)
                if name not in SKIP_TENSORS | filled and parameter.numel()
            )


def _copies(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    return ((name, tensor.clone()) for name, tensor in weights)
