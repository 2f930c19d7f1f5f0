"""What all formats of weight files have in common: tensors as bytes, digests, and the manifest of a
directory. Read `manifest.py` first.
"""
