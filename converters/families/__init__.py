"""The model families, one file each: its rows, and what the fields of its config.json mean. Read
`llama.py` first, then `shared/dense.py`; `../registry.py` lists them all.
"""
