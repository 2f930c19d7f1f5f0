"""Parts of a decoder layer that the families need beyond Megatron-Core's own; `layer_spec` puts
them in. Read `attention.py` first.
"""
