"""Handing the weights on in Hugging Face format: a pure plan, the gathering of tensors, and where
they go.
"""
