"""From hidden states to log-probabilities, entropies and top-k, in tiles of the vocabulary, without
materialising the logits. Read `output.py` first, then `fused.py`.
"""
