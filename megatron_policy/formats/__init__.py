"""What files of weights have in common, whatever the format: tensors as bytes, digests, and the
manifest of a directory. Read `manifest.py` first.
"""
