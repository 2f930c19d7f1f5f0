"""Exports weights, some names at a time, to an engine on the same machine; the caller passes on the
handles.

The protocol is that of NeMo RL before 0.5, `get_weights_ipc_handles`: for each device

    (True, [(dtype, (function, arguments)), ...], {name: offset})

where the function and its arguments, the seventh replaced by the number of the engine's GPU, give
a flat tensor that holds all named tensors of the dtype, each at its offset in elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from megatron_policy import device
from megatron_policy.errors import RefitError
from megatron_policy.refit.buffers import BufferSlice, align
from megatron_policy.refit.digest import Digests, algorithm_for
from megatron_policy.refit.manifest import Form, RefitManifest, with_digests
from megatron_policy.refit.transports.ipc.shared_memory import DIRECTORY, ExportedBuffer

if TYPE_CHECKING:
    from megatron_policy.refit.exporter import Exporter
    from megatron_policy.refit.plan import RefitTensor

Handles = dict[str, tuple[bool, list[tuple[torch.dtype, Any]], dict[str, int]]]
"""By device, as above."""


class IpcHandles:
    """Exports one policy's weights; the last export stays valid until the next or `release`."""

    def __init__(self, exporter: Exporter, directory: str = DIRECTORY) -> None:
        """Without a GPU, the memory is allocated in `directory`."""
        self._exporter, self._directory = exporter, directory
        self._exported: dict[torch.dtype, ExportedBuffer] = {}
        self._sent: dict[str, Form] = {}
        self._digests = self._no_digests()
        self._step: int | None = None
        self._of_adapters = False

    def weights(
        self, names: Sequence[str], step: int | None = None, *, adapters: bool = False
    ) -> Handles:
        """Export the tensors of these names, with `adapters` of those alone, to the engine on this
        rank's device; `step` is the number of optimizer steps taken so far.

        Collective: all ranks give the same names. The last call's memory must no longer be in use.
        RefitError on all ranks if one has not enough memory, if a name is unknown, or if earlier
        tensors of this refit were of another step or kind.
        """
        if self._sent:
            self._check_same(step, adapters)
        self._step, self._of_adapters = step, adapters
        self._close_buffers()
        exporter = self._exporter.select(adapters=adapters)
        exporter.begin()
        plan = exporter.plan(names=tuple(names))
        used: dict[torch.dtype, int] = {}
        places: dict[str, int] = {}  # the offset of each tensor in the memory of its dtype
        for tensor in plan.tensors:
            places[tensor.name] = used.setdefault(tensor.dtype, 0)
            used[tensor.dtype] += align(tensor.nbytes)
        failure: Exception | None = None
        try:
            for dtype, nbytes in used.items():
                buffer = ExportedBuffer(nbytes, self._exporter.device, self._directory)
                self._exported[dtype] = buffer
        except Exception as error:  # agreed on below, after this rank's part in the gathering
            failure = error
            self._close_buffers()

        def place(tensor: RefitTensor) -> BufferSlice | None:
            exported = self._exported
            return (
                BufferSlice(exported[tensor.dtype].buffer, places[tensor.name])
                if exported
                else None
            )

        for tensor, target in exporter.stream(plan, place):
            if target is not None:
                self._sent[tensor.name] = tensor.shape, tensor.dtype
                self._digests.add(tensor.name, target.bytes(tensor.nbytes))
        exporter.agree(failure)
        offsets = {t.name: places[t.name] // t.dtype.itemsize for t in plan.tensors}
        rebuilds = [(dtype, exported.rebuild(dtype)) for dtype, exported in self._exported.items()]
        return {device.device_id(): (True, rebuilds, offsets)}

    def manifest(self, step: int) -> RefitManifest:
        """The manifest of what was exported since the last one, for the engine to check; ends a
        refit. RefitError if that is nothing, or of another step.
        """
        if not self._sent:
            raise RefitError("nothing was exported since the last refit: call `weights` first")
        self._check_same(step, self._of_adapters)
        sent, digests = self._sent, self._digests
        model = self._exporter.select(adapters=self._of_adapters).served_model
        self._restart()
        return RefitManifest(step, digests.algorithm, with_digests(sent, digests.read()), model)

    def release(self) -> None:
        """Release all exported memory, and drop an unfinished refit."""
        self._close_buffers()
        self._restart()

    def _restart(self) -> None:
        self._sent, self._digests = {}, self._no_digests()

    def _no_digests(self) -> Digests:
        return Digests(algorithm_for(self._exporter.probe))

    def _check_same(self, step: int | None, adapters: bool) -> None:
        before = self._step
        if adapters != self._of_adapters:
            self._restart()
            raise RefitError(
                "a refit sends adapters alone or whole models: begin again with the first names"
            )
        if None not in (before, step) and before != step:
            self._restart()
            raise RefitError(
                f"the policy was trained during a refit: some weights were exported at step "
                f"{before}, and this is step {step}. Begin again with the first names"
            )

    def _close_buffers(self) -> None:
        for exported in self._exported.values():
            exported.close()
        self._exported = {}
