"""The driver's policy."""
