"""A training step over any engine: cut data into microbatches, call the loss, report. Read
`step.py` first, then `batching.py` and `losses.py`.
"""
