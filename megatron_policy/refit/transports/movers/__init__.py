"""What moves bytes into another process's memory, which that process has described. Read
`mover.py` first.
"""
