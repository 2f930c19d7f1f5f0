"""What one rank says of its model, and torch's own context parallelism, under the names of the
host's DTensor worker.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_policy.policy import MegatronPolicy


class WorkerModel:
    """The model's config, and contexts for models of the caller's own: `train` and everything else
    of a policy splits sequences by itself, and needs none.
    """

    policy: MegatronPolicy

    def return_model_config(self) -> Any:
        """Transformers' config of the model."""
        from megatron_policy.converters.formats.hf_config import transformers_config

        config = self.policy.config
        return transformers_config(config.model_name, config.hf_config_overrides)

    @staticmethod
    def create_context_parallel_ctx(
        cp_mesh: Any,
        cp_buffers: Any,
        cp_seq_dims: Any,
        cp_no_restore_buffers: Any,
        cp_rotate_method: str | None = None,
    ) -> Any:
        """Torch's `context_parallel`."""
        from torch.distributed.tensor.experimental import context_parallel
        from torch.distributed.tensor.experimental._attention import set_rotate_method

        if cp_rotate_method is not None:
            set_rotate_method(cp_rotate_method)
        return context_parallel(
            cp_mesh,
            buffers=cp_buffers,
            buffer_seq_dims=cp_seq_dims,
            no_restore_buffers=cp_no_restore_buffers,
        )

    @staticmethod
    @contextmanager
    def train_context(cp_context: Any = None) -> Iterator[None]:
        """A pass within `cp_context`, by fused kernels."""
        from torch.nn.attention import SDPBackend, sdpa_kernel

        with ExitStack() as stack:
            if cp_context is not None:
                fused = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
                stack.enter_context(sdpa_kernel(fused))
                stack.enter_context(cp_context)
            yield
