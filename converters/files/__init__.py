"""Files and directories that can be damaged, hostile or in use: contained reads, strict JSON,
locks, directories that appear whole. Read `contained.py` first, then `publishing.py`.
"""
