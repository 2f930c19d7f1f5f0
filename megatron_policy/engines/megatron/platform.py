"""Makes stock Megatron-Core usable on this machine."""

from __future__ import annotations

import contextlib

from megatron_policy.device import is_accelerated, prefer_flash_attention
from megatron_policy.engines.megatron import cpu_platform


def prepare_platform() -> bool:
    """Make stock Megatron-Core usable on this machine; call it before making groups or models.

    With a GPU this binds names that a missing Transformer Engine leaves unbound, and keeps torch's
    attention from cuDNN. Without one it also applies the patches of `cpu_platform`, once. Returns
    whether patches are active.
    """
    if is_accelerated():
        prefer_flash_attention()
    else:
        cpu_platform.apply()
    bind_unbound_names()
    return not is_accelerated()


def bind_unbound_names() -> None:
    """Bind names that some Megatron-Core releases use without Transformer Engine but bind only with
    it, to values that mean "there is no Transformer Engine". Names that are bound are left alone.

    Independent of the device: a machine with a GPU and without Transformer Engine needs them too.
    """
    import megatron.core.tensor_parallel.random as mcore_random
    import megatron.core.transformer.moe.moe_utils as moe_utils
    import megatron.core.transformer.multi_latent_attention as mcore_mla

    # Selective recomputation of norms asks an unbound class whether fp8 is on.
    if not hasattr(mcore_random, "FP8GlobalStateManager"):
        mcore_random.FP8GlobalStateManager = _NoFp8
        mcore_random.activation_recompute_forward = lambda **k: contextlib.nullcontext()
        mcore_random.fp8_autocast = lambda *a, **k: contextlib.nullcontext()
    # The router tests an unbound name to see whether a fused matrix product exists.
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    # MLA assumes that Transformer Engine is installed if its names import.
    if mcore_mla.HAVE_TE and not isinstance(mcore_mla.TELinear, type):
        mcore_mla.HAVE_TE = False


class _NoFp8:
    @staticmethod
    def is_fp8_enabled() -> bool:
        return False

    @staticmethod
    def get_fp8_recipe() -> None:
        return None
