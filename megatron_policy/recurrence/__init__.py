"""Recurrent layers' mathematics in plain torch, for any training engine: the gated delta rule,
Mamba2's scan, causal convolutions and gated norms over padded, packed and split sequences. Read
`chunks.py` first.
"""
