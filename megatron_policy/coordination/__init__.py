"""How processes agree, fail together, time out and leave: the ranks of a policy by `operation`, a
trainer and its engines by `control_store`. Read `operation.py` first.
"""
