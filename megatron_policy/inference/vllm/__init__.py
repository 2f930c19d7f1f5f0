"""vLLM: what its workers are told, and what the process that owns an `LLM` calls.

Read `transfer.py` first for its own weight transfer.
"""
