"""Causal attention on torch's kernels, for any training engine: padded or packed sequences,
windows, softcaps and sinks, under context parallelism. Read `causal.py` first.
"""
