"""The extension of vLLM's workers, with what tests look at and break."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from megatron_policy.inference.vllm.worker import RefitExtension
from tests.memory_use import read_memory

BREAKING = "tests.vllm.extension.BreakingExtension"


class BreakingExtension(RefitExtension):
    """Methods of a worker, called by `collective_rpc`."""

    def refit_left_on_meta(self) -> list[str]:
        """Parameters and buffers without memory."""
        model = self.model_runner.get_model()
        named = (*model.named_parameters(), *model.named_buffers())
        return [name for name, tensor in named if tensor.is_meta]

    def refit_break_reading(self, name: str) -> None:
        """vLLM's loader raises where that tensor comes."""
        model = self.model_runner.get_model()
        load = type(model).load_weights

        def broken(weights: Iterable[tuple[str, Tensor]]) -> Any:
            def until() -> Any:
                for given, tensor in weights:
                    if given == name:
                        raise RuntimeError("broken while reading")
                    yield given, tensor

            return load(model, until())

        model.load_weights = broken

    def refit_break_processing(self, module: str) -> None:
        """vLLM raises while it prepares that module's weights for its kernel, after reading."""
        method = self.model_runner.get_model().get_submodule(module).quant_method

        def broken(layer: Any) -> None:
            raise RuntimeError("broken while processing")

        method.process_weights_after_loading = broken

    def refit_damage(self, where: tuple[str, int, int, float]) -> None:
        """Add to one element of a weight."""
        name, row, column, by = where
        layer = self.model_runner.get_model().get_submodule(name.removesuffix(".weight"))
        layer.weight.data[row, column] += by
        layer.quant_method.process_weights_after_loading(layer)

    def refit_repair(self, module: str) -> None:
        """Undo both."""
        model = self.model_runner.get_model()
        vars(model).pop("load_weights", None)
        vars(model.get_submodule(module).quant_method).pop("process_weights_after_loading", None)

    def refit_trust_tensors(self) -> None:
        """Keep what `load` is given, as if nobody reused its memory."""
        self.refit_model._keeps_tensors = True

    def refit_memory(self) -> dict[str, int]:
        """That of the worker's process."""
        return read_memory()
