"""Training checkpoints: a policy's weights and optimizer on disk, for any layout to load. Read
`contents.py` first, then `saving.py` and `loading.py`.
"""
