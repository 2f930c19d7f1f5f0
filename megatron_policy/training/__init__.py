"""Engine-independent training steps: cut data into microbatches, call the loss, report results.
Read `step.py` first, then `batching.py` and `losses.py`.
"""
