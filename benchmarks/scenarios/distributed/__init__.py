"""Benchmarks of jobs on many machines: ``python -m benchmarks --run distributed.NAME``."""
