"""Side-by-side measurements: each module is one command that starts its own servers and prints a table."""
