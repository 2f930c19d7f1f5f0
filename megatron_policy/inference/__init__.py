"""Inference engines that follow a policy; one folder for each kind of engine.

Read `vllm/transfer.py` first.
"""
