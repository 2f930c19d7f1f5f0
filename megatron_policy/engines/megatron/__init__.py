"""A policy as Megatron-Core's `GPTModel`: build, run through the pipeline, optimize, generate. The
only package that imports `megatron`. Read `assemble.py` first, then `layer_spec.py` and
`pipeline.py`.
"""
