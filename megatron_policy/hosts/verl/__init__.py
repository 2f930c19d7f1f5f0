"""verl as a host: its training workers use a policy as their engine, unmodified.

Read `engine.py` first, then `data.py`. `config.py` registers the engines with verl; `keys.py` and
`translate.py` say what becomes of verl's configuration.
"""
