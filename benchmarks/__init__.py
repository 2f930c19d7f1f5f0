"""Measures the policy against physical limits and plain Megatron-Core; no part of the package."""
