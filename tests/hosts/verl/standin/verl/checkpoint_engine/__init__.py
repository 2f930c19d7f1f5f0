"""See `base`."""
