"""The transports from a trainer to an engine: shared memory and CUDA IPC, a process group, files.
Read `../delivery.py` first: it calls them.
"""
