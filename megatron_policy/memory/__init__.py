"""Where a policy's parameters, gradients and optimizer state are: the memory states, and how
storages move between device and host. Read `states.py` first, then `device_memory.py`.
"""
