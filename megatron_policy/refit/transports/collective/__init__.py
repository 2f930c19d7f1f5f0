"""Weights broadcast over a process group of trainer and engines. Read `transport.py` first, then
`handshake.py`.
"""
