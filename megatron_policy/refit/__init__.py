"""Handing weights to an inference engine in Hugging Face format: a plan, the gathering of tensors,
and the transports. Read `delivery.py` first, then `plan.py` and `sources.py`.
"""
