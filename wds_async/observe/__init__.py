"""Observation of a job: ledger, cost, metrics, progress, diagnosis."""
