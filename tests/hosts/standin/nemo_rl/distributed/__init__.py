"""Workers, their room, their data."""
