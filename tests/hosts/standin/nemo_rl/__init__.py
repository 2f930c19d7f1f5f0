"""A small stand-in of NeMo RL: how its driver starts and calls a Megatron worker, and nothing else.

It keeps to the host's contract (names, keyword arguments, environment, who answers) in both of its
forms: `policy.Contract` says which. It has none of the host's algorithms.
"""
