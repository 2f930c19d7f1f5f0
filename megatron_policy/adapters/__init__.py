"""Low-rank adapters: their rows and tables, which weights have one, and PEFT's directories of them.

Read `table.py` first. The layers that compute with them belong to the engine.
"""
