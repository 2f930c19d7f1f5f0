"""A policy as Megatron-Core's `GPTModel`: build, run through the pipeline, optimize, generate. The
only package that imports `megatron`. Read `assemble.py` first, then `layer_spec.py` and
`pipeline.py`.
"""

import sys
from typing import Any

from megatron_policy.device import is_accelerated, prefer_torchs_cudnn

_NEED_A_GPU = ("transformer_engine", "apex", "amp_C")


def prepare_imports(modules: dict[str, Any] = sys.modules) -> None:
    """Decide what Megatron-Core finds when it is imported, which follows.

    Megatron-Core takes optimizers and norms from Transformer Engine or Apex wherever these can be
    imported; without a GPU every training step would then raise. A module that is None in
    `sys.modules` cannot be imported. With a GPU, Transformer Engine is to load torch's cuDNN.
    """
    if is_accelerated():
        prefer_torchs_cudnn()
        return
    for name in _NEED_A_GPU:
        modules[name] = None


prepare_imports()
