"""A policy as Megatron-Core's `GPTModel`: build, run through the pipeline, optimize, generate. The
only package that imports `megatron`. Read `assemble.py` first, then `layer_spec.py` and
`pipeline.py`.
"""

import importlib.util
import sys
from typing import Any

from megatron_policy.device import is_accelerated, load_torchs_cudnn

_NEED_A_GPU = ("transformer_engine", "transformer_engine_torch", "apex", "amp_C")


def prepare_imports(modules: dict[str, Any] = sys.modules) -> None:
    """Decide what Megatron-Core finds when it is imported, which follows.

    Megatron-Core takes optimizers and norms from Transformer Engine or Apex wherever these can be
    imported; without a GPU every training step would then raise. A module that is None in
    `sys.modules` cannot be imported. With a GPU, Transformer Engine is to find torch's cuDNN.
    """
    if is_accelerated():
        if importlib.util.find_spec("transformer_engine") is not None:
            load_torchs_cudnn()
        return
    for name in _NEED_A_GPU:
        modules[name] = None


prepare_imports()
