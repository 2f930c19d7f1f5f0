"""Hugging Face checkpoints <-> Megatron-Core parameters: one table per family for both ways. Read
`blocks.py` first, then `rows.py` and `table.py`.
"""
