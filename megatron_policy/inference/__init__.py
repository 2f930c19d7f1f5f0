"""Inference engines that follow a policy: one folder for each kind, for its own process and for the
trainer's. Read `vllm/transfer.py` first.
"""
