"""How sequences of unequal length become microbatches: bins, their dealing to ranks, and where each
token stands. Pure: torch index arithmetic, no process group and no model.
"""
