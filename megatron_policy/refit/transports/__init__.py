"""How weights travel from a trainer to an engine, one package for each way: shared memory and CUDA
IPC, a process group, files. Read `../delivery.py` first: it calls them.
"""
