"""Which elements of the checkpoint's tensors this rank holds, and how they are read. Read
`geometry.py` first.
"""
