"""The package's version."""

VERSION = "0.2.0"
