"""What one rank says of its model, and torch's own context parallelism, under the names of the
host's DTensor worker.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from megatron_policy.policy import MegatronPolicy


class WorkerModel:
    """The model's config, and contexts for models of the caller's own: `train` and everything else
    of a policy splits sequences by itself, and needs none.
    """

    policy: MegatronPolicy

    def return_model_config(self) -> Any:
        """The model's config as transformers has it, with `policy.hf_config_overrides`."""
        from megatron_policy.converters.formats.hf_config import transformers_config

        config = self.policy.config
        return transformers_config(config.model_name, config.hf_config_overrides)

    @staticmethod
    def create_context_parallel_ctx(
        cp_mesh: DeviceMesh,
        cp_buffers: list[torch.Tensor],
        cp_seq_dims: list[int],
        cp_no_restore_buffers: set[torch.Tensor],
        cp_rotate_method: str | None = None,
    ) -> AbstractContextManager[None]:
        """torch's context in which each buffer is this rank's part of its sequence dimension, and
        fused attention is over all parts. Buffers that are not named are whole again afterwards.

        `cp_rotate_method` is how keys and values travel, "allgather" or "alltoall"; it stays set.
        """
        from torch.distributed.tensor.experimental import context_parallel
        from torch.distributed.tensor.experimental._attention import set_rotate_method

        if cp_rotate_method is not None:
            set_rotate_method(cp_rotate_method)
        # torch declares a generator, and returns a context manager.
        made: Any = context_parallel(
            cp_mesh,
            buffers=cp_buffers,
            buffer_seq_dims=cp_seq_dims,
            no_restore_buffers=cp_no_restore_buffers,
        )
        return made  # type: ignore[no-any-return]

    @staticmethod
    @contextmanager
    def train_context(cp_context: AbstractContextManager[None] | None = None) -> Iterator[None]:
        """The context of a forward and backward pass: with `cp_context`, torch's attention takes
        the fused kernels that it can split.
        """
        from torch.nn.attention import SDPBackend, sdpa_kernel

        with ExitStack() as stack:
            if cp_context is not None:
                fused = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
                stack.enter_context(sdpa_kernel(fused))
                stack.enter_context(cp_context)
            yield
