"""Scenarios: one small file for each subject, see `benchmarks.bench.scenario`."""
