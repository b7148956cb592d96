"""Benchmarks of jobs on many machines: ``python -m benchmarks.distributed.NAME``."""
