"""The driver's side: dispatches batches to the workers and joins their results; each base class of
`Policy` has the methods of one subject. Read `policy.py` first.
"""
