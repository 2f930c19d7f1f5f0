"""A policy that trains, and an engine in another process that generates with its weights."""
