"""The frozen reference policy: other weights in host memory, exchanged with the live ones on
demand, or the same weights without adapters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch

from megatron_policy.adapters.loading import load_adapters
from megatron_policy.config import PolicyConfig
from megatron_policy.config.model_table import bind_reference
from megatron_policy.converters.formats.hf_files import HfReader
from megatron_policy.errors import ConfigError, ConversionError
from megatron_policy.interfaces.engine import Adapters, TrainingEngine
from megatron_policy.memory.pinned_pool import HostCopies
from megatron_policy.weights.load import load_parameters

_KEY = "policy.reference_model_name"


class Reference:
    """What the model computes with while the reference is active: other values of some parameters,
    and no `adapters`, where these are given.
    """

    def __init__(
        self, parameters: Sequence[torch.Tensor] = (), adapters: Adapters | None = None
    ) -> None:
        """The values are those that `parameters` have now."""
        self._copies = HostCopies(parameters) if parameters else None
        self._adapters = adapters
        self._active = False

    @property
    def in_use(self) -> bool:
        """Whether the model computes with the reference's weights now."""
        return self._active

    @property
    def host_bytes(self) -> int:
        """Bytes of its weights in host memory."""
        return 0 if self._copies is None else self._copies.nbytes

    @contextmanager
    def active(self) -> Iterator[None]:
        """Within this context the model computes with the reference's weights; its own are always
        restored afterwards.
        """
        if self._active:
            raise ConfigError("the reference policy is active already: leave its context first")
        self._active = True
        try:
            with ExitStack() as stack:
                if self._adapters is not None:
                    stack.enter_context(self._adapters.off())
                if self._copies is not None:
                    stack.enter_context(self._copies.exchanged())
                yield
        finally:
            self._active = False


def reference_of(config: PolicyConfig, engine: TrainingEngine, *, wanted: bool) -> Reference | None:
    """The reference that the configuration names; by default the weights that the policy starts
    from, if it is `wanted`, with adapters the model without them, which takes no memory.

    ConfigError for files that the model of `engine` cannot have its weights from.
    """
    name, adapters = config.reference_model_name, engine.adapters
    if name is None:
        if adapters is not None:
            return Reference(adapters=adapters)
        return Reference([p for _, p in engine.held]) if wanted else None
    table = bind_reference(config, engine.table)
    if table is not None:
        found = Reference([p for _, p in engine.held], adapters)
        with found.active(), _naming_the_key(), HfReader(name) as reader:
            load_parameters(engine.held, reader, table, engine.place)
        return found
    # The same weights with other adapters.
    assert adapters is not None, "checked with the table"
    found = Reference([p for _, p in adapters.held])
    or_else = ". Or merge them into their base, as export_hf does, and name that"
    with found.active(), _naming_the_key(or_else):
        load_adapters(name, adapters.held, adapters.table, engine.place, adapters.spec)
    return found


@contextmanager
def _naming_the_key(or_else: str = "") -> Iterator[None]:
    """Errors of files say which key named them, and what `or_else` to do."""
    try:
        yield
    except (ConfigError, ConversionError) as error:
        raise ConfigError(f"{_KEY}: {error}{or_else}") from error
