"""From hidden states to what a loss or a reader asks for: log-probabilities, entropies and top-k in
tiles of the vocabulary, without the logits. Read `output.py` first, then `fused.py`.
"""
