"""GRPO on CPU, from an empty model to a policy that does its task; `run.py` starts it."""
