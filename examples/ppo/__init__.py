"""PPO of a small model with four models of this package; `run.py` is the program."""
