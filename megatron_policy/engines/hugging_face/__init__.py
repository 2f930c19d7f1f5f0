"""Transformers' own modules as a training engine, sharded by torch's FSDP2. Read `assemble.py`
first.
"""
