"""Hugging Face checkpoints <-> Megatron-Core parameters: one table per family for both ways."""
