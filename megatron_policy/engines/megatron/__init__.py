"""A policy as Megatron-Core's `GPTModel`, the only package that imports `megatron`: build, run
through the pipeline, optimize, generate. Read `assemble.py` first, then `layer_spec.py` and
`pipeline.py`.
"""
