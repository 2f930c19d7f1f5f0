"""Inference engines that follow a policy: one folder for each kind, for its own process."""
