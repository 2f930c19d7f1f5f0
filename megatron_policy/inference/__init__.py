"""Inference engines that follow a policy: one folder for each kind, for the engine's own process."""
