"""The engine's side of a refit. It imports neither Megatron-Core nor Ray. Read `receiver.py` first,
then `assembler.py`.
"""
