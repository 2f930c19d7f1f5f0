"""The parts of a decoder layer that the families need beyond Megatron-Core's own, each put in by
`layer_spec`. Read `attention.py` first.
"""
