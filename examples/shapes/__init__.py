"""SFT and GRPO of a small model that sees pictures, on CPU; `run.py` starts it."""
