"""Weights through memory that two processes of one machine share. Read `transport.py` first, then
`protocol.py`.
"""
