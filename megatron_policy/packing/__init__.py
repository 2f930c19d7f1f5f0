"""How sequences of unequal length become microbatches: bins, their assignment to ranks, and where
each token stands. Read `plan.py` first, then `tokens.py`.
"""
