"""What a model costs before it is built, and what devices can do at best. Read `flops.py` first."""
