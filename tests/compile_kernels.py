"""Compiles the head's kernels for GPUs that need not be there: `python -m tests.compile_kernels`.

Prints a line for each: the kernel, the compute capability, the dtype of the products, and how many
loads and stores of 16 bytes it has.
"""

from __future__ import annotations

import re
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megatron_policy.lm_head.triton_tiles import (
    BLOCK,
    WARPS,
    add_logits_kernel,
    to_gradient_kernel,
)

WARP = 32
ALIGNED = [["tt.divisibility", 16]]
"""What Triton finds out about pointers to whole tensors, and about widths of aligned tiles."""


def argument_type(name: str, dtype: str) -> str:
    if name == "product_RW":
        return f"*{dtype}"
    if name == "local_NK":
        return "*i64"
    if name.endswith(("_N", "_NK", "_MN")):
        return "*fp32"
    if name.isupper():
        return "constexpr"
    return "fp32" if name in ("gain", "cap", "factor") else "i32"


def compile_for(kernel: Any, capability: int, dtype: str) -> tuple[int, int]:
    """The kernel with everything switched on: its loads and its stores of 16 bytes."""
    types = {name: argument_type(name, dtype) for name in kernel.arg_names}
    values = {"CAPPED": True, "ENTROPY": True, "BLOCK": BLOCK, "TARGETS": 1}
    constants = {(i,): values[name] for i, name in enumerate(types) if types[name] == "constexpr"}
    wide = {
        (i,): ALIGNED
        for i, (name, kind) in enumerate(types.items())
        if kind.startswith("*") or name == "width"
    }
    compiled = triton.compile(
        ASTSource(kernel, types, constexprs=constants, attrs=wide),
        target=GPUTarget("cuda", capability, WARP),
        options={"num_warps": WARPS},
    )
    assert compiled.asm["cubin"], "not assembled"
    assembly = compiled.asm["ptx"]
    loads, stores = (
        re.findall(rf"{what}\.global[\w.:]*\.v4\.b32", assembly) for what in ("ld", "st")
    )
    return len(loads), len(stores)


if __name__ == "__main__":
    for kernel in (add_logits_kernel, to_gradient_kernel):
        for capability in (80, 90):
            for dtype in ("fp32", "bf16", "fp16"):
                print(kernel.__name__, capability, dtype, *compile_for(kernel, capability, dtype))
