"""Measures the policy against physical limits and plain Megatron-Core; not part of the package."""
