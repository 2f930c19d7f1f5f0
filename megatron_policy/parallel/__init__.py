"""The rank grid and which rank holds which layer: arithmetic, and the process groups of a rank.
Read `topology.py` first.
"""
