"""Training checkpoints: a policy's weights and optimizer on the disk, for any layout to load."""
