"""vLLM: what its workers are told, and what the process that owns an `LLM` calls.

Read `engine.py` first, then `worker.py` and `reload.py`.
"""
