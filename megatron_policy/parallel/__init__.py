"""The rank grid, the layers of each rank, and a rank's process groups. Read `topology.py` first."""
