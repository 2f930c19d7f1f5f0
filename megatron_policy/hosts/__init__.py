"""The frameworks that this policy works in, one package each. Read `nemo_rl/__init__.py` first;
what hosts have in common is `../interfaces/host.py`.
"""
