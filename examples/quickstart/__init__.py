"""GRPO on CPU, from a random model to a policy that does its task; `run.py` starts it."""
