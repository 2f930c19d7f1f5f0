"""From an architecture to this rank's trained modules: build, load, optimize; knows nothing of
batches or losses.
"""
