"""Refits that send only the elements that have changed: their encoding, what a trainer finds, and
how an engine applies it. Read `changes.py` first, then `message.py` and `chain.py`.
"""
