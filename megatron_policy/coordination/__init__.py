"""How processes agree, fail together, time out and leave: the ranks of a policy by `barrier` and
`collectives`, a trainer and its engines by `control_store`. Read `barrier.py` first.
"""
