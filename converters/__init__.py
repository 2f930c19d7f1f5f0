"""Hugging Face checkpoints <-> Megatron-Core parameters: one table per family for both ways. Read
`families/qwen2.py` first, then `rows/blocks.py`, `rows/kinds.py` and `table.py`.
"""
