"""What several families have in common: rows and config fields of dense decoders, experts, MLA and
further norms. Read `dense.py` first.
"""
