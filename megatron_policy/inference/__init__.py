"""Inference engines that follow a policy: a folder for each kind, for the engine's own process."""
