"""The training engines: what a policy is computed with. Each implements `interfaces.engine`, and is
the only package that imports its foreign library. Read `megatron/assemble.py` first.
"""
