"""Makes the parts of the documentation site that follow from the code: keys, commands, names, and
pages of files that are not in docs/. Read `hooks.py` first: MkDocs calls it.
"""
