"""Fuzzing of everything that reads what others have written; see ``python -m tests.fuzz --help``."""
