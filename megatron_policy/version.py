"""The package's version; knows nothing else."""

VERSION = "0.1.0"
