"""Tests of what only computes: `make check` runs every case, see `conftest.py`."""
