"""Transports through memory shared by two processes on one machine. Read `transport.py` first, then
`protocol.py`.
"""
