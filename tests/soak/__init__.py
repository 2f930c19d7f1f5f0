"""Things done many times, to see what happens seldom: each module runs by itself, with a count."""
